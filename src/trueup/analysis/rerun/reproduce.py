"""A recorded call as a test that fails where the device is wrong, for people who have no Trueup.

    OUT/test_<op>.py         pytest; imports the framework and safetensors
    OUT/conftest.py          its options: --device, --against, --import
    OUT/inputs.safetensors   what the call was given
    OUT/README.md            what is expected, limits and where they come from, the environment

A capture's text goes onto the page alone, as code spans; the test is made of an adapter's `source`, numbers and names.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from trueup.analysis.rerun.chain_process import Trying
from trueup.analysis.rerun.minimise import Context, Minimised, Signature, find_context
from trueup.analysis.rerun.minimise import minimise as shrink
from trueup.analysis.rerun.processes import framework_of
from trueup.analysis.selecting import Selection, find_call
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.store.layout import new_folder
from trueup.foundation.words.wording import one_line, sci
from trueup.recording.execution.case_errors import INPUTS
from trueup.recording.execution.cases import Case, Chain
from trueup.recording.execution.judging import BLAMED
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls
from trueup.recording.registry import adapter


@dataclass(frozen=True)
class Reproducer:
    """What was written."""

    folder: Path
    test: Path
    sentence: str  # what it shows
    fails: bool | None  # whether the device fails; None: it was not tried
    checked: bool  # whether pytest was run on both devices and did what is expected
    size: int  # bytes of ``inputs.safetensors``
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
    folder = new_folder(Path(output))
    asked = _Asked(device, against, minimise, context, seconds, simulated, imports, framework_of(calls.capture))
    case = _case(calls, recorded, asked)
    notes = _drawn(case)
    chain, told = _told(calls, recorded, case, folder, asked, notes)
    if told["random"]:
        notes.append("it draws random numbers: the state of the generators is restored; where a device draws others, it is skipped")
    fails = None if device is None else isinstance(told["device"], str) or worst_slot(told) is not None
    if fails is False:
        why = "what is wrong in the training comes of calls around it, or of a state"
        if not context:
            notes.append(f"by itself the call is right on {device}: {why}; --context looks for them")
    others = [("before it", _place(one.call)) for one in chain.cases[:-1]]
    origin = [("capture", str(capture)), ("scope", recorded.key.scope or "(none)"), ("call", _place(recorded)), *others]
    page: dict[str, Any] = {"device": device, "against": against, "origin": origin, "simulated": simulated}
    case = chain.target
    test = write_files(folder, case, told, notes=notes, **page)
    first = ",".join(filter(None, ("trueup.simdev" if simulated else "", imports)))
    ran = check and device is not None and _checked(test, device, against, first, bool(fails), notes)
    write_files(folder, case, told, notes=notes, **page)  # the page says what was checked
    size = (folder / INPUTS).stat().st_size
    return Reproducer(folder, test, headline(case, told, device), fails, ran, size, tuple(notes))


def _chosen(path: Path, name: str, where: Mapping[str, Any]) -> tuple[RecordedCalls, RecordedCall]:
    report = path / "verdict.json"
    if report.is_file():
        path, rank, seq = _culprit(report, name)
    elif name.partition(".")[0] == "culprit":
        raise TrueupError(
            f"There is no report that names a culprit.\n  where:    {path}\n  expected: a folder that trueup compare -o wrote\n"
            f"  got:      {'a folder without verdict.json' if path.is_dir() else 'no folder'}\n"
            "  next:     trueup compare BASE CAND -o report, then trueup reproduce report culprit -o repro"
        )
    else:
        capture = open_capture(path)
        found = find_call(capture, Selection(path, **where), name)
        rank, seq = found.rank, found.seq
    calls = RecordedCalls(open_capture(path))
    return calls, calls.at(rank, seq)


def _case(calls: RecordedCalls, recorded: RecordedCall, asked: _Asked) -> Case:
    """Return a call that can be made what was asked; raises TrueupError else."""
    for wanted, option, why in ((asked.minimise, "--minimise", "shrunk"), (asked.context, "--context", "given its context")):
        if wanted and asked.device is None:
            raise TrueupError(
                f"A reproducer is {why} on the device that fails.\n  expected: --device\n  got:      none\n"
                f"  next:     add --device npu where it is, or leave {option} out"
            )
    case = Case.of(calls, recorded)
    if asked.context and case.drawn:
        raise TrueupError(
            "Calls are executed one after the other with what each was given.\n  expected: a capture of detail tensor\n"
            "  got:      numbers only\n  next:     record again with --detail tensor, or leave --context out"
        )
    if asked.context and asked.framework != "torch":
        raise TrueupError(
            f"Calls of {adapter(asked.framework).title} are executed one by one.\n  expected: a capture of PyTorch\n"
            "  got:      --context\n  next:     leave --context out"
        )
    return case


def _culprit(report: Path, name: str) -> tuple[Path, int, int]:
    """Return capture, rank and execution number of a report's culprit, of the baseline: its inputs are right."""
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


