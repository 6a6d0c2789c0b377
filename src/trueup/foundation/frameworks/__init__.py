"""What frameworks have in common, as tables: functions, layers and optimizers, each with its names, layouts and meaning there.

There are no tables of pairs. Each framework says how its names and layouts become neutral ones (those of PyTorch), so a third
framework is a column more. Nothing here imports a framework; `verdict`, `pairing` and `cli` may import it.
"""
