"""Two models of one design in two frameworks: which layer is which, weights from one into the other, settings side by side.

`frameworks.trees` holds a model, read from a live one (`adapters/<framework>/models`) or a capture (`models`). `proposing` pairs
two trees, writes the map file, and converts weights in memory and files; `models` compares settings too. Stands on `frameworks`,
`store` and the comparison's map files; no framework is imported here.
"""
