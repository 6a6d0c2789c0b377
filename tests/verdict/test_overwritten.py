"""What is left of an earlier step, where the baseline makes it anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verdict.captures import Recording, changed, compared, normal

SAID = "the candidate made it in an earlier step (call 0) and the baseline in this one"


def training(run: Recording, *, kept: bool, moves: float, off: float = 0.0, dtype: type = np.float16) -> None:
    """Record two steps that multiply by what is made of a weight, which moves between them; ``off``: the error of that."""
    weight = normal(32, 32, seed=1)
    copy = changed(weight, off, seed=2)
    for step in (0, 1):
        x = normal(32, 32, seed=3 + step)
        if step == 0 or not kept:
            copy = changed(weight, off, seed=2).astype(dtype)
            run.call("aten::cos", [weight], [copy], step=step)
        made = (x @ copy.astype(np.float32)).astype(np.float16)
        run.call("aten::mm", [x.astype(np.float16), copy], [made], step=step)
        weight = changed(weight, moves, seed=9)
        run.call("aten::add_", [normal(32, 32, seed=7)], [weight], step=step, phase="optimizer")


def notes(tmp_path: Path, *, moves: float, off: float = 0.0, dtype: type = np.float16) -> tuple[str, list[str]]:
    runs = Recording(), Recording()
    training(runs[0], kept=False, moves=moves)
    training(runs[1], kept=True, moves=moves, off=off, dtype=dtype)
    result = compared(tmp_path, *runs)
    assert result.culprits == []
    return result.verdict, result.notes


def test_a_copy_of_an_old_weight_is_not_aligned(tmp_path: Path) -> None:
    word, found = notes(tmp_path, moves=1e-3)
    assert word == "inconclusive"
    assert found[0].startswith("input.1 of aten::mm (rank 0 step 1 forward aten aten::mm#0) differs (rel. L2 ")
    assert SAID in found[0]


def test_a_table_that_one_run_keeps_is_no_reason(tmp_path: Path) -> None:
    """It differs by rounding, as it did when it was made."""
    assert [note for note in notes(tmp_path, moves=0.0, off=1e-4)[1] if SAID in note] == []


def test_a_weight_that_is_cast_later_is_no_copy_of_an_old_one(tmp_path: Path) -> None:
    """``x @ weight.t()`` under autocast reads the weight itself, which an earlier step made, and casts it then."""
    assert [note for note in notes(tmp_path, moves=1e-3, dtype=np.float32)[1] if SAID in note] == []
