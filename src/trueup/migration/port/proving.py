"""`prove`: the original on the CPU and its port on the simulated device, for a few steps with one seed, compared call by call.

`prove_spread`: a distributed port in one process and in several, whose gradients have to be those of one. Where they are not, what
was recorded says why: who had which batch, whether the processes agree, by which factor a gradient is off, and which layers ran
that see one process's share alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import Capture, open_capture
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

NOISE = 1e-3
"""Largest relative L2 distance of two gradients of the same batch, once as a whole and once in parts. Measured in float32 on the
training of the tests: 1e-7. One lost sample of 256 is 1/256 of a mean, 4e-3; without an all-reduce a gradient is that of a part."""
APART = {
    "BatchNorm": "BatchNorm computes over a process's share (torch.nn.SyncBatchNorm: over all)",
    "Dropout": "dropout differs by process",
}
"""Layers that compute something else in each process, by a part of their class's name."""

Gradients: TypeAlias = "dict[tuple[int, int, str], NDArray[np.float64]]"
"""By step, number of the optimizer's step in it, and parameter."""
Batch: TypeAlias = "tuple[tuple[int, str], ...]"
"""What a model was given first: the number of elements and the digest of each tensor."""


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


@dataclass(frozen=True)
class Shown:
    """What one run showed: by process the gradients that its optimizers got and the first batch; and the classes of all modules."""

    gradients: Sequence[Gradients]
    batches: Sequence[Batch]
    layers: frozenset[str]


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
    words = words_of(command)
    found: list[Shown] = []
    if not Path(words[0]).name.startswith("python"):
        return Spread(processes, None, f"The gradients were not compared: {words[0]} is no Python, and torchrun starts Python.")
    with tempfile.TemporaryDirectory(prefix="trueup-prove-") as folder:
        for count in (1, processes):
            launched = [words[0], "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", *words[1:]]
            into = Path(folder) / f"of-{count}"
            chosen: dict[str, Any] = {"level": "module", "detail": "tensor", "phase": ("forward", "optimizer")}
            failed = record(into, ported, launched, {"TRUEUP_SIMULATED": "1"}, steps, **chosen)
            if failed is not None:
                where = f"the port does not run in {counted(count, 'process', 'processes')}: {failed}"
                return Spread(processes, None, f"The gradients were not compared: {where}")
            found.append(_seen(open_capture(into), count))
    return judged(found[0], found[1], steps)


def judged(one: Shown, several: Shown, steps: int) -> Spread:
    """Compare each gradient by its own size; a small one, which is rounding alone, by a thousandth of all of its step."""
    processes = len(several.gradients)
    single, first = one.gradients[0], several.gradients[0]
    if not single or single.keys() != first.keys():
        said = f"The gradients were not compared: {len(single)} were recorded in one process, {len(first)} in {processes}."
        return Spread(processes, None, said)
    if _whole(one, several):
        said = "Each process computes the whole batch: nothing shares the data between them (data_parallel.share, or a sampler)."
        return Spread(processes, False, f"The training of {processes} processes is not that of one. {said}")
    (step, _, name), worst = _worst(single, first)
    if worst <= NOISE:
        how = "bitwise" if worst == 0 else f"within rounding (rel. L2 {worst:.1g} at most)"
        count = f"{counted(steps, 'step')}, {counted(len(single) // steps, 'gradient')} each"
        return Spread(processes, True, f"The gradients of {processes} processes are those of one: {count}, {how}.")
    said = f"The gradients of {processes} processes are not those of one: {name}, step {step}, rel. L2 {worst:.2g}."
    return Spread(processes, False, f"{said} {_why(one, several)}")