def _told(
    calls: RecordedCalls, recorded: RecordedCall, case: Case, folder: Path, asked: _Asked, notes: list[str]
) -> tuple[Chain, dict[str, Any]]:  # fmt: skip
    """Execute a call, with context and shrunk on request, and write its tensors; return it and its test's facts."""
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


def _place(call: RecordedCall) -> str:
    key = call.key
    return f"{key.op}#{key.ordinal}, {key.level}, {key.phase}, rank {key.rank}, step {key.step}, seq {call.seq}"


def _checked(test: Path, device: str, against: str, imports: str, fails: bool, notes: list[str]) -> bool:
    """Run the test on both devices and note what is unexpected."""
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
    """Run a reproducer's test in a process of its own; return pytest's exit code and last line. Installed plugins are left out: it
    needs none, and they may take longer to import than all else."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(test.parent), str(test)]
    command += ["--device", device, "--against", against, *(["--import", imports] if imports else [])]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {timeout:.0f} s"
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return ended.returncode, lines[-1][:200] if lines else ""


TEMPLATES = "reproducer"


def write_files(
    folder: Path, case: Case, told: Mapping[str, Any], *, device: str | None, against: str, notes: Sequence[str],
    origin: Sequence[tuple[str, str]], simulated: bool,
) -> Path:  # fmt: skip
    """Write test, options and page beside ``inputs.safetensors``; return the path of the test. ``told`` comes from
    `trueup.recording.execution.case_errors.CaseErrors.saved`, ``device`` is where it was tried (None: nowhere); ``notes`` and
    ``origin``, names and texts, go onto the page."""
    name = told["name"]
    file = f"test_{name}.py"
    tried = device or (case.home if case.home != "cpu" else "npu")
    content = {
        "file": file, "name": name, "device": tried, "against": against, "headline": headline(case, told, device),
        "simulated": simulated, "random": told["random"], **{key: told[key] for key in ("title", "needs", "plugin")},
        **told["source"],
    }  # fmt: skip
    content["limits"] = [(ascii(slot), _limit(limit)) for slot, limit in told["limits"].items()]
    _render(folder / file, told["template"], content)
    _render(folder / "conftest.py", "conftest.py.j2", content | {"device": ascii(tried), "against": ascii(against)})
    measured = device if isinstance(told["device"], dict) and told["device"] else "the recorded device" if told["recorded"] else ""
    page = {
        "measured": measured, "expected": list(expectations(told, device, against)), "rows": list(_rows(told)), "notes": notes,
        "tensors": [(f"`{n}`", d, str(s)) for n, d, s in told["source"]["tensors"]],
        "origin": [(one_line(n), code(t)) for n, t in origin], "environment": list(_environment(case, told["environment"])),
    }  # fmt: skip
    _render(folder / "README.md", "README.md.j2", content | page)
    return folder / file


def headline(case: Case, told: Mapping[str, Any], device: str | None) -> str:
    """Say in one sentence what the reproducer shows, with known names and numbers only."""
    phase = case.call.key.phase
    phase = phase if phase in ("forward", "backward", "optimizer", "recompute") else "forward"
    others = told["calls"] - 1
    after = "" if not others else " after another call," if others == 1 else f" after {others} other calls,"
    what = f"{told['function']}, {phase},{after}"
    worst = worst_slot(told)
    where = device if isinstance(told["device"], dict) and told["device"] else "the recorded device"
    if isinstance(told["device"], str):
        return f"{what} is not executed on {device}."
    if worst is None:
        return f"{what} as a training made it."
    slot, error = worst
    name = ascii(slot)[1:-1]
    if "form" in error:
        return f"{what} gives {name} of another form on {where}."
    if error["disagreeing"]:
        return f"{what} gives NaN, Inf or an extreme number in {name} on {where}, where there is none."
    size = error["relative"]
    many = f"{error['differing']:,} elements differ" if not error["rms"] or "differing" in told["limits"][slot] else ""
    many = many or (f"relative error {sci(size)}" if math.isfinite(size) else f"error {sci(error['rms'])} where zeros are expected")
    return f"{what} gives a wrong {name} on {where}: {many}."


def worst_slot(told: Mapping[str, Any]) -> tuple[str, Mapping[str, float]] | None:
    """Return the result furthest beyond its limit, with its error; None if all are within."""
    errors = told["device"] if isinstance(told["device"], dict) and told["device"] else told["recorded"]
    beyond = [(slot, error) for slot, error in errors.items() if excess(error, told["limits"][slot]) > 1]
    return max(beyond, key=lambda pair: excess(pair[1], told["limits"][pair[0]]), default=None)


def excess(error: Mapping[str, float], limit: Mapping[str, Any]) -> float:
    """Return an error in multiples of its limit."""
    if "form" in error or error["disagreeing"]:
        return math.inf
    if "differing" in limit:
        return _over(error["differing"], limit["differing"])
    return max(_over(error[name], limit[name]) for name in ("rms", "largest"))


def _over(error: float, limit: float) -> float:
    return error / limit if limit > 0 else math.inf if error > 0 else 0.0


def expectations(told: Mapping[str, Any], device: str | None, against: str) -> Iterator[str]:
    """Yield what the test is expected to do."""
    if isinstance(told["device"], str):
        yield f"on {device} it cannot be executed: {one_line(told['device'])}"
    elif told["device"]:
        yield f"with `--device {device}` it {'fails' if worst_slot(told) else 'passes, here and now'}"
    elif told["recorded"] and worst_slot(told):
        yield "on the device of the training it fails: the recorded results are beyond the limits"
    elif told["recorded"]:
        yield f"the recorded results agree with those of {against}: it fails on a device that computes them wrong, and on no other"
    yield f"with `--device {against}` it passes"


def _rows(told: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    errors = told["device"] if isinstance(told["device"], dict) and told["device"] else told["recorded"]
    for slot, limit in told["limits"].items():
        error = errors.get(slot)
        if "differing" in limit:
            found = "" if error is None or "form" in error else f"{error['differing']:,} elements"
            yield code(slot), found, "", f"{limit['differing']:,} elements", "", cell(f"{limit['rule']}; {limit['origin']}")
            continue
        plain = error if error is not None and "form" not in error else None
        found = "another form" if error is not None and plain is None else "" if plain is None else sci(plain["rms"])
        largest = "" if plain is None else sci(plain["largest"])
        yield code(slot), found, largest, sci(limit["rms"]), sci(limit["largest"]), cell(f"{limit['rule']}; {limit['origin']}")


def _environment(case: Case, here: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    then = case.ranks.get(case.call.key.rank) or {}
    before = then.get("environment") if isinstance(then.get("environment"), dict) else {}
    assert before is not None
    for name in sorted({*map(str, before), *here}):
        yield code(name), code(str(before.get(name, ""))), code(here.get(name, ""))


def code(text: str) -> str:
    """Write foreign text as a code span of Markdown, which it cannot leave."""
    plain = one_line(text).replace("`", "'").replace("|", "¦")[:300]
    return f"`{plain}`" if plain.strip() else ""


def cell(text: str) -> str:
    """Write our own text as a cell of a table."""
    return one_line(text).replace("|", "¦")


def _limit(limit: Mapping[str, Any]) -> str:
    if "differing" in limit:
        return repr(int(limit["differing"]))
    return f"({float(limit['rms']):.3e}, {float(limit['largest']):.3e})"


def _render(path: Path, template: str, content: Mapping[str, Any]) -> None:
    text = resources.files(__package__).joinpath(TEMPLATES, template).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=False, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    path.write_text(environment.from_string(text).render(**content), encoding="utf-8")
