"""A capture in memory and the command line around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from trueup.doors.cli.app import run as run_command_line


@dataclass
class FakeCapture:
    """What ``trueup.foundation.store.open_capture`` returns, as far as ``trueup show`` uses it."""

    table: pa.Table
    root: dict[str, Any] = field(default_factory=lambda: {"format_version": 1})
    ranks: dict[int, dict[str, Any]] = field(
        default_factory=lambda: {
            0: {"framework": "torch", "versions": {"torch": "2.6.0"}, "devices": ["npu:0"], "status": "complete"}
        }
    )
    problems: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return sorted(self.table["step"].unique().to_pylist())

    def records(self, columns: Any = None, **where: Any) -> pa.Table:
        table = self.table
        for name, value in where.items():
            accepted = value if isinstance(value, list) else [value]
            table = table.filter(pc.is_in(table[name], pa.array(accepted, table[name].type)))
        return table.select(columns) if columns is not None else table

    def payload(self, rank: int, segment: str, key: str, view: Any = None, digest: Any = None) -> np.ndarray[Any, Any]:
        assert (rank, segment, key) == (0, "tensors-0000.safetensors", "k0")
        return np.sin(np.arange(4096, dtype=np.float32)).reshape(64, 64)

    def sites(self, rank: int) -> dict[int, tuple[tuple[str, ...], str | None]]:
        return {7: (("centernet.py:57 in forward", "train.py:88 in <module>"), "rows, _ = self.lstm(rows)")}


def row(seq: int, slot: str, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "step": 0, "rank": 0, "seq": seq, "phase": "forward", "level": "api", "scope": "neck.lstm", "op": "torch.lstm",
        "ordinal": 0, "slot": slot, "dtype": "float32", "shape": [64, 64], "device": "npu:0", "numel": 4096,
        "min": -0.99999, "max": 1.0, "mean": 1.9e-4, "l2": 45.2548, "n_nan": 0, "n_posinf": 0, "n_neginf": 0,
        "n_zero": 1, "n_subnormal": 0, "n_saturated": 0, "digest": "00aa11bb22cc33dd", "payload_segment": None,
        "payload_key": None, "payload_view": None, "value": None, "producer_seq": None, "site": 7,
    }  # fmt: skip
    return made | changes


def argument(seq: int, value: str, **changes: Any) -> dict[str, Any]:
    empty = ("dtype", "device", "numel", "min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero")
    nothing = dict.fromkeys((*empty, "n_subnormal", "n_saturated", "digest", "shape"))
    return row(seq, "arguments", value=value, **nothing, **changes)


def recorded() -> list[dict[str, Any]]:
    payload = {"payload_segment": "tensors-0000.safetensors", "payload_key": "k0"}
    conv = {"scope": "backbone.layer1.0.conv1", "op": "torch.conv2d"}
    foreach = {"scope": "", "op": "aten::_foreach_add_", "level": "aten", "phase": "optimizer"}
    return [
        row(0, "input.0", **conv, producer_seq=None),
        row(0, "output.0", **conv, shape=[8, 64, 32, 32]),
        argument(0, '{"stride": 1, "padding": [1, 1]}', **conv),
        row(4, "input.0", **payload),
        row(4, "output.0", producer_seq=0, min=-1.25e-12),
        row(9, "grad_output.0", phase="backward"),
        row(9, "grad_input.0", phase="backward", n_nan=12, n_posinf=1),
        row(11, "input.0", **foreach, dtype="bfloat16", shape=[]),
        row(15, "input.0", step=1),
    ]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    made = FakeCapture(pa.Table.from_pylist(recorded()))
    monkeypatch.setattr("trueup.foundation.store.open_capture", lambda path: made, raising=False)
    return made


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def trueup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run a command line in this process, 100 columns wide."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str | Path) -> Ran:
        code = run_command_line([str(argument) for argument in arguments])
        got = capsys.readouterr()
        return Ran(code, "\n".join(line.rstrip() for line in got.out.splitlines()), got.err)

    return run
