"""`prove`: the original on the CPU and its port on the simulated device, for a few steps with one seed, compared call by call."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.words.wording import counted
from trueup.migration.port.running import REDIRECT, table
from trueup.recording.recorder.launch import execute
from trueup.recording.recorder.options import CaptureOptions

SEED = 1234
LIMIT = 600.0
"""Seconds that either run may take."""

NOISE = 1e-3
"""Largest relative L2 distance of two gradients of the same batch, once as a whole and once in parts. Measured in float32 on the
training of the tests: 1e-7. One lost sample of 256 is 1/256 of a mean, 4e-3; without an all-reduce a gradient is that of a part."""
ERROR = re.compile(r"^(\[rank\d+\]: )?\w+(\.\w+)*(Error|Exception|Interrupt)\b(?!.*ChildFailed)")
NOTHING = "it ended well and nothing was recorded: it trains nothing, or PYTHONPATH is set in the command (set it outside)"
KNOWS_CUDA = " The original knows no device but CUDA, so it ran on the simulated one, too."


Gradients: TypeAlias = "dict[tuple[int, int, str], NDArray[np.float64]]"
"""By step, number of the optimizer's step in it, and parameter."""


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


@dataclass(frozen=True)
class Spread:
    """Whether the gradients of several processes are those of one; ``same`` is None where nobody can tell."""

    processes: int
    same: bool | None
    sentence: str

    @property
    def exit_code(self) -> int:
        """Return 0 for the same, 1 for others, 2 where nobody can tell."""
        return 2 if self.same is None else int(not self.same)


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
    words = _words(command)
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        runs = Path(folder)
        plain: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": "", "TRUEUP_SIMULATED": None}
        simulated: dict[str, str | None] = {"TRUEUP_SIMULATED": "1"}
        base, original = source if source.is_dir() else source.parent, runs / "original"
        failed = _run(original, base, words, plain, steps)
        if failed is not None:  # it may know no other device than CUDA
            redirect = runs / "redirect.json"
            redirect.write_text(json.dumps(table("npu", runs)))
            original = runs / "redirected"
            again = _run(original, base, words, {**simulated, REDIRECT: str(redirect)}, steps)
            if again is not None:
                return Proof(steps, None, _unproved(f"the original does not run on the CPU: {failed}{_also(failed, again)}", words))
        failed = _run(runs / "port", ported, words, simulated, steps)
        if failed is not None:
            return Proof(steps, None, _unproved(f"the port does not run on the simulated device: {failed}", words))
        try:
            result = compare(original, runs / "port")
        except TrueupError as error:
            return Proof(steps, None, f"Converted, not proved: {str(error).splitlines()[0]}")
    return Proof(steps, result, _sentence(result, steps) + (KNOWS_CUDA if original.name == "redirected" else ""))


def _unproved(why: str, words: list[str]) -> str:
    program = shutil.which(words[0], path=os.environ.get("PATH")) or words[0]
    return f"Converted, not proved: {why} (run by {program})"


def _also(first: str, second: str) -> str:
    """Say how an original failed that was run again, its calls for CUDA sent to the simulated device."""
    if first == second:
        return "; nor with CUDA's calls sent to the simulated device"
    return f"; and with CUDA's calls sent to the simulated device: {second}"


def prove_spread(ported: Path, command: str, *, steps: int = 3, processes: int = 2) -> Spread:
    """Run a distributed port in one process and in several, on the simulated device, and compare the gradients of the first steps.

    Args:
        ported: the port, a folder.
        command: how the training is started there without torchrun: ``python train.py``.
        steps: how many.
        processes: how many, which gloo joins.

    Raises:
        TrueupError: the command is none.
    """
    words = _words(command)
    found: list[Gradients] = []
    environment: dict[str, str | None] = {"TRUEUP_SIMULATED": "1"}
    if not Path(words[0]).name.startswith("python"):
        return Spread(processes, None, f"The gradients were not compared: {words[0]} is no Python, and torchrun starts Python.")
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        for count in (1, processes):
            launched = [words[0], "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", *words[1:]]
            into = Path(folder) / f"of-{count}"
            failed = _run(into, ported, launched, environment, steps, ("optimizer",)) or ""
            if failed:
                said = (
                    f"The gradients were not compared: the port does not run in {counted(count, 'process', 'processes')}: {failed}"
                )
                return Spread(processes, None, said)
            found.append(_gradients(into))
    return _compared(found[0], found[1], processes, steps)


