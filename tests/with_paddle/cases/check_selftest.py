"""Where a private part of Paddle does not behave as it did, a capture does with less and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest
from paddle import nn
from recording import Row, notes_of, rows_of

import trueup
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle import session


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    session._examine.cache_clear()
    yield
    session._examine.cache_clear()


def captured(into: Path) -> list[Row]:
    net = nn.Linear(3, 2)
    with trueup.capture(into, model=net):
        net(paddle.ones([1, 3])).sum().backward()
    return rows_of(into)


def test_this_paddle_can_do_it_all_and_asking_leaves_no_trace() -> None:
    paddle.seed(5)
    before = paddle.rand([2]).numpy().tobytes()
    paddle.seed(5)
    found = session.examine()
    assert (found.operators, found.backward, found.nodes, found.sentences) == (True, True, True, ())
    assert paddle.rand([2]).numpy().tobytes() == before


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails() -> None:
        raise AttributeError("no such thing any more")

    monkeypatch.setattr(session, name, fails)


def test_without_post_hooks_calls_show_what_came_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "_hooks_nodes")
    rows = captured(tmp_path / "capture")
    assert {row["slot"] for row in rows if row["phase"] == "backward" and row["op"].endswith("_C_ops.sum")} >= {"grad_output.0"}
    (note,) = notes_of(tmp_path / "capture")
    assert note == (
        f"Paddle {paddle.__version__}: post-hooks of GradNodes do not tell gradients (AttributeError: no such thing any more); "
        "gradients that a call makes are not recorded"
    )


def test_without_hooks_there_is_no_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "_hooks_tensors")
    rows = captured(tmp_path / "capture")
    assert {row["phase"] for row in rows} == {"forward"}
    assert notes_of(tmp_path / "capture")[0].endswith("no backward is recorded")


def test_without_operators_there_are_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "_replaces_operators")
    rows = captured(tmp_path / "capture")
    assert {row["level"] for row in rows if row["op"] != "paddle.Tensor.backward"} == {"module"}
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert notes_of(tmp_path / "capture")[0].endswith("operators are not recorded, only Layers")


def test_without_memory_to_read_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "_reads_memory")
    with pytest.raises(TrueupError, match="nothing can be recorded"):
        captured(tmp_path / "capture")
