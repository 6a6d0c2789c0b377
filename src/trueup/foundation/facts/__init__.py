"""Facts: frozen ones that one room finds and another says, and what is known of operators before any run is looked at.

`why` holds reasons and remarks of a comparison, `anomaly` what overflows, `operators` the table of operators (``operators.toml``,
``rounding.toml``).
Nothing is decided or written here. Imports `model` and `toml` alone, and may be imported by all.
"""
