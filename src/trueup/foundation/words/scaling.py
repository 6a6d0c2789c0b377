"""The history of a loss scale in a few words: ``1,024 to 2,048, 1 of 5 steps skipped``."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.foundation.words.wording import number


def loss_scale(history: Sequence[tuple[float, bool]]) -> str | None:
    """Say how the loss scale went, or return None where there was none; ``history``: scale and whether the step was skipped."""
    if not history:
        return None
    kept = [scale for scale, _ in history]
    low, high, last = min(kept), max(kept), kept[-1]
    way = _written(last) if low == high else f"{_written(kept[0])} to {_written(last)}"
    if low < min(kept[0], last) or high > max(kept[0], last):
        way += f" (between {_written(low)} and {_written(high)})"
    return f"{way}, {sum(skip for _, skip in history)} of {len(history)} steps skipped"


def _written(scale: float) -> str:
    return f"{scale:,.0f}" if scale.is_integer() and scale < 2**40 else number(scale)
