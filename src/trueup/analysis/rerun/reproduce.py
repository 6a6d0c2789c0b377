"""A recorded call as a test that fails where the device is wrong, for people who have no Trueup.

    OUT/test_<op>.py         pytest; imports the framework and safetensors
    OUT/conftest.py          its options: --device, --against, --import
    OUT/inputs.safetensors   what the call was given
    OUT/README.md            what is expected, limits and where they come from, the environment
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.analysis.rerun.context import Context, find_context
from trueup.analysis.rerun.executing import framework_of
from trueup.analysis.rerun.minimise import Minimised, Signature
from trueup.analysis.rerun.minimise import minimise as shrink
from trueup.analysis.rerun.reproducer_files import headline, worst_slot, write_files
from trueup.analysis.rerun.trying import Trying
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.adapters import adapter
from trueup.recording.execution.case_errors import INPUTS
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain
from trueup.recording.execution.outcomes import BLAMED
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls


@dataclass(frozen=True)
class Reproducer:
    """What was written."""

    folder: Path
    test: Path
    sentence: str
    """What it shows."""
    fails: bool | None
    """Whether the device fails; None: it was not tried."""
    checked: bool
    """Whether pytest was run on both devices and did what is expected."""
    size: int
    """Bytes of ``inputs.safetensors``."""
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: written, and it fails where it should as far as that was tried; 2: the device does not fail."""
        return 2 if self.fails is False else 0


@dataclass(frozen=True)
class _Asked:
    """How a call is to be made a test; see `reproduce`."""

    device: str | None
    against: str
    minimise: bool
    context: bool
    seconds: float
    simulated: bool
    imports: str
    framework: str


def reproduce(
    capture: str | Path, call: str | int, output: str | Path, *, device: str | None = None, against: str = "cpu",
    minimise: bool = False, context: bool = False, seconds: float = 60.0, simulated: bool = False, imports: str = "",
    check: bool = True, phase: str | None = None, step: int | None = None, rank: int | None = None, level: str | None = None,
) -> Reproducer:  # fmt: skip
    """Write a recorded call as a test by itself.

    >>> trueup.reproduce("runs/gpu", "encoder.norm/aten::native_layer_norm#0", "repro/", device="npu").sentence
    'torch.ops.aten.native_layer_norm.default, forward, gives a wrong output.0 on npu: relative error 3.1e-1.'

    Args:
        capture: best of detail ``tensor``; or the folder of a report, whose culprits are then named.
        call: seq, or ``scope/op#n``, as `trueup show` lists them; of a report ``culprit``, or ``culprit.1`` for the second one.
        output: a new folder, or an empty one.
        device: where it fails; None: it is not here, and nothing is tried but what was recorded.
        against: the device whose results are right.
        minimise: shrink shapes, values and attributes while the same failure stays; takes the device.
        context: where the call is right by itself, find the fewest calls before it that make it fail; takes the device and a
            capture of detail ``tensor``.
        seconds: how long shrinking may take, and how long the search for a context.
        simulated: npu is Trueup's simulated device.
        imports: a module that is imported first, which makes a device known.
        check: run pytest on what was written, on both devices.
        phase: where ``call`` means several; so are the others.

    Raises:
        TrueupError: the call is not there or cannot be executed by itself, or ``output`` holds something.
    """
    where = {"phase": phase, "step": step, "rank": rank, "level": level}
    calls, recorded = _chosen(Path(capture), str(call), where)
    framework = framework_of(calls.capture)
    folder = _folder(Path(output))
    for wanted, option in ((minimise, "--minimise"), (context, "--context")):
        if wanted and device is None:
            raise _without_a_device(option)
    case = Case.of(calls, recorded)
    if context and case.drawn:
        raise TrueupError(
            "Calls are executed one after the other with what each was given.\n  expected: a capture of detail tensor\n"
            "  got:      numbers only\n  next:     record again with --detail tensor, or leave --context out"
        )
    notes = _drawn(case)
    if context and framework != "torch":
        raise TrueupError(
            f"Calls of {adapter(framework).title} are executed one by one.\n  expected: a capture of PyTorch\n"
            "  got:      --context\n  next:     leave --context out"
        )
    asked = _Asked(device, against, minimise, context, seconds, simulated, imports, framework)
    chain, told = _told(calls, recorded, case, folder, asked, notes)
    if told["random"]:
        notes.append("it draws random numbers: the state of the generators is restored; where a device draws others, it is skipped")
    fails = None if device is None else isinstance(told["device"], str) or worst_slot(told) is not None
    if fails is False:
        why = "what is wrong in the training comes of calls around it, or of a state"
        if not context:
            notes.append(f"by itself the call is right on {device}: {why}; --context looks for them")
    origin = _origin(Path(capture), recorded, chain)
    page: dict[str, Any] = {"device": device, "against": against, "origin": origin, "simulated": simulated}
    case = chain.target
    test = write_files(folder, case, told, notes=notes, **page)
    ran = check and device is not None and _checked(test, device, against, _first(asked), bool(fails), notes)
    write_files(folder, case, told, notes=notes, **page)  # the page says what was checked
    size = (folder / INPUTS).stat().st_size
    return Reproducer(folder, test, headline(case, told, device), fails, ran, size, tuple(notes))


