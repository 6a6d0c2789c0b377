"""Which operators are casts and which are matrix products, by the table of `trueup.foundation.facts`."""

from __future__ import annotations

from functools import cache

from trueup.comparison.verdict.criteria import load as load_criterion
from trueup.foundation.facts.operators import has, says


def cast_source(op: str) -> str | None:
    """Return the slot that holds what a cast casts, None of what is no cast."""
    found: str | None = says(op, "cast")
    return found


@cache
def is_product(op: str, level: str) -> bool:
    """Tell whether a call is a matrix product, a convolution, or made of some (attention, recurrent layers)."""
    if level == "module":
        return has(f"module:{op.rpartition('.')[2]}", "product")
    criterion = load_criterion("default")
    row = criterion.row(op, level, "forward")
    return row.matmul and row is not criterion.rows[-1] and not has(op, "cell")
