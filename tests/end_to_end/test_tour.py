"""docs/tour.md is true: its functions exist, and a ReLU that is wrong in one run takes this way to the report."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import trueup
from trueup.doors.report.terminal import render
from trueup.recording.adapters.torch import functions, gradients, session, tensors

PAGE = Path(__file__).parents[2] / "docs/tour.md"
STOPS = re.findall(r"^\| \d+ \| \[\S+\]\(\.\./(\S+)\) \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)


def captured(folder: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with trueup.capture(folder, model=model):
        model(torch.randn(4, 8)).sum().backward()
    return folder


def test_a_tensor_takes_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "quick", lambda *_: None)  # the long way, in Python
    monkeypatch.setattr(functions, "named_tensors", tensors._named_tensors)
    monkeypatch.setattr(gradients, "_note_edges", gradients._note_edges_plainly)
    monkeypatch.setattr(gradients, "_boundary", gradients._boundary_plainly)
    entered: set[tuple[str, str]] = set()

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/trueup/" in frame.f_code.co_filename:
            entered.add((frame.f_code.co_filename.rpartition("/src/")[2], frame.f_code.co_name))

    before = sys.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        right = captured(tmp_path / "right")
        monkeypatch.setattr(torch, "relu", lambda x: 2 * torch.clamp_min(x, 0))  # which torch.nn.functional.relu calls
        result = trueup.compare(right, captured(tmp_path / "wrong"))
        render(result, Console(file=io.StringIO()))
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert (result.verdict, result.culprits[0].op) == ("deviates", "torch.nn.functional.relu")
    assert len(STOPS) == 10
    missed = [
        f"{file}: {name}"
        for file, names in STOPS
        for name in re.findall(r"`([\w.]+)`", names)
        if (file.removeprefix("src/"), name.rpartition(".")[2]) not in entered
    ]
    assert missed == []
