"""Captures of a training on a second device: what it computes stays as it is, and what the rows say is what the CPU says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest
from recording import bits, notes_of, rows_of

import trueup
from models import build


def trained(name: str, device: str, into: Path | None = None, **options: Any) -> Any:
    paddle.set_device(device)
    training = build(name)
    if into is None:
        found = [training.step(k) for k in range(2)]
    else:
        with trueup.capture(into, model=training.model, **options):
            found = [training.step(k) for k in range(2)]
    return bits([*found, *training.model.state_dict().values()])


@pytest.mark.parametrize(("name", "detail"), [("transformer", "stats"), ("ctc", "tensor")])
def test_a_run_on_another_device_is_recorded_as_on_the_cpu(name: str, detail: str, tmp_path: Path) -> None:
    device = trained(name, "host:0", tmp_path / "device", detail=detail)
    assert device == trained(name, "host:0") == trained(name, "cpu", tmp_path / "cpu", detail=detail)
    rows = rows_of(tmp_path / "device")
    assert {row["device"] for row in rows if row["device"]} == {"host:0", "cpu"}
    weights = {row["device"] for row in rows if row["slot"].startswith("param.")}
    assert "host:0" in weights  # the fallback leaves what it writes in place, running statistics, on the CPU
    assert not [note for note in notes_of(tmp_path / "device") if "no statistics" in note]
    result = trueup.compare(tmp_path / "cpu", tmp_path / "device")
    assert result.exit_code == 0, result.sentence


def test_memory_of_two_devices_is_told_apart() -> None:
    from trueup.recording.adapters.paddle.buffers import base_of

    paddle.set_device("host:0")
    one = paddle.ones([3])
    other = paddle.ones([3])._copy_to(paddle.CustomPlace("host", 1), True)
    host = paddle.ones([3])._copy_to(paddle.CPUPlace(), True)
    assert [base_of(tensor)[0] for tensor in (one, other)] == ["host:0", "host:1"]
    assert isinstance(base_of(host), int)