def _chosen(path: Path, name: str, where: Mapping[str, Any]) -> tuple[RecordedCalls, RecordedCall]:
    from trueup.doors.report.selecting import Selection, find_call

    report = path / "verdict.json"
    if report.is_file():
        path, rank, seq = _culprit(report, name)
    else:
        capture = open_capture(path)
        found = find_call(capture, Selection(path, **where), name)
        rank, seq = found.rank, found.seq
    calls = RecordedCalls(open_capture(path))
    return calls, calls.at(rank, seq)


def _culprit(report: Path, name: str) -> tuple[Path, int, int]:
    """Return capture, rank and execution number of a culprit of a report; of the baseline, whose inputs are right."""
    word, _, number = name.partition(".")
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
        chosen = content["culprits"][int(number or 0)]
        side = "baseline" if chosen["seq_baseline"] >= 0 else "candidate"
        place = Path(content[side]["path"]), int(chosen["rank"]), int(chosen[f"seq_{side}"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError):
        word = ""
    if word != "culprit":
        raise TrueupError(
            f"{name} names no culprit of {report.parent}.\n"
            "  expected: culprit, or culprit.1 for the second one, of a report that has one\n"
            f"  got:      {name!r}\n  next:     name a capture and a call: `trueup show CAP` lists them"
        )
    return place


def _folder(output: Path) -> Path:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TrueupError(f"{output} holds something.\n  expected: a new folder, or an empty one\n  next:     name another with -o")
    return output


def _refused(answer: Mapping[str, Any], call: RecordedCall, against: str) -> TrueupError:
    why = answer.get("error") or f"executing it on {against} {answer.get('crashed', 'gave no answer')}"
    return TrueupError(
        f"{call.key} cannot be made a test by itself.\n  expected: a call of level api or aten that {against} executes\n"
        f"  got:      {why}\n  next:     name a call below or above it: `trueup show` lists them"
    )


def _drawn(case: Case) -> list[str]:
    if not case.drawn:
        return []
    named = ", ".join(case.drawn[:4]) + (" …" if len(case.drawn) > 4 else "")
    return [f"the capture kept numbers only: {named} were drawn to match them"]


def _without_a_device(option: str) -> TrueupError:
    why = "shrunk" if option == "--minimise" else "given its context"
    return TrueupError(
        f"A reproducer is {why} on the device that fails.\n  expected: --device\n  got:      none\n"
        f"  next:     add --device npu where it is, or leave {option} out"
    )


def _told(
    calls: RecordedCalls, recorded: RecordedCall, case: Case, folder: Path, asked: _Asked, notes: list[str]
) -> tuple[Chain, dict[str, Any]]:  # fmt: skip
    """Execute a call, with its context and shrunk as asked for, and write its tensors; return it and what its test says."""
    with _trying(asked, asked.device) as trying:
        settled = trying.settle(Chain.alone(case))
        if "chain" not in settled:
            raise _refused(settled, recorded, asked.against)
        original, chain = (None if case.drawn else Chain.alone(case)), settled["chain"]
        if asked.context:
            found = _around(calls, recorded, chain, trying, asked.seconds)
            notes += found.notes
            original, chain = (original, chain) if found.chain is None else (None, found.chain)
        if asked.minimise:
            shrunk = _shrink(chain, trying, asked.seconds)
            notes += shrunk.notes
            original = original if shrunk.chain is chain else None
            chain = shrunk.chain
        folder.mkdir(parents=True, exist_ok=True)
        told = trying.write(chain, original, folder)
        if "crashed" in told and asked.device is not None:
            notes.append(f"executing it on {asked.device} {told['crashed']}")
            why = {"device": f"it {told['crashed']}"}
            with _trying(asked, None) as alone:
                told = alone.write(chain, original, folder) | why
    if "source" not in told:
        raise _refused(told, recorded, asked.against)
    return chain, told


def _around(calls: RecordedCalls, call: RecordedCall, chain: Chain, trying: Trying, seconds: float) -> Context:
    """Look for the calls that make it fail, unless it fails by itself."""
    if Signature.of(trying.judge(chain)) is not None:
        return Context(None, ["it fails by itself: no other call is needed"])
    return find_context(calls, call, trying, seconds)


def _shrink(chain: Chain, trying: Trying, seconds: float) -> Minimised:
    found = trying.judge(chain)
    outcome = found.get("outcome")
    if "crashed" not in found and (outcome is None or outcome.verdict not in BLAMED):
        said = found.get("error") or getattr(outcome, "sentence", "")
        return Minimised(chain, [f"it was not shrunk, for by itself it does not fail: {said}"])
    shrunk = shrink(chain, trying, seconds)
    settled = trying.settle(shrunk.chain)
    return Minimised(settled["chain"], shrunk.notes) if "chain" in settled else Minimised(chain, ["shrinking it failed"])


def _trying(asked: _Asked, device: str | None) -> Trying:
    return Trying(
        device, asked.against, framework=asked.framework, simulated=asked.simulated, imports=asked.imports, afresh=asked.context
    )


def _first(asked: _Asked) -> str:
    """Return what a test is to import first."""
    return ",".join(filter(None, ("trueup.simdev" if asked.simulated else "", asked.imports)))


def _origin(path: Path, call: RecordedCall, chain: Chain) -> list[tuple[str, str]]:
    others = [("before it", _place(case.call)) for case in chain.cases[:-1]]
    return [("capture", str(path)), ("scope", call.key.scope or "(none)"), ("call", _place(call)), *others]


def _place(call: RecordedCall) -> str:
    key = call.key
    return f"{key.op}#{key.ordinal}, {key.level}, {key.phase}, rank {key.rank}, step {key.step}, seq {call.seq}"


def _checked(test: Path, device: str, against: str, imports: str, fails: bool, notes: list[str]) -> bool:
    """Run the test on both devices and note what is not as expected."""
    expected = {device: 1 if fails else 0, against: 0}
    right = True
    for which, code in expected.items():
        got, said = run_test(test, which, against, imports)
        if got != code:
            right = False
            words = {0: "passes", 1: "fails"}
            how = words.get(got, f"ended with code {got}: {said}")
            notes.append(f"checked: with --device {which} the test {how}, where it should have {words[code].replace('s', 'ed', 1)}")
    if right:
        word = "fails" if fails else "passes"
        notes.append(f"checked: the test {word} with --device {device} and passes with --device {against}")
    return right


def run_test(test: Path, device: str, against: str, imports: str = "", timeout: float = 600.0) -> tuple[int, str]:
    """Run a reproducer's test in a process of its own, and return pytest's exit code and last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(test.parent), str(test)]
    command += ["--device", device, "--against", against, *(["--import", imports] if imports else [])]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout:.0f} s"
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return ended.returncode, lines[-1][:200] if lines else ""
