"""`trueup profile`: traces and tables as they are given, or those of a training that is run for a few steps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from trueup.foundation.model import TrueupError
from trueup.migration.profile.judging import Profile, judge
from trueup.migration.profile.reading import read
from trueup.migration.profile.tables import read_csv, read_text
from trueup.recording.recorder.launch import program, run_to_the_end

VARIABLE = "TRUEUP_PROFILE"
INSIDE = ("trace_view.json", "kernel_details.csv", "step_trace_time.csv")  # of torch_npu's output folder, the most telling first


def profile(path: Path, lines: Mapping[str, Sequence[str]] | None = None) -> Profile:
    """Return where the time of a trace goes.

    Args:
        path: Chrome's JSON (.json, .json.gz), a CSV of torch_npu, a text that holds a table, or torch_npu's output folder.
        lines: the user's lines by names of operators; else those of the trace's stacks, which know a function's first line.

    Raises:
        TrueupError: it is not there, or cannot be read.
    """
    path = _inside(path) if path.is_dir() else path
    if not path.is_file():
        raise TrueupError(
            f"A trace is not there.\n  where:    {path}\n  expected: .json, .json.gz, .csv, .txt, or torch_npu's output folder\n"
            "  got:      nothing of that name\n  next:     correct the path, or: trueup profile -- python train.py"
        )
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    found = read_csv(path) if kind == "csv" else read_text(path) if kind in ("txt", "log", "out") else read(path)
    if isinstance(found, Profile):
        return found
    return judge(found, lines)


def _inside(folder: Path) -> Path:
    found = [one for name in INSIDE for one in sorted(folder.rglob(name))] or sorted(folder.glob("*.json*"))
    return found[0] if found else folder / INSIDE[0]


def profiled(command: Sequence[str], steps: int) -> list[Profile]:
    """Run a training until some of its steps are recorded, and return where their time goes, for each process that trained.

    Raises:
        TrueupError: the command cannot start, or no step of it was recorded.
    """
    with tempfile.TemporaryDirectory(prefix="trueup-profile-") as name:
        folder = Path(name)
        try:
            code = run_to_the_end([program(command[0]), *command[1:]], {**os.environ, VARIABLE: f"{folder}:{steps}"}, None, None)
        except OSError as error:
            raise TrueupError(f"The command cannot start: {command[0]}: {error.strerror or error}") from None
        traces = sorted(folder.glob("times-*.json"))
        if not traces:
            raise TrueupError(
                f"No step was recorded.\n  expected: a training in PyTorch that steps an optimizer at least {steps + 4} times\n"
                f"  got:      the command ended with exit code {code} before that\n  next:     train for more steps, or --steps 1"
            )
        return [
            replace(profile(one, _lines(one)), where=f"process {one.stem.removeprefix('times-')}", compiled=_compiled(one))
            for one in traces
        ]  # fmt: skip


def _beside(trace: Path, what: str) -> bytes:
    path = trace.with_name(trace.name.replace("times-", f"{what}-"))
    return path.read_bytes() if path.is_file() else b""


def _compiled(trace: Path) -> tuple[str, ...]:
    return msgspec.json.decode(_beside(trace, "compiled") or b"[]", type=tuple[str, ...])


def _lines(trace: Path) -> dict[str, list[str]]:
    found = msgspec.json.decode(_beside(trace, "lines") or b"{}", type=dict[str, dict[str, int]])
    return {name: sorted(counts, key=counts.__getitem__, reverse=True)[:3] for name, counts in found.items()}
