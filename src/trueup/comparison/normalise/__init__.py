"""Rewrites that give two runs one form before anything is matched: names, layouts, packed weights, optimizer kernels.

A difference of form is a rewrite here and never a branch inside judging. Imports `graph`; imported by `measures` and `verdict`.
"""
