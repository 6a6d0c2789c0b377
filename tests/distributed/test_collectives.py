"""Every collective is a call of phase `collective` that says among whom, and whose output is read when it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueup.foundation.store import open_capture

from .running import said

COLUMNS = ["seq", "parent", "level", "phase", "scope", "op", "slot", "mean", "numel", "value", "producer_seq"]


def calls(path: Path, rank: int, **where: Any) -> list[dict[str, Any]]:
    """Return calls in order: op, arguments, and the mean of each slot."""
    found: dict[int, dict[str, Any]] = {}
    for row in open_capture(path).records(COLUMNS, rank=rank, **where).to_pylist():
        call = found.setdefault(row["seq"], {key: row[key] for key in ("seq", "parent", "level", "phase", "scope", "op")})
        if row["slot"] == "arguments":
            call["arguments"] = json.loads(row["value"])
        else:
            call[row["slot"]] = row["mean"]
    return [found[seq] for seq in sorted(found)]


HERE = {"group": "0", "group_desc": "default_pg", "ranks": "0-1"}

# x is 0 1 2 3 on rank 0 and 1 2 3 4 on rank 1; after the first all-reduce both hold 1 3 5 7
EXPECTED: list[tuple[str, dict[str, Any], tuple[dict[str, float], dict[str, float]]]] = [
    ("all_reduce", {"reduce_op": "SUM", "async_op": False, **HERE},
     ({"input.0": 1.5, "output.0": 4.0}, {"input.0": 2.5, "output.0": 4.0})),
    ("all_reduce", {"reduce_op": "MAX", "async_op": True, "ranks": "0-1", "group_desc": "pair"},
     ({"input.0": 4.0, "output.0": 4.0},) * 2),
    ("all_gather", HERE, ({"input.0": 4.0, "output.0": 4.0, "output.1": 4.0},) * 2),
    ("all_gather_into_tensor", HERE, ({"input.0": 4.0, "output.0": 4.0},) * 2),
    ("reduce_scatter_tensor", {"reduce_op": "SUM"}, ({"input.0": 4.0, "output.0": 4.0}, {"input.0": 4.0, "output.0": 12.0})),
    ("broadcast", {"root": 1}, ({"output.0": 4.0}, {"input.0": 4.0})),
    ("reduce", {"root": 0, "reduce_op": "SUM"}, ({"input.0": 4.0, "output.0": 8.0}, {"input.0": 4.0})),
    # gloo leaves what it had in hand in the tensor of a rank that is not the root: 7 on rank 1
    ("gather", {"root": 0}, ({"input.0": 8.0, "output.0": 8.0, "output.1": 7.0}, {"input.0": 7.0})),
    ("scatter", {"root": 0}, ({"input.0": 1.0, "input.1": 2.0, "output.0": 1.0}, {"output.0": 2.0})),
    ("all_to_all_single", {}, ({"input.0": 1.0, "output.0": 1.5}, {"input.0": 2.0, "output.0": 1.5})),
    ("send", {"dst": 1}, ({"input.0": 1.0}, {})),
    ("recv", {"src": 0}, ({}, {"output.0": 1.0})),
    ("isend", {}, ({"input.0": 1.0},) * 2),
    ("irecv", {}, ({"output.0": 1.0},) * 2),
    ("allreduce_coalesced_", {}, ({"input.0": 1.0, "input.1": 1.0, "output.0": 2.0, "output.1": 2.0},) * 2),
    ("barrier", HERE, ({},) * 2),
    ("all_gather_object", HERE, ({},) * 2),
    ("all_reduce", {"reduce_op": "SUM"}, ({"input.0": 2.0, "output.0": 4.0},) * 2),
    ("all_reduce", {"reduce_op": "SUM"}, ({"input.0": 1.0, "output.0": 2.0},) * 2),
]  # fmt: skip
"""The operators of the scenario in order: function, arguments among others, means of the slots on rank 0 and on rank 1."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("level", ["module", "api", "aten"])
def test_every_operator_at_every_level(operators: Path, rank: int, level: str) -> None:
    found = calls(operators / "operators" / "module+api+aten", rank, phase="collective", level=level)
    lacking = {0: "recv", 1: "send"}[rank]
    expected = [row for row in EXPECTED if row[0] != lacking]
    slots = [{k: v for k, v in call.items() if k.startswith(("input.", "output."))} for call in found]
    assert slots == [means[rank] for _, _, means in expected]
    for call, (name, arguments, _) in zip(found, expected, strict=True):
        assert call["arguments"].items() >= arguments.items(), name
        if level != "aten":
            assert call["op"] == (f"c10d::{name}" if name.endswith("_") else f"torch.distributed.{name}")
        else:
            assert call["op"].startswith(("c10d::", "_c10d_functional::all_reduce", "torch.distributed.all_gather_object"))


