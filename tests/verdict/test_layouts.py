"""Runs of different layouts: nobody blames an operator for a tensor of which a rank holds a part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.result.comparing import compare

from .captures import Recording

TP = {"mesh": {"shape": [2], "dims": ["tp"]}, "placements": ["Shard(0)"], "global_shape": [4, 2]}


def _run(directory: Path, world: int, part: dict[str, object] | None = None) -> Path:
    run = Recording(parts="stats digest tensor")
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    for rank in range(world):
        held = weight if part is None else np.split(weight, world)[rank]
        x = np.ones((3, 2), np.float32)
        run.call("Linear", {"input.0": x, "param.weight": held}, [x @ held.T], level="module", scope="up", rank=rank)
        if part is not None:
            run.rows[-2]["value"] = json.dumps(part | {"coordinate": [rank]})
    return run.write(directory, world_size=world)


@pytest.mark.parametrize(
    ("first", "second", "said", "verdict"),
    [
        ((1, None), (2, TP), "one process against TP=2", "aligned"),
        ((2, None), (2, TP), "2 processes against TP=2", "aligned"),
        ((1, None), (2, {"mesh": 7, "placements": [None]}), "one process against 2 processes", "aligned"),
        ((2, TP), (2, TP | {"placements": ["Replicate()"]}), "TP=2, and weights that are cut in different places", "deviates"),
    ],
)
def test_pieces_are_put_together(tmp_path: Path, first: tuple, second: tuple, said: str, verdict: str) -> None:
    result = compare(_run(tmp_path / "a", *first), _run(tmp_path / "b", *second))
    assert result.verdict == verdict
    assert f"note: the layouts differ ({said})" in result.sentence


def test_replicas_that_differ(tmp_path: Path) -> None:
    result = compare(_run(tmp_path / "a", 1), _run(tmp_path / "b", 2, TP | {"placements": ["Replicate()"]}))
    assert result.culprits[0].kind == "ranks"
    assert result.culprits[0].cause.startswith("param.weight of up must be the same on all ranks, and ranks 0, 1 differ (rel. L2 ")


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    run = _run(tmp_path / "b", 2, TP)
    shutil.rmtree(run / "rank-00001")
    result = compare(_run(tmp_path / "a", 1), run)
    assert (result.verdict, list(result.culprits)) == ("inconclusive", [])
    assert "because the layouts differ: one process against TP=2;" in result.sentence
    assert "lacks rank 1" in result.sentence


def test_one_layout_is_compared_rank_by_rank(tmp_path: Path) -> None:
    result = compare(_run(tmp_path / "a", 2, TP), _run(tmp_path / "b", 2, TP))
    assert (result.verdict, result.counts["compared"]) == ("aligned", 2)
