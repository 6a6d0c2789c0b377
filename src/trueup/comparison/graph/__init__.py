"""The calls of one run as columns: slots, producers, parents, names. No judgement and no second run.

A `Stream` is one rank and step. Everything in `comparison` may import this room; it imports `store`, `kernels` and `model` alone.
"""
