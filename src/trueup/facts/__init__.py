"""Frozen facts that one room finds and another says: `why` (reasons and remarks of a comparison), `anomaly` (what overflows).

Nothing is decided, read or written here. Imports `trueup.model` alone, and may be imported by all.
"""
