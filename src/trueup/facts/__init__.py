"""What is known before any run is looked at: facts of operators, in one table (``operators.toml``), asked by name (`operators`).

Every room may import this one; it imports `trueup.toml` alone.
"""
