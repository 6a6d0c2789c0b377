"""How far the two sides of a slot are apart, by whatever both captures hold: digests, bytes, sketches, statistics.

Imports `graph` and `normalise`; knows no threshold. Where a distance is not known it says why, as a fact (`why`).
"""
