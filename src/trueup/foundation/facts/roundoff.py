"""The unit roundoff of dtypes: the one number that all budgets are made of."""

from __future__ import annotations

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53, "complex128": 2.0**-53,
    "float32": 2.0**-24, "complex64": 2.0**-24,
    "float16": 2.0**-11, "complex32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
"""Half the distance from 1 to the next number (IEEE 754-2019; OCP 8-bit formats 1.0). Integers and bools round nothing."""

LEAST: dict[str, float] = {
    "float16": 2.0**-24, "complex32": 2.0**-24,
    "float8_e4m3fn": 2.0**-9, "float8_e4m3fnuz": 2.0**-10, "float8_e5m2": 2.0**-16, "float8_e5m2fnuz": 2.0**-17,
}  # fmt: skip
"""The smallest numbers above 0 of dtypes that gradients get near to (the same standards): below the normal numbers the distance of
neighbours, however small they are. A result x is rounded to x (1 + d) + e, where e is at most half of it (Higham 2002, 2.8)."""

SINGLE = UNIT_ROUNDOFF["float32"]  # what kernels of 16-bit and 8-bit dtypes compute in


def roundoff(dtype: str | None) -> float:
    """Return the unit roundoff of a dtype by its name, 0 for integers and what is unknown."""
    return UNIT_ROUNDOFF.get(dtype or "", 0.0)


def underflow(dtype: str | None) -> float:
    """Return by how much, absolutely, a number is rounded that is too small for the precision of its dtype; 0 where none is."""
    return LEAST.get(dtype or "", 0.0) / 2


def is_discrete(dtype: str) -> bool:
    """Tell whether a dtype is one of integers or bools."""
    return dtype.startswith(("int", "uint", "bool"))
