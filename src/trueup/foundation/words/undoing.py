"""What became of a verdict once a cause was undone: what was set back, what is left, and where the verdict's word was broken."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.foundation.words.wording import ELLIPSIS, one_line

NAMED = 3  # causes that are named of many


def undone_lines(
    undone: Sequence[str], gone: bool, left: Sequence[str], new: Sequence[str], lost: Sequence[str]
) -> list[str]:  # fmt: skip
    """Say what was set back, and whether what is left is what was called independent of it."""
    lines = [f"set back: {_some(undone)}" + ("" if gone else "; the verdict names it still")]
    if left:
        lines.append(f"left, as it was said: {_some(left)}")
    if new:
        lines.append(f"left, and taken for a victim before: {_some(new)}")
    if lost:
        lines.append(f"gone with it, and called independent before: {_some(lost)}")
    return lines


def _some(names: Sequence[str]) -> str:
    return "; ".join(map(one_line, names[:NAMED])) + (ELLIPSIS if len(names) > NAMED else "")
