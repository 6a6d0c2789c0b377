"""What is done to a damaged capture: it is opened, read, shown, compared and saved, and only Trueup's own error may come out."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import trueup
from fuzz.mutations import mutate

BASES = ("baseline", "candidate")


def record_bases(folder: Path) -> None:
    """Record two trainings of a small network with all that a capture can hold, within rounding of each other."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    for name in BASES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        x, labels = torch.randn(5, 6), torch.tensor([0, 1, 2, 1, 0])
        if name == "candidate":
            x *= 1 + 1e-7 * torch.randn(5, 6)
        with trueup.capture(folder / name, model=model, level="all", detail="tensor", on_error="stop") as capture:
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), labels).backward()
                optimizer.step()
                capture.step()


def exercise(seed: int, bases: Path, work: Path) -> list[str]:
    """Damage a copy of a capture by this seed and use it in every way; return what was done to it.

    Raises:
        whatever Trueup raises beside TrueupError: that is a finding.
    """
    chance = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(bases / chance.choice(BASES), work / "damaged", symlinks=True)
    done = mutate(work / "damaged", chance)
    for use in (read, compare_both_ways, show):
        try:
            use(work / "damaged", bases / "baseline", chance)
        except trueup.TrueupError as error:
            assert str(error), f"an error without words: {done}"  # noqa: PT017 - it need not be raised
        except Exception as error:
            error.add_note(f"seed {seed}: {done}")
            raise
    return done


def read(damaged: Path, _: Path, chance: random.Random) -> None:
    capture = trueup.open_capture(damaged)
    rows = capture.records().to_pylist()
    kept = [row for row in rows if row.get("payload_segment") is not None]
    for row in chance.sample(kept, min(len(kept), 5)):
        try:
            tensor = capture.payload(row["rank"], row["payload_segment"], row["payload_key"], row["payload_view"])
            float(np.sum(tensor.astype(np.float64)))
        except trueup.TrueupError:
            pass
    for rank in capture.ranks:
        capture.sites(rank)
    capture.processes()
    assert all(isinstance(problem, str) for problem in capture.problems)


def compare_both_ways(damaged: Path, sound: Path, chance: random.Random) -> None:
    for sides in ((sound, damaged), (damaged, sound)):
        try:
            result = trueup.compare(*sides, level=chance.choice((None, None, "api", "aten")))
        except trueup.TrueupError:
            continue
        assert result.verdict in ("aligned", "deviates", "inconclusive")
        lost = trueup.open_capture(damaged).lost
        assert result.verdict != "aligned" or not lost, f"aligned, though it says that {lost[0]}"
        if chance.random() < 0.05:
            result.save(damaged.parent / "report")
            shutil.rmtree(damaged.parent / "report")


def show(damaged: Path, sound: Path, chance: random.Random) -> None:
    """Use the command line, whose errors are messages."""
    if chance.random() < 0.05:
        command: list[Any] = chance.choice((["show", damaged], ["compare", sound, damaged], ["compare", damaged, sound]))
        code = run_command([str(part) for part in command])
        assert code in (0, 1, 2), code


def run_command(arguments: list[str]) -> int:
    """Run ``trueup`` in this process with its output thrown away; an unexpected exception comes through."""
    from trueup.doors.cli import main

    os.environ["TRUEUP_TRACEBACK"] = "1"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(arguments)


def place(error: BaseException) -> str:
    """Return what an exception is and where in Trueup it came from, by which findings are told apart: ``KeyError in load``."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}trueup{os.sep}" in frame.filename] or frames
    path = Path(ours[-1].filename)
    return f"{type(error).__name__} in {path.parent.name}/{path.name}: {ours[-1].name}"
