"""Records that were copied over others, where no count tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.verdict.compare import compare
from trueup.store import Writer, claim

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
