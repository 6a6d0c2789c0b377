"""Captures from strangers, made by chance: `mutations` damages one, `exercising` reads and compares it, `run` does so for long."""
