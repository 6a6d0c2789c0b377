"""Curves with a verdict: what is read, what the tests say, and what is printed."""
