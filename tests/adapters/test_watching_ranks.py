"""Watching several ranks: a hit on one of them, under DDP with accumulation, FSDP2 and tensor parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trueup
from distributed.running import joined
from nursery import Nursery
from trueup.foundation.store import open_capture


@pytest.fixture(scope="module")
def ran(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("watched")
    ends = joined(nursery, out, "adapters.watched_ranks.train", {"PYTHONWARNINGS": "ignore"}, out=str(out))
    assert [code for code, _ in ends] == [0, 0], ends
    return out


def hits(ran: Path, rank: int, train: str) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = json.loads((ran / f"hits-{rank}.json").read_text())
    return found[train]


def test_a_micro_batch_without_communication_is_executed_again(ran: Path) -> None:
    first, *later = hits(ran, 1, "accumulated")
    assert (first["step"], first["kind"], first["name"]) == (1, "overflow", "torch.exp, forward")
    assert first["tensors"].startswith("executed again with the same result")
    assert {one["kind"] for one in later} <= {"follows"}
    capture = open_capture(ran / "accumulated" / "step-000001")
    row = capture.records(step=1, rank=1, op="torch.exp", phase="forward", slot="output.0").to_pylist()
    assert [(one["ordinal"], one["payload_key"] is not None) for one in row if one["n_posinf"]] == [(1, True)]
    other = hits(ran, 0, "accumulated")
    assert [one["kind"] for one in other][:1] in (["collective"], ["parameters"]), "rank 0 gets it through the all-reduce"
    assert trueup.overflow(ran / "accumulated" / "step-000001").anomalies[0].place.rank == 1


@pytest.mark.parametrize("train", ["sharded", "tensor_parallel"])
def test_what_takes_all_ranks_is_named_and_not_executed(ran: Path, train: str) -> None:
    first = hits(ran, 1, train)[0]
    assert (first["step"], first["kind"]) == (1, "overflow")
    assert first["name"].endswith("torch.exp, forward")
    why = "its parameters are sharded over ranks, which would all have to execute it again"
    assert first["tensors"] == f"not executed again, because {why}"
    result = trueup.overflow(ran / train / "step-000001")
    assert result.first is not None
    assert (result.first.place.rank, result.first.place.op) == (1, "torch.exp")
