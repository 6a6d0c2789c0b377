"""The ground: facts, words, kernels and the capture directory. It imports no other floor.

Everything above may import it; a framework is never imported here.
"""
