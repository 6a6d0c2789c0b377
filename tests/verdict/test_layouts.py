"""Runs of different layouts: nobody blames an operator for a tensor of which a rank holds a part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.result.comparing import compare

from .captures import Recording

TP = {"mesh": {"shape": [2], "dims": ["tp"]}, "placements": ["Shard(0)"], "global_shape": [4, 2]}


def _run(directory: Path, world: int, part: dict[str, object] | None = None) -> Path:
    run = Recording()
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    for rank in range(world):
        held = weight if part is None else np.split(weight, world)[rank]
        x = np.ones((3, 2), np.float32)
        run.call("Linear", {"input.0": x, "param.weight": held}, [x @ held.T], level="module", scope="up", rank=rank)
        if part is not None:
            run.rows[-2]["value"] = json.dumps(part | {"coordinate": [rank]})
    return run.write(directory, world_size=world)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((1, None), (2, TP), "one process against TP=2"),
        ((2, None), (2, TP), "2 processes against TP=2"),
        ((2, TP), (2, TP | {"placements": ["Replicate()"]}), "TP=2, and weights that are cut in different places"),
        ((1, None), (2, {"mesh": 7, "placements": [None]}), "one process against 2 processes"),
    ],
)
def test_another_layout_is_no_fault(tmp_path: Path, first: tuple, second: tuple, said: str) -> None:
    result = compare(_run(tmp_path / "a", *first), _run(tmp_path / "b", *second))
    assert (result.verdict, result.exit_code, list(result.culprits)) == ("inconclusive", 2, [])
    assert f"because the layouts differ: {said};" in result.sentence


def test_one_layout_is_compared_rank_by_rank(tmp_path: Path) -> None:
    result = compare(_run(tmp_path / "a", 2, TP), _run(tmp_path / "b", 2, TP))
    assert (result.verdict, result.counts["compared"]) == ("aligned", 2)
