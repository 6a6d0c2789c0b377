"""DDP, FSDP2 and tensor parallelism under capture: nothing changes, and what the ranks hold is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.foundation.store import Capture, open_capture

from .running import said

RANKS = (0, 1)


@pytest.mark.parametrize(
    ("scenario", "how"),
    [("ddp", f"{how} {level}") for how, levels in
     {"plain": ("module", "api", "aten"), "view": ("api", "aten"), "static": ("aten",)}.items() for level in levels]
    + [("fsdp", f"sharded {level}") for level in ("module", "api", "aten")],
)  # fmt: skip
def test_losses_gradients_parameters_and_random_state_are_bitwise_those_without_capture(
    training: Path, scenario: str, how: str
) -> None:
    for rank in RANKS:
        told = said(training, scenario, rank)
        assert told[how] == told[f"{how.split()[0]} off"]


def test_so_are_those_of_a_tensor_parallel_model(operators: Path) -> None:
    for rank in RANKS:
        told = said(operators, "tensor_parallel", rank)
        assert told["api"] == told["aten"] == told["off"]


def norms(capture: Capture, rank: int, level: str) -> dict[str, float]:
    """Return the norms of the gradients that the optimizer was given in the last step."""
    table = capture.records(["slot", "l2"], rank=rank, level=level, step=1, phase="optimizer", op="torch.optim.adamw.AdamW.step")
    return dict(zip(table.column("slot").to_pylist(), table.column("l2").to_pylist(), strict=True))


@pytest.mark.parametrize(("scenario", "how", "level"), [
    ("ddp", "plain", "module"), ("ddp", "plain", "api"), ("ddp", "view", "api"), ("fsdp", "sharded", "module"),
    ("fsdp", "sharded", "api"),
])  # fmt: skip
def test_the_optimizer_gets_synchronised_gradients(training: Path, scenario: str, how: str, level: str) -> None:
    capture = open_capture(training / scenario / f"{how}-{level}")
    for rank in RANKS:
        expected = {f"input.{name}.grad": norm for name, norm in said(training, scenario, rank)[f"{how} off"]["norms"].items()}
        assert norms(capture, rank, level) == pytest.approx(expected, rel=1e-5)
    if scenario == "ddp":
        assert norms(capture, 0, level) == norms(capture, 1, level)


def collectives(capture: Capture, rank: int, **where: Any) -> list[str]:
    table = capture.records(["seq", "op"], rank=rank, phase="collective", **where)
    return list(dict(zip(table.column("seq").to_pylist(), table.column("op").to_pylist(), strict=True)).values())


@pytest.mark.parametrize("level", ["module", "api", "aten"])
def test_the_reducer_of_ddp_is_seen(training: Path, level: str) -> None:
    """It issues its collectives from C++; with accumulation once per step, and again in the next."""
    capture = open_capture(training / "ddp" / f"plain-{level}")
    for rank in RANKS:
        reduced = capture.records(["slot", "numel", "l2"], rank=rank, step=0, level=level, op="c10d::allreduce_")
        slots = reduced.column("slot").to_pylist()
        assert set(slots) == {"input.0", "arguments", "output.0"}
        numel = sum(n for slot, n in zip(slots, reduced.column("numel").to_pylist(), strict=True) if slot == "output.0")
        assert numel == 336 * 96 + 64 * 96 + 2 * (96 * 288 + 288 + 96 * 96 + 96 + 2 * 96 * 640 + 640 + 96 + 4 * 96) + 2 * 96
        assert None not in [x for slot, x in zip(slots, reduced.column("l2").to_pylist(), strict=True) if slot != "arguments"]
    assert collectives(capture, 0, level=level) == collectives(capture, 1, level=level)


@pytest.mark.parametrize("level", ["module", "api", "aten"])
def test_the_collectives_of_fsdp_are_seen(training: Path, level: str) -> None:
    capture = open_capture(training / "fsdp" / f"sharded-{level}")
    names = [op.rpartition(":")[2].rpartition(".")[2] for op in collectives(capture, 0, step=0, level=level)]
    gathers = [name for name in names if name in ("_allgather_base_", "all_gather_single", "all_gather_into_tensor")]
    scatters = [name for name in names if name in ("_reduce_scatter_base_", "reduce_scatter_single", "reduce_scatter_tensor")]
    assert len(scatters) == 3, "two blocks and what is left of the model"
    assert len(gathers) == 5, "in forward and, but for the root, in backward again"
    assert sorted(names) == sorted(gathers + scatters)


def layouts(capture: Capture, **where: Any) -> dict[str, tuple[list[int], dict[str, Any]]]:
    table = capture.records(["slot", "shape", "value", "numel"], **where)
    return {
        row["slot"]: (row["shape"], json.loads(row["value"])) for row in table.to_pylist() if row["value"] and row["numel"]
    }  # fmt: skip


@pytest.mark.parametrize("rank", RANKS)
def test_a_shard_says_of_what_it_is_a_part(training: Path, rank: int) -> None:
    capture = open_capture(training / "fsdp" / "sharded-api")
    found = layouts(capture, rank=rank, step=0, level="api", op="torch.optim.adamw.AdamW.step")
    shape, layout = found["input.transformer.h.0.mlp.c_fc.weight.grad"]
    assert shape == [48, 640]
    assert layout == {
        "placements": ["Shard(0)"], "global_shape": [96, 640], "mesh": {"shape": [2], "dims": ["dp"]}, "coordinate": [rank],
    }  # fmt: skip
    plain = capture.records(["value"], slot="input.0", phase="forward", op="torch.nn.functional.embedding")
    assert plain.num_rows
    assert plain.column("value").null_count == plain.num_rows, "what is whole says nothing"


def test_no_memory_is_read_that_nobody_wrote(training: Path) -> None:
    """FSDP frees and allocates parameters by resizing their storage; the numbers of a healthy run are of moderate size."""
    for level in ("module", "api", "aten"):
        capture = open_capture(training / "fsdp" / f"sharded-{level}")
        phases = ("forward", "backward")
        table = capture.records(["max", "op", "slot", "scope"], level=level, dtype="float32", phase=phases)
        wild = [row for row in table.to_pylist() if row["max"] is not None and row["max"] > 1e4]
        assert wild == []


def test_placements_of_a_tensor_parallel_layer(operators: Path) -> None:
    for level, op in (("api", "torch.nn.functional.linear"), ("aten", "aten::addmm")):
        capture = open_capture(operators / "tensor_parallel" / level)
        for scope, placements in {
            "1": {"output.0": ["Shard(2)"] if level == "api" else ["Shard(1)"]}, "3": {"output.0": ["Partial(sum)"]},
        }.items():
            found = layouts(capture, rank=0, step=0, level=level, op=op, scope=scope, phase="forward")
            assert {slot: found[slot][1]["placements"] for slot in placements} == placements
    capture = open_capture(operators / "tensor_parallel" / "api")
    reduced = capture.records(["op", "slot", "l2"], phase="collective", scope="3", rank=0)
    assert set(reduced.column("op").to_pylist()) == {"torch.distributed.all_reduce"}
    assert reduced.column("l2").null_count == reduced.num_rows // 3, "all but the arguments were measured"


@pytest.mark.parametrize("rank", RANKS)
def test_what_ddp_exchanges_from_c_plus_plus_is_read_before_it_is_written_over(training: Path, rank: int) -> None:
    """It compares shapes and hands out weights while it is made; which of these outputs could be read was a matter of time."""
    capture = open_capture(training / "unlike" / "run")
    made = capture.records(["l2"], rank=rank, phase="collective", op="c10d::allgather_", slot=["output.0", "output.1"])
    assert made.num_rows == 2
    assert made.column("l2").null_count == 0
    assert not [note for note in capture.ranks[rank]["notes"] if "was written again" in note]


def test_ranks_that_are_set_otherwise_are_named(training: Path) -> None:
    found = trueup.preflight(None, training / "unlike" / "run")
    version = np.__version__
    assert found.odd == (
        "ranks differ: SGD lr: 0.1 on rank 0, 0.2 on rank 1; NCCL_ALGO: Ring on rank 0, Tree on rank 1; "
        f"version of numpy: {version} on rank 0, 1.0.0 on rank 1",
    )
    assert found.looks == (
        "ranks have seeds of their own: seed of torch: 0 on rank 0, 1 on rank 1; weights that each rank draws differ, unless they "
        "are broadcast",
    )
    assert found.exit_code == 1
