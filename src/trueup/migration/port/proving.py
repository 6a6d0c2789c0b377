"""`prove`: the original on the CPU and its port on the simulated device, for a few steps with one seed, compared call by call."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.store.layout import holds_records
from trueup.foundation.words.wording import counted
from trueup.migration.port.porting import Seen
from trueup.migration.port.running import REDIRECT, table
from trueup.recording.recorder.launch import execute
from trueup.recording.recorder.options import CaptureOptions

SEED = 1234
LIMIT = 600.0
"""Seconds that either run may take."""

ERROR = re.compile(r"^(\[rank\d+\]: )?\w+(\.\w+)*(Error|Exception|Interrupt)\b(?!.*ChildFailed)")
NOTHING = "it ended well and nothing was recorded: it trains nothing, or PYTHONPATH is set in the command (set it outside)"
IDLE = "nothing of the port ran on the device: give the command the option that chooses it (--device npu, --accel, ...)"
KNOWS_CUDA = " The original does not run on the CPU, so it ran on the simulated device, too, CUDA's calls sent there."
ON_CPU: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": "", "TRUEUP_SIMULATED": None}
SIMULATED: dict[str, str | None] = {"TRUEUP_SIMULATED": "1"}
FRAME = re.compile(r'File "(.+?)", line (\d+)')
"""A line of a traceback."""


@dataclass(frozen=True)
class Proof:
    """Whether a port trains as its original does. ``result`` is the comparison; None where one of them did not run.

    ``exit_code`` is 0 for the same, 1 for another, 2 where nobody can tell."""

    steps: int
    result: Result | None
    sentence: str
    exit_code: int = 2


def prove(
    source: Path, ported: Path, command: str, *, steps: int = 3, look: Sequence[Seen] = (), branches: Sequence[str] = ()
) -> Proof:
    """Run a command in the original's folder on the CPU and in the port's on the simulated device, and compare the first steps.

    An original that does not run on the CPU runs on the simulated device with CUDA's calls sent there: then the changes are proved,
    and what a device rounds otherwise is not seen. So does one that trains otherwise on the CPU, for it may take another branch.

    Args:
        source: the original: a script or its folder.
        ported: the port: a folder.
        command: how the training is started there, as a shell has it: ``python train.py --epochs 1``. No shell runs it.
        steps: how many.
        look: lines of the original that will not do on the device, with the reason: where a run ends there, it is said.
        branches: its lines that do something else where an accelerator is there.

    Returns:
        What was found. A run that does not start is no error: the port is not proved then.

    Raises:
        TrueupError: the command is none.
    """
    words = words_of(command)
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        runs = Path(folder)
        base = source if source.is_dir() else source.parent
        redirect = runs / "redirect.json"
        redirect.write_text(json.dumps(table("npu", runs)))
        plain = partial(record, folder=base, words=words, environment=ON_CPU, steps=steps)
        redirected = partial(record, folder=base, words=words, environment={**SIMULATED, REDIRECT: str(redirect)}, steps=steps)
        failed = plain(runs / "original")
        runs_plainly = failed is None
        if failed is not None:  # it may know no other device than CUDA
            again = redirected(runs / "redirected")
            if again is not None:
                why = f"{failed}{_also(failed, again)}{_known(runs / 'redirected.log', base, look)}"
                return Proof(steps, None, _unproved(f"the original does not run on the CPU: {why}", words))
        failed = record(runs / "port", ported, words, SIMULATED, steps)
        if failed is not None:
            why = f"{failed}{_known(runs / 'port.log', ported, look)}"
            return Proof(steps, None, _unproved(f"the port does not run on the simulated device: {why}", words))
        if not _on_device(runs / "port"):
            return Proof(steps, None, f"Converted, not proved: {IDLE}")
        try:
            if not runs_plainly:
                found, _ = _judged(compare(runs / "redirected", runs / "port"), runs / "redirected", redirected, steps)
                return dataclasses.replace(found, sentence=found.sentence + KNOWS_CUDA)
            result = compare(runs / "original", runs / "port")
            there = None if result.verdict == "aligned" else _compared_again(redirected, runs)
            if there is None or there.verdict != "aligned":
                found, repeats = _judged(result, runs / "original", plain, steps)
                if found.exit_code == 0 or there is None or repeats:
                    return found
            found, _ = _judged(there, runs / "redirected", redirected, steps)
            if found.exit_code:
                return found
            ran = [one for one in branches if one.partition(":")[0] in _ran(runs / "port", ported)]
            return dataclasses.replace(found, sentence=found.sentence + _branched(result, ran))
        except TrueupError as error:
            return Proof(steps, None, f"Converted, not proved: {str(error).splitlines()[0]}")


def _compared_again(redirected: Callable[[Path], str | None], runs: Path) -> Result | None:
    """Compare the port with its original on the same device; None where that does not run there."""
    return compare(runs / "redirected", runs / "port") if redirected(runs / "redirected") is None else None


def _judged(result: Result, original: Path, run: Callable[[Path], str | None], steps: int) -> tuple[Proof, bool]:
    """Judge a comparison, and say whether the original is known to repeat itself. Where the two differ it runs once more: what it
    does not repeat, such as a time of day that it logs, no port is to blame for."""
    if result.verdict == "aligned":
        return Proof(steps, result, f"{_same(result, steps)}.", 0), False
    again = original.with_name(f"{original.name}-again")
    if run(again) is not None:
        return Proof(steps, result, result.sentence, result.exit_code), False
    own = compare(original, again)
    return unrepeated(result, own, steps), own.counts["equal"] == own.counts["compared"] and not own.unmatched


def unrepeated(result: Result, own: Result, steps: int) -> Proof:
    """Judge a comparison of an original with its port by that of the original with itself, ``own``.

    A call that differs there, too, is not the port's. The port is the same if it differs in no other call, and no gradient and no
    weight is among them: then they are figures on the side. A training that two runs do not share proves nothing.
    """
    apart = own.calls.filter(pc.not_equal(own.calls["state"], "equal"))
    loose = _places(apart)
    off = _places(result.calls.filter(pc.is_in(result.calls["state"], pa.array(["deviates", "incomparable"]))))
    mine = [one for one in result.culprits if (one.rank, one.step, one.seq[0]) not in loose]
    if not loose or mine or not off or result.unmatched:
        sentence = result.sentence if mine[:1] == list(result.culprits[:1]) else f"DEVIATES  {mine[0].sentence}"
        return Proof(steps, result, sentence, result.exit_code)
    why = " ".join(own.sentence.splitlines()[0].split()).removeprefix("DEVIATES ")
    if trained := sum(phase not in ("forward", "data") for phase in apart["phase"].to_pylist()):
        what = f"{counted(trained, 'call')} of the backward pass and the optimizer"
        why = f"two runs of the original do not train alike, either, so give it a seed: {what} differ ({why})"
        return Proof(steps, result, f"Converted, not proved: {why}")
    if off - loose:
        what = f"{counted(len(off - loose), 'call')} behind it cannot be told"
        return Proof(steps, result, f"Converted, not proved: the original does not repeat itself, and {what} ({why})")
    beside = f"{len(off):,} of them differ between two runs of the original, too, and reach no gradient"
    return Proof(steps, result, f"{_same(result, steps, loose)}. {beside}: {why}.", 0)


def _places(calls: pa.Table) -> set[tuple[int, int, int]]:
    """Return where calls stand in the baseline: rank, step and number."""
    columns = (calls[name].to_pylist() for name in ("rank", "step", "seq_baseline"))
    return {(rank, step, seq) for rank, step, seq in zip(*columns, strict=True) if seq >= 0}


def _branched(on_cpu: Result, branches: Sequence[str]) -> str:
    """Say that an original is not the same on the CPU, what was seen, and what it decides by the device."""
    what = "trains otherwise" if on_cpu.verdict == "deviates" else "could not be compared with it"
    decides = f" What it decides by the device: {'; '.join(branches[:3])}." if branches else ""
    seen = " ".join(on_cpu.sentence.splitlines()[0].split())
    return f" It ran on the simulated device, too, for on the CPU it {what} ({seen}).{decides}"


def _ran(captured: Path, folder: Path) -> set[str]:
    """Return the scripts of a folder whose lines made recorded calls, relative to it."""
    capture = open_capture(captured)
    frames = [frame for rank in capture.ranks for stack, _ in capture.sites(rank).values() for frame in stack]
    files = {Path(frame.partition(" in ")[0].rpartition(":")[0]) for frame in frames}
    root = folder.resolve()
    found = {(root / file).resolve() for file in files}
    return {str(file.relative_to(root)) for file in found if file.is_relative_to(root)}


def _known(log: Path, folder: Path, look: Sequence[Seen]) -> str:
    """Say what is known of the line at which a run ended, the innermost that somebody has to look at."""
    known = {((folder / one.path).resolve(), one.text): one for one in look}
    for file, line in reversed(FRAME.findall(log.read_text("utf-8", "replace"))):
        path = (folder / file).resolve()
        for (where, text), one in known.items():
            if where == path and text in _line(path, int(line)):
                return f". At {one.path}:{one.line} stands {text}: {one.reason}"
    return ""


def _line(path: Path, number: int) -> str:
    """Return a line of a script and those it begins, as `Seen` has them; the port's own lines may have moved."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return ""
    return "\n".join(lines[number - 1 : number + 3])


