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

SINGLE = UNIT_ROUNDOFF["float32"]
"""What kernels of 16-bit and 8-bit dtypes compute in."""


def roundoff(dtype: str | None) -> float:
    """Return the unit roundoff of a dtype by its name, 0 for integers and what is unknown."""
    return UNIT_ROUNDOFF.get(dtype or "", 0.0)