def _compared(one: Gradients, several: Gradients, processes: int, steps: int) -> Spread:
    """Compare each gradient by its own size; a small one, which is rounding alone, by a thousandth of all of its step."""
    if not one or one.keys() != several.keys():
        said = f"The gradients were not compared: {len(one)} were recorded in one process, {len(several)} in {processes}."
        return Spread(processes, None, said)
    whole = {step: math.hypot(*(float(np.linalg.norm(g)) for key, g in one.items() if key[0] == step)) for step, *_ in one}
    errors = {}
    for key, gradient in one.items():
        size = max(float(np.linalg.norm(gradient)), whole[key[0]] / 1000, 1e-30)
        errors[key] = float(np.linalg.norm(several[key] - gradient)) / size
    (step, _, name), worst = max(errors.items(), key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
    if worst <= NOISE:
        how = "bitwise" if worst == 0 else f"within rounding (rel. L2 {worst:.1g} at most)"
        count = f"{counted(steps, 'step')}, {counted(len(one) // steps, 'gradient')} each"
        return Spread(processes, True, f"The gradients of {processes} processes are those of one: {count}, {how}.")
    causes = "BatchNorm, dropout, a loss that is a sum, or random data do that; else a change is missing."
    said = f"The gradients of {processes} processes are not those of one: {name}, step {step}, rel. L2 {worst:.2g}. {causes}"
    return Spread(processes, False, said)


def _gradients(captured: Path) -> Gradients:
    """Return what optimizers were given in the first process, by step, number of the optimizer's step, and parameter."""
    capture = open_capture(captured)
    columns = ["step", "ordinal", "op", "slot", "payload_segment", "payload_key", "payload_view"]
    rows = capture.records(columns, rank=0, level="api", phase="optimizer").to_pylist()
    return {
        (row["step"], row["ordinal"], row["slot"][len("input.") : -len(".grad")].removeprefix("module.")): np.asarray(
            capture.payload(0, row["payload_segment"], row["payload_key"], row["payload_view"]), np.float64
        ).ravel()
        for row in rows
        if row["op"].endswith(".step") and row["slot"].endswith(".grad") and row["payload_key"] is not None
    }


def _words(command: str) -> list[str]:
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
    return words


def _run(
    into: Path, folder: Path, words: list[str], environment: dict[str, str | None], steps: int, phase: tuple[str, ...] | None = None
) -> str | None:
    """Record a run; return why there is nothing, if there is nothing."""
    detail = "stats" if phase is None else "tensor"
    options = CaptureOptions.of(level=("module", "api"), detail=detail, steps=f"0:{steps}", phase=phase, stop=True)
    log = into.with_suffix(".log")
    program = words[0] if os.sep not in words[0] else str((folder / words[0]).absolute())
    command = [program, *words[1:]]
    code = execute(into, options, command, environment=environment, output=log, timeout=LIMIT, folder=folder, seed=SEED)
    recorded = (into / "manifest.json").is_file() and any(into.glob("rank-*/step-*/records-*"))
    if recorded and code == 0:
        return None
    lines = [line.strip(" \t=") for line in log.read_text("utf-8", "replace").splitlines() if line.strip(" \t=")]
    if code == 0:
        return NOTHING
    errors = [line for line in lines if ERROR.search(line)] or lines  # torchrun says more, and later
    return errors[-1][:300] if errors else f"it ended with exit code {code}"


def _sentence(result: Result, steps: int) -> str:
    calls = counted(result.counts["compared"], "call")
    if result.verdict != "aligned":
        return result.sentence
    how = "bitwise equal" if result.counts["equal"] == result.counts["compared"] else "within rounding"
    return f"The port trains the same: {counted(steps, 'step')}, {calls}, {how}."
