"""What breaks in the observer stays in the observer; what breaks in the user's code passes through and leaves no trace."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from adapters.running import everywhere
from adapters.subjects import build
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch import buffers, context, functions, gradients, session
from trueup.recording.recorder import Recorder

PLACES = {
    "describing a tensor": (session, "layout_of"),
    "a row of the short way": (Recorder, "added"),
    "meeting a storage": (buffers.Buffers, "_new"),
    "a storage that was written": (buffers.Storage, "forget"),
    "measuring a tensor": (buffers.Buffers, "statistics"),
    "walking arguments of functions": (functions, "named_tensors"),
    "walking arguments of operators": (functions, "named_tensors"),
    "walking arguments of modules": (session, "named_tensors"),
    "noting edges": (functions, "Edges"),
    "watching functions": (functions, "watch"),
    "watching modules": (session, "watch"),
    "adding gradients": (gradients._Sums, "add"),
    "beginning a call": (session.Slots, "inputs"),
    "naming a module": (context.Scopes, "path"),
    "ending a call": (session.Slots, "results"),
    "the loss": (session.Slots, "loss"),
    "a backward call": (context.Context, "backward_call"),
}


AT_LENGTH = (
    "describing a tensor", "measuring a tensor", "walking arguments of functions", "walking arguments of operators",
    "walking arguments of modules", "noting edges", "watching functions", "watching modules", "beginning a call", "ending a call",
)  # fmt: skip
"""What the compiled short way does by itself."""


class Broken(Exception):
    pass


def breaks(*args: object, **kwargs: object) -> None:
    raise Broken("as planned")


@pytest.mark.parametrize(("place", "device"), everywhere(PLACES))
def test_training_goes_on(place: str, device: str, path: Path, monkeypatch, capsys) -> None:
    expected = build("checkpoint", device)
    losses = [expected.step() for _ in range(3)]
    training = build("checkpoint", device)
    if place in AT_LENGTH:
        monkeypatch.setattr(session, "quick", lambda *_: None)
    capture = trueup.capture(path, model=training.model)
    with capture:
        observed = [training.step()]
        monkeypatch.setattr(*PLACES[place], breaks)
        observed += [training.step(), training.step()]
        state = capture._session.threads.state
        assert (state.contexts, state.modules, state.running, state.runs, state.busy) == ([], [], [], [], False)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert [loss.tolist() for loss in observed] == [loss.tolist() for loss in losses]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("trueup: capture stopped at step ")
    assert "Broken: as planned (in breaks, " in said[0]
    assert said[0].endswith("The training goes on without it.")
    stored = open_capture(path)
    assert any("capture stopped at step" in note and "Broken: as planned" in note for note in stored.ranks[0]["notes"])
    assert stored.ranks[0]["status"] == "stopped"
    assert stored.records(step=0).num_rows > 0
    assert capture._session.report()["failure"].startswith("capture stopped at step ")


@pytest.mark.parametrize("place", PLACES)
def test_training_stops_when_asked(place: str, path: Path, monkeypatch) -> None:
    # On the CPU only: whatever raises in the backward thread of the simulated device ends the process, with a capture or not.
    training = build("checkpoint", "cpu")
    if place in AT_LENGTH:
        monkeypatch.setattr(session, "quick", lambda *_: None)
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
        with (
            monkeypatch.context() as broken,
            pytest.raises(TrueupError, match="capture stopped, and the run with it, as asked: "),
        ):
            broken.setattr(*PLACES[place], breaks)
            training.step()


class Fails(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(3, 3), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "module":
            raise ZeroDivisionError("mine")
        if self.where == "api":
            return self.linear(x) + torch.ones(7)
        y = self.linear(x)
        if self.where == "hook":
            y.register_hook(lambda g: 1 / 0)
        return y


@pytest.mark.parametrize("where", ["module", "api", "hook", "optimizer"])
def test_user_errors_pass_through(where: str, path: Path, calls) -> None:
    model = nn.Sequential(Fails(where), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = trueup.capture(path, model=model, on_error="stop")
    with capture:
        with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
            loss = model(torch.randn(2, 3)).sum()
            loss.backward()
            optimizer.step(lambda: 1 / 0)
        assert "trueup" not in str(caught.value)
        state = capture._session.threads.state
        assert (state.contexts, state.modules, state.running, state.busy) == ([], [], [], False)
        capture.step()
        model[0].where = ""
        torch.tanh(model(torch.randn(2, 3)).sum()).backward()
        optimizer.step()
    second = calls(step=1, level="api")
    assert {row["phase"] for row in second if row["op"] == "torch.tanh"} == {"forward", "backward"}
    assert {row["scope"] for row in second if row["op"] == "torch.nn.functional.linear"} == {"0.linear"}
    assert {row["phase"] for row in second} == {"forward", "backward", "optimizer"}


def test_capture_can_start_again_after_an_error(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), trueup.capture(path):
        raise ZeroDivisionError
    with trueup.capture(path.with_name("second")):
        torch.ones(2).add(1)


def test_one_capture_at_a_time(path: Path) -> None:
    before = Namespace.__init__
    with trueup.capture(path), pytest.raises(TrueupError, match="is already running in this process"), trueup.capture(path):
        pass
    assert Namespace.__init__ is before


def test_unwritable_directory(path: Path) -> None:
    before = Namespace.__init__
    path.write_text("a file")
    with pytest.raises(TrueupError, match=r"cannot write the capture .*; choose another directory"), trueup.capture(path):
        pass
    assert Namespace.__init__ is before