def _on_device(captured: Path) -> bool:
    """Return whether a tensor of a run was on the simulated device."""
    names = open_capture(captured).records(["device"]).column("device").unique().to_pylist()
    return any(str(name).startswith("npu") for name in names)


def _unproved(why: str, words: list[str]) -> str:
    program = shutil.which(words[0], path=os.environ.get("PATH")) or words[0]
    return f"Converted, not proved: {why} (run by {program})"


def _also(first: str, second: str) -> str:
    """Say how an original failed that was run again, its calls for CUDA sent to the simulated device."""
    if first == second:
        return "; nor with CUDA's calls sent to the simulated device"
    return f"; and with CUDA's calls sent to the simulated device: {second}"


def words_of(command: str) -> list[str]:
    """Return a command's words, as a shell has them; raises TrueupError where there are none."""
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


def zeroed() -> dict[str, str]:
    """Return the variables by which memory that nobody wrote (``torch.empty``) reads as zeros: GNU's allocator fills what it hands
    out with the complement of `perturb`, but for what a thread keeps in its cache."""
    kept = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": ":".join([*([kept] if kept else []), "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0"])}


def record(
    into: Path, folder: Path, words: list[str], environment: Mapping[str, str | None], steps: int,
    *, timeout: float | None = LIMIT, **chosen: Any,
) -> str | None:  # fmt: skip
    """Record a run, its functions and statistics or what is chosen; return why there is nothing, if there is nothing."""
    options = CaptureOptions.of(**{"level": ("module", "api"), "detail": "stats", **chosen}, steps=f"0:{steps}", stop=True)
    log = into.with_suffix(".log")
    program = words[0] if os.sep not in words[0] else str((folder / words[0]).absolute())
    command = [program, *words[1:]]
    environment = {**zeroed(), **environment}
    code = execute(into, options, command, environment=environment, output=log, timeout=timeout, folder=folder, seed=SEED)
    recorded = (into / "manifest.json").is_file() and holds_records(into)
    if recorded and code == 0:
        return None
    lines = [line.strip(" \t=") for line in log.read_text("utf-8", "replace").splitlines() if line.strip(" \t=")]
    if code == 0:
        return NOTHING
    return _ended(code, lines)


def _ended(code: int, lines: Sequence[str]) -> str:
    """Return why a run ended, by its exit code and what it printed; a process that was killed prints no reason."""
    errors = [line for line in lines if ERROR.search(line)]  # torchrun says more, and later
    if not errors and code > 128 and code - 128 in set(signal.Signals):
        return f"it was ended by {signal.Signals(code - 128).name}" + (f"; its last line: {lines[-1][:200]}" if lines else "")
    found = errors or lines
    return found[-1][:300] if found else f"it ended with exit code {code}"


def _same(result: Result, steps: int, beside: Collection[tuple[int, int, int]] = ()) -> str:
    """Say that the port is the same, and how nearly; ``beside`` are calls that do not count."""
    calls = counted(result.counts["compared"], "call")
    near = _places(result.calls.filter(pc.equal(result.calls["state"], "agrees")))
    how = "within rounding" if near.difference(beside) else "bitwise equal"
    return f"The port trains the same: {counted(steps, 'step')}, {calls}, {how}"