def test_levels_lie_one_inside_the_other(operators: Path) -> None:
    found = calls(operators / "operators" / "module+api+aten", 0, phase="collective")
    by_seq = {call["seq"]: call for call in found}
    for call in found:
        above = by_seq.get(call["parent"])
        assert (None if above is None else above["level"]) == {"module": None, "api": "module", "aten": "api"}[call["level"]]


def test_one_level_alone_sees_the_same(operators: Path) -> None:
    both = [
        [{k: v for k, v in call.items() if k not in ("seq", "parent")} for call in calls(path, 0, phase="collective", level="api")]
        for path in (operators / "operators" / "module+api+aten", operators / "operators" / "api")
    ]
    for call in (c for side in both for c in side):
        call["arguments"].pop("group", None)
    assert both[0] == both[1]


def test_nothing_that_collectives_are_made_of_is_a_call(operators: Path) -> None:
    """Gloo copies results when one waits for them, and pickled objects are turned into tensors."""
    for rank in (0, 1):
        found = calls(operators / "operators" / "module+api+aten", rank, phase="forward", level="aten")
        assert {call["op"] for call in found} <= {"aten::ones", "aten::full", "aten::add", "aten::sum"}


@pytest.mark.parametrize("level", ["api", "aten"])
def test_what_is_under_way_is_read_when_it_is_there(operators: Path, level: str) -> None:
    told = said(operators, "overlap", 0)[level]
    assert told == {"early": False, "total": 3006.0, "after": 22.0}, "rank 1 came late, so the collective was under way"
    path = operators / "overlap" / level
    first, second, third = calls(path, 0, phase="collective", level=level)
    assert (first["input.0"], first["output.0"]) == (1.0, 3.0)
    assert (second["input.0"], second["output.0"]) == (10.0, 21.0)
    assert (third["input.0"], third["output.0"]) == (3.0, 6.0), "read before it was doubled in place"
    *_, reader = [c for c in calls(path, 0, phase="forward", level=level) if c["op"].endswith("add")]
    assert (reader["input.0"], reader["output.0"]) == (21.0, 22.0)
    assert open_capture(path).ranks[0]["notes"] == []


def test_modules_alone(operators: Path) -> None:
    found = calls(operators / "overlap" / "module", 0, level="module")
    assert {c["op"] for c in found} == {"torch.distributed.all_reduce"}
    assert [(c["input.0"], c.get("output.0")) for c in found] == [(1.0, 3.0), (10.0, 21.0), (3.0, None)]
    (note,) = open_capture(operators / "overlap" / "module").ranks[0]["notes"]
    assert "was written again before it could be read" in note, "the last one, doubled in place where no mode looks"


def test_a_pipeline_sends_activations_and_gradients(operators: Path) -> None:
    sender, receiver = (
        calls(operators / "pipeline" / "capture", rank, phase="collective", level="api")[-2:] for rank in (0, 1)
    )
    assert [c["op"].rpartition(".")[2] for c in sender] == ["send", "irecv"]
    assert [c["op"].rpartition(".")[2] for c in receiver] == ["recv", "isend"]
    assert sender[0]["input.0"] == receiver[0]["output.0"]
    assert receiver[1]["input.0"] == sender[1]["output.0"]
    (linear,) = calls(operators / "pipeline" / "capture", 1, phase="forward", level="aten", op="aten::addmm", step=1)
    assert linear["input.1"] == receiver[0]["output.0"]
