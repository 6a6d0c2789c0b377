"""Records that were copied over others, where no count tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.result.comparing import compare
from trueup.foundation.store import Writer, claim

from .captures import Recording, compared


def _made(x: float = 1.0) -> Recording:
    made = Recording()
    for _ in range(3):
        made.call("aten::mul", [np.float32([x, 2.0])], [np.float32([x, 4.0])], scope="net")
    return made


def test_slots_recorded_twice_are_told(tmp_path: Path) -> None:
    """A capture of before seals counted: its records lie there twice, in parts of their own."""
    made = _made()
    writer = Writer(tmp_path / "twice", claim(tmp_path / "twice", 0), {"levels": ["aten"]}, {"framework": "torch"})
    for _ in range(2):
        writer.write_records(0, made.columns(made.rows))
    writer.close()
    result = compare(made.write(tmp_path / "once"), tmp_path / "twice")
    assert result.verdict == "inconclusive"
    call = "input.0 of aten::mul (rank 0 step 0 forward aten net/aten::mul#0)"
    said = f"twice: {call} is recorded twice: records of rank 0 step 0 were copied over others"
    assert f"because 1 part of the captures cannot be read: {said}" in result.sentence


@pytest.mark.parametrize("alike", [True, False])
def test_whole_recordings_are_not(tmp_path: Path, alike: bool) -> None:
    result = compared(tmp_path, _made(), _made(1.0 if alike else np.nextafter(1, 2)))
    assert (result.verdict, [note for note in result.notes if "twice" in note]) == ("aligned", [])


def _chain() -> Recording:
    """Calls of all kinds of slots, one inside another, in the order in which a recorder gets them."""
    made = Recording()
    x = np.float32([1.0, 2.0])
    for scale in (2.0, 3.0):
        y = scale * x
        outer = made.call("torch.Tensor.mul", [x], [y], level="api", scope="net", arguments={"1": scale})
        made.call("aten::mul", [x], [y], scope="net", arguments={"1": scale}, parent=outer)
        x = y
    joined = np.r_[x, x]
    made.call("aten::cat", {"input.0.0": x, "input.0.1": x}, [joined], scope="net", arguments={"1": 0})
    made.call("aten::neg", [joined], [-joined], scope="head")
    return made


@pytest.mark.parametrize("killed", ["baseline", "candidate"])
def test_a_call_that_a_kill_cut_in_two_is_not_blamed(tmp_path: Path, killed: str) -> None:
    """Rows are flushed as they come: whichever was the last, a run that was killed lacks what would have come."""
    made = _chain()
    whole = made.write(tmp_path / "whole")
    for rows in range(1, len(made.rows)):
        cut = tmp_path / f"cut-{rows}"
        writer = Writer(cut, claim(cut, 0), {"levels": ["api", "aten"]}, {"framework": "torch"})
        writer.write_records(0, made.columns(made.rows[:rows]))
        result = compare(*((cut, whole) if killed == "baseline" else (whole, cut)))
        assert (result.verdict, result.culprit) == ("inconclusive", None), (rows, result.sentence)
