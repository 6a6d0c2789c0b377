"""Two models of one design in two frameworks: which layer is which, weights from one into the other, settings side by side.

What a model is, `frameworks.trees` holds, read from a model (`adapters/<framework>/models`) or a capture (`captured`).
`proposing` pairs two trees and `map_file` writes that down; `weights` converts; `settings` and `optimizers` compare what is not a
tensor. Over `frameworks`, `store` and the comparison's map files; no framework is imported here.
"""
