"""The loss scale's history in words, from captures with and without statistics, and where it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from rich.console import Console

import trueup
from trueup.doors.report.capture_view import Selection, render_header
from trueup.foundation.store.columns import SCALE_COLUMNS, loss_scale_in, scales


def table(*steps: tuple[float | None, float | None, dict[str, object]]) -> pa.Table:
    """Rows of a scaler's steps: the scale and what overflowed as slots (None: only digests), the arguments."""
    rows = []
    for step, (scale, found, arguments) in enumerate(steps):
        rows.append((step, "input.scale", scale, None))
        rows.append((step, "input.found_inf.0", found, None))
        rows.append((step, "arguments", None, json.dumps(arguments)))
    columns = zip(*rows, strict=True) if rows else [()] * len(SCALE_COLUMNS)
    return pa.table(dict(zip(SCALE_COLUMNS, columns, strict=True)))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), None),
        (((1024.0, 0.0, {}),), "1,024, 0 of 1 steps skipped"),
        (((65536.0, 1.0, {}), (32768.0, 0.0, {})), "65,536 to 32,768, 1 of 2 steps skipped"),
        (((4.0, 0.0, {}), (8.0, 1.0, {}), (4.0, 0.0, {})), "4 to 4 (between 4 and 8), 1 of 3 steps skipped"),
        (((None, None, {"scale": 2.0, "skipped": True}), (None, None, {"scale": 0.5, "skipped": False})),
         "2 to 0.5000, 1 of 2 steps skipped"),
        (((2.0**60, 0.0, {"scale": 2.0**60, "skipped": False}),), "1.15e18, 0 of 1 steps skipped"),
    ],
)  # fmt: skip
def test_history_in_words(steps: tuple, said: str | None) -> None:
    assert loss_scale_in(table(*steps)) == said


def test_history_by_step() -> None:
    assert scales(table((4.0, 0.0, {}), (8.0, 1.0, {}))) == [(0, 4.0, False), (1, 8.0, True)]


def test_scale_is_shown_and_compared(tmp_path: Path) -> None:
    for side, bad in (("baseline", ()), ("candidate", (1,))):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        with trueup.capture(tmp_path / side, model=model, level="module", on_error="stop"):
            for k in range(3):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(1, 2)).sum() * (float("inf") if k in bad else 1)).backward()
                scaler.step(optimizer)
                scaler.update()
    text = io.StringIO()
    capture = trueup.open_capture(tmp_path / "candidate")
    render_header(capture, Selection(tmp_path / "candidate"), Console(file=text, width=120))
    assert "\nloss scale  8 to 4, 1 of 3 steps skipped\n" in text.getvalue()
    result = trueup.compare(tmp_path / "baseline", tmp_path / "candidate")
    assert result.baseline.environment["loss scale"] == "8, 0 of 3 steps skipped"
    assert result.candidate.environment["loss scale"] == "8 to 4, 1 of 3 steps skipped"
    assert result.verdict == "deviates"
