"""Other implementations: a part of both tables of `benchmarks/implementations.py`, in float32 and bfloat16.

`make bench-locate` prints all of them; docs/implementations.md says what they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import implementation_right
import implementation_wrong
import implementations
from implementation_models import Alteration, Row, build
from implementations import Cell

ROWS = (
    "^norm: unbiased variance, one layer", "norm, width 2048: unbiased.*library", "gelu: tanh for erf, one layer, baseline library",
    "linear: scaled by 1 \\+ 0.0003.*library", "between linear layers: x \\* 1.5, one", "adamw: decay lost, one step",
    "moments not written, one step", "gradients times 0.5", "that nobody reads, one layer", "branch cut, one layer", "SGD: by hand",
    "^norm: by hand", "^gelu: by erf", "^attention: products", "^loss: by hand", "AdamW: foreach against a for-loop$",
    "4 against one batch$", "blocks checkpointed", "in float64", "one-hot", "unfolded",
)  # fmt: skip
HALF = (
    "^norm: unbiased variance, one layer, baseline by hand", "between linear layers: x \\* 1.5, one layer",
    "moments not written, one step", "gradients times 0.5", "branch cut, one layer", "^norm: by hand", "^attention: products",
    "in float64", "4 against one batch$",
)  # fmt: skip
"""Rows that are compared in bfloat16 as well: of the others a mistake is lost in its rounding, or nothing is told otherwise."""
TABLES = {"float32": ("|".join(ROWS), ("api",)), "bfloat16": ("|".join(HALF), ("aten",))}
"""By precision the rows, and the levels at which they are compared: each level has a precision here, and all in the bench;
test_deletions holds captures that lack calls."""

WRONG_BUT_ALIGNED, PLACED = 0, 16
RIGHT_BUT_BLAMED, RIGHT_AND_ALIGNED = 0, 19
"""Cells on 2026-11-29: 0, 17 of 20, 0 and 20 of 20, with room for another processor's bits but for what is blamed or wrongly
aligned; what it is to be: 0 aligned, all placed, 0 blamed, all aligned."""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = tmp_path_factory.mktemp("runs")
        tables = (implementations.table(work, [of], only=only, levels=levels) for of, (only, levels) in TABLES.items())
        return [cell for table in tables for cell in table]


def losses(row: Row, change: Callable[[Alteration], Any] | None) -> list[float]:
    torch.set_num_threads(1)
    alteration = Alteration(build(row.base))
    if change is not None:
        change(alteration)
    return [alteration.training.step().item() for _ in range(row.steps)]


@pytest.mark.parametrize("row", implementation_right.rows(), ids=lambda row: row.name)
def test_right_implementations_compute_the_same(row: Row) -> None:
    assert losses(row, row.candidate) == pytest.approx(losses(row, row.baseline), rel=1e-6)


@pytest.mark.parametrize("row", [row for row in implementation_wrong.rows() if row.kind == "dead end"], ids=lambda row: row.name)
def test_what_nobody_reads_changes_no_bit(row: Row) -> None:
    assert losses(row, row.candidate) == losses(row, row.baseline)


def test_a_mistake_is_measured_in_float64(tmp_path: Path) -> None:
    """The unbiased variance of 2048 numbers is off by a half in 2048; where that is, is known, and that it has a direction."""
    row = next(row for row in implementation_wrong.rows() if row.name.startswith("norm, width 2048: unbiased"))
    for precision in ("float32", "bfloat16"):
        planted = implementations.Bench(tmp_path).record(row, precision, row.candidate, tmp_path / "run").planted
        forward = [p for p in planted if p.phase == "forward"]
        assert [(p.scope, p.step) for p in forward] == [("layers.1.norm", 0), ("layers.1.norm", 1)]
        assert {round(p.size * 2048 * 2, 1) for p in forward} <= {0.7, 0.8, 0.9, 1.0}  # the bias is no part of what is off
        assert min(p.coherence for p in forward) > implementations.COHERENT


def words(cells: list[Cell], table: str) -> Counter[str]:
    return Counter(cell.word for cell in cells if cell.table == table)


def test_the_rows_are_there(cells: list[Cell]) -> None:
    assert words(cells, "wrong").total() >= 20
    assert words(cells, "right").total() >= 20


def test_wrong_implementations_that_pass_as_aligned_become_no_more(cells: list[Cell]) -> None:
    assert words(cells, "wrong")["aligned"] <= WRONG_BUT_ALIGNED


def test_the_right_place_is_named_as_often(cells: list[Cell]) -> None:
    found = words(cells, "wrong")
    assert found["named"] + found["hinted"] >= PLACED


def test_right_implementations_that_are_blamed_become_no_more(cells: list[Cell]) -> None:
    found = words(cells, "right")
    assert found["blamed"] <= RIGHT_BUT_BLAMED
    assert found["aligned"] >= RIGHT_AND_ALIGNED
