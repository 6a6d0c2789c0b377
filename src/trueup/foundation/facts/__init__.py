"""Facts: frozen ones that one room finds and another says, and what is known of operators before any run is looked at.

`why` holds reasons and remarks of a comparison, `anomaly` overflows, `operators` the table of operators (``operators.toml``,
``positions.toml``, ``rounding.toml``), `criteria` how much error is explained (``criteria.toml``, ``presets/``, the user's).
Nothing is decided or written here. Imports `model` and `toml` alone; everything may import it.
"""