def _why(one: Shown, several: Shown) -> str:
    """Say why gradients differ, by what was recorded; where it does not tell, what is left."""
    processes = len(several.gradients)
    sizes = [sum(size for size, _ in batch) for batch in (one.batches[0], *several.batches)]
    if sizes[0] and all(size == sizes[0] for size in sizes[1:]):
        return f"Each process reads a batch as large as that of one: together {processes} times as much (data_parallel.share)."
    if any(_worst(several.gradients[0], other)[1] > NOISE for other in several.gradients[1:]):
        return "The processes do not agree on them: nothing takes their mean (data_parallel.wrap)."
    factor = _factor(one.gradients[0], several.gradients[0])
    if factor is not None:
        known = "the loss is scaled otherwise"
        if math.isclose(factor, 1 / processes, rel_tol=NOISE):
            known = "the loss is a sum over the batch, of which the processes take the mean, or it is divided once more"
        elif math.isclose(factor, processes, rel_tol=NOISE):
            known = "they are added over the processes, and no mean is taken"
        return f"In the first step each is {factor:.4g} times that of one: {known}."
    apart = [said for part, said in APART.items() if any(part in name and not name.startswith("Sync") for name in several.layers)]
    if apart:
        return f"{'; '.join(apart)}."
    return "No BatchNorm or Dropout ran: random data, a loss that is no mean over samples, or a change that is missing."


def _whole(one: Shown, several: Shown) -> bool:
    """Return whether all processes were given what one was given; a batch of one sample they cannot share."""
    return bool(one.batches[0]) and all(batch == one.batches[0] for batch in several.batches) and one.batches[0][0][0] > 1


def _worst(one: Gradients, other: Gradients) -> tuple[tuple[int, int, str], float]:
    """Return the gradient that is furthest off, and its relative L2 distance."""
    whole = {step: math.hypot(*(float(np.linalg.norm(g)) for key, g in one.items() if key[0] == step)) for step, *_ in one}
    errors = {}
    for key, gradient in one.items():
        size = max(float(np.linalg.norm(gradient)), whole[key[0]] / 1000, 1e-30)
        errors[key] = float(np.linalg.norm(other[key] - gradient)) / size if key in other else math.inf
    return max(errors.items(), key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])


def _factor(one: Gradients, several: Gradients) -> float | None:
    """Return by which positive factor all gradients of the first step are off, None if by none: later steps have other weights."""
    step = min(key[0] for key in one)
    a, b = (np.concatenate([each[key] for key in one if key[0] == step]) for each in (one, several))
    factor = float(a @ b / max(float(a @ a), 1e-300))
    if factor > 0 and abs(factor - 1) > NOISE and float(np.linalg.norm(b - factor * a)) <= NOISE * float(np.linalg.norm(b)):
        return factor
    return None


def _seen(capture: Capture, processes: int) -> Shown:
    """Return what was recorded of the processes of a run."""
    payload = ["payload_segment", "payload_key", "payload_view"]
    columns = ["step", "ordinal", "op", "scope", "slot", "phase", "shape", "digest", *payload]
    gradients, batches, layers = [], [], set()
    for rank in range(processes):
        rows = capture.records(columns, rank=rank, level="module").to_pylist()
        given = [row for row in rows if row["phase"] == "forward" and row["scope"] == "" and row["slot"].startswith("input.")]
        first = [row for row in given if all(row[name] == given[0][name] for name in ("step", "ordinal", "op"))]
        batches.append(tuple((math.prod(row["shape"]), str(row["digest"])) for row in first if row["shape"] is not None))
        layers |= {row["op"] for row in rows if row["phase"] == "forward"}
        gradients.append(_gradients(capture, rank, rows))
    return Shown(gradients, batches, frozenset(layers))


def _gradients(capture: Capture, rank: int, rows: list[dict[str, Any]]) -> Gradients:
    """Return what the optimizers of a process were given."""
    return {
        (row["step"], row["ordinal"], row["slot"][len("input.") : -len(".grad")].removeprefix("module.")): np.asarray(
            capture.payload(rank, row["payload_segment"], row["payload_key"], row["payload_view"]), np.float64
        ).ravel()
        for row in rows
        if row["op"].endswith(".step") and row["slot"].endswith(".grad") and row["payload_key"] is not None
    }
