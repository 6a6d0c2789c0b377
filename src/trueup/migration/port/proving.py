"""`prove`: the original on the CPU and its port on the simulated device, for a few steps with one seed, compared call by call."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.words.wording import counted
from trueup.migration.port.running import REDIRECT, table
from trueup.recording.recorder.launch import execute
from trueup.recording.recorder.options import CaptureOptions

SEED = 1234
LIMIT = 600.0
"""Seconds that either run may take."""

KNOWS_CUDA = " The original knows no device but CUDA, so it ran on the simulated one, too."


@dataclass(frozen=True)
class Proof:
    """Whether a port trains as its original does. ``result`` is the comparison; None where one of them did not run."""

    steps: int
    result: Result | None
    sentence: str

    @property
    def exit_code(self) -> int:
        """Return 0 for the same, 1 for another, 2 where nobody can tell."""
        return 2 if self.result is None else self.result.exit_code


def prove(source: Path, ported: Path, command: str, *, steps: int = 3) -> Proof:
    """Run a command in the original's folder on the CPU and in the port's on the simulated device, and compare the first steps.

    An original that does not run on the CPU runs on the simulated device with CUDA's calls sent there: then the changes are proved,
    and what a device rounds otherwise is not seen.

    Args:
        source: the original: a script or its folder.
        ported: the port: a folder.
        command: how the training is started there, as a shell has it: ``python train.py --epochs 1``. No shell runs it.
        steps: how many.

    Returns:
        What was found. A run that does not start is no error: the port is not proved then.

    Raises:
        TrueupError: the command is none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        words, why = [], str(error)
    else:
        why = "nothing"
    if not words:
        raise TrueupError(
            f"There is no command to prove the port with.\n  expected: --prove 'python train.py'\n  got:      {why}\n"
            "  next:     name the command that starts the training, seen from its folder"
        )
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        runs = Path(folder)
        plain: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": "", "TRUEUP_SIMULATED": None}
        simulated: dict[str, str | None] = {"TRUEUP_SIMULATED": "1"}
        base, original = source if source.is_dir() else source.parent, runs / "original"
        for name, where, environment in (("original", base, plain), ("port", ported, simulated)):
            failed = _run(runs / name, where, words, environment, steps)
            if failed is not None and name == "original":  # it may know no other device than CUDA
                redirect = runs / "redirect.json"
                redirect.write_text(json.dumps(table("npu", runs)))
                original = runs / "redirected"
                if _run(original, where, words, {**simulated, REDIRECT: str(redirect)}, steps) is None:
                    continue
            if failed is not None:
                device = "on the CPU" if name == "original" else "on the simulated device"
                program = shutil.which(words[0], path=os.environ.get("PATH")) or words[0]
                return Proof(steps, None, f"Converted, not proved: the {name} does not run {device}: {failed} (run by {program})")
        try:
            result = compare(original, runs / "port")
        except TrueupError as error:
            return Proof(steps, None, f"Converted, not proved: {str(error).splitlines()[0]}")
    return Proof(steps, result, _sentence(result, steps) + (KNOWS_CUDA if original.name == "redirected" else ""))


def _run(into: Path, folder: Path, words: list[str], environment: dict[str, str | None], steps: int) -> str | None:
    """Record a run; return why there is nothing, if there is nothing."""
    options = CaptureOptions.of(level=("module", "api"), detail="stats", steps=f"0:{steps}", stop=True)
    log = into.with_suffix(".log")
    program = words[0] if os.sep not in words[0] else str((folder / words[0]).absolute())
    command = [program, *words[1:]]
    code = execute(into, options, command, environment=environment, output=log, timeout=LIMIT, folder=folder, seed=SEED)
    recorded = (into / "manifest.json").is_file() and any(into.glob("rank-*/step-*/records-*"))
    if recorded and code == 0:
        return None
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    if code == 0:
        return "it ended well and computed nothing"
    return lines[-1][:300] if lines else f"it ended with exit code {code}"


def _sentence(result: Result, steps: int) -> str:
    calls = counted(result.counts["compared"], "call")
    if result.verdict != "aligned":
        return result.sentence
    how = "bitwise equal" if result.counts["equal"] == result.counts["compared"] else "within rounding"
    return f"The port trains the same: {counted(steps, 'step')}, {calls}, {how}."
