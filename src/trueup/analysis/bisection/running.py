"""One run of the command with some changes, and the check asked about it.

    DIR/runs/007/output.txt      what the command printed
    DIR/runs/007/check.txt       what the check printed
    DIR/runs/007/capture         losses alone; where the change or the check needs them
    DIR/runs/007/policy.toml     the rules that it ran with

The check is a command: exit code 0 is good, 125 cannot be judged, any other up to 124 is bad; of Trueup's own commands (``trueup
curves base.csv -- {run}/output.txt``) 2 cannot be judged, and 64 is no answer. It finds the run's folder in the
variable ``TRUEUP_RUN`` and in place of ``{run}``. Without a check the training's exit code or a baseline's losses decide.

Of operators for which Inductor, the compiler behind ``torch.compile``, generates code, some are left to ATen's own kernels instead.
No policy reaches into compiled code, and while one is applied the Python code runs that was compiled. So the compiler itself is
changed: an operator of the list is not decomposed, and its lowering is a call of ATen (`torch._inductor.lowering.make_fallback`).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from trueup.analysis.bisection.search import Attempt, Chosen, Outcome
from trueup.analysis.triage.running import compiled, last_line, losses_of, opened
from trueup.analysis.triage.triaging import apart, percent, rounding_unit
from trueup.foundation.facts.operators import named
from trueup.foundation.model import TrueupError
from trueup.foundation.progress import advance
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import say
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

SKIP = 125  # that the run cannot be judged: the convention of ``git bisect run``
UNTOLD, USAGE = 2, 64  # Trueup's own: it could not tell; it was called in a wrong way
RUN = "TRUEUP_RUN"

ATEN = "aten"
DONE = "computed by ATen's kernels"
FILE = "inductor_fallbacks.py"
"""What a process is changed by, and what a user imports: it stands without Trueup."""


@dataclass(frozen=True)
class Setup:
    """How the command is run with some changes."""

    environment: Mapping[str, str | None] = field(default_factory=dict)  # variables that are set, or with None taken away
    policy: str = ""
    switches: Sequence[Mapping[str, Any]] = ()
    folder: Path | None = None  # that it runs in; else our own
    words: Mapping[str, str] = field(default_factory=dict)  # what stands in the command in place of ``{name}``


class Runner:
    """Runs ``command`` with some changes into ``folder``, each run as ``setup`` says for its own folder. The command line
    ``check`` judges it, else the losses of ``baseline``, else the exit code. ``timeout`` (seconds, None: none) ends a run or a
    check; ``tell`` gets each attempt."""

    def __init__(
        self, command: Sequence[str], check: str | None, baseline: Capture | None, setup: Callable[[Chosen, Path], Setup],
        folder: Path, *, timeout: float | None, tell: Callable[[Attempt], None],
    ) -> None:  # fmt: skip
        self._command, self._check, self._setup = tuple(command), check, setup
        self._folder, self._timeout, self._tell = folder, timeout, tell
        self._losses = None if baseline is None else losses_of(baseline)
        self._unit = 0.0 if baseline is None else rounding_unit(baseline)
        if baseline is not None and not self._losses:
            raise TrueupError(f"{baseline.path} has no loss to follow.\n  next:     name a check with --check")

    def __call__(self, chosen: Chosen) -> Attempt:
        """Run once with some changes."""
        number = 1 + max((int(p.name) for p in self._folder.glob("[0-9]*") if p.name.isdigit()), default=0)
        folder = (self._folder / f"{number:03d}").absolute()
        folder.mkdir(parents=True)
        advance("bisecting", "runs", number - 1)
        begun = time.monotonic()
        code = self._run(self._setup(chosen, folder), folder)
        seconds = time.monotonic() - begun
        launch.uninterrupted(code)
        outcome, why = self._judged(code, folder)
        attempt = Attempt(chosen, outcome, seconds, why)
        self._tell(attempt)
        return attempt

    def _run(self, setup: Setup, folder: Path) -> int:
        words = {"run": str(folder), **setup.words}
        command = [_filled(word, words) for word in self._command]
        environment = {**setup.environment, RUN: str(folder)}
        output = folder / "output.txt"
        if not (setup.policy or setup.switches or self._losses is not None):
            whole = _with(os.environ, environment)
            try:
                return launch.run_to_the_end(command, whole, output, self._timeout, setup.folder)
            except OSError as error:
                got = f"{command[0]}: {error.strerror or error}"
                raise TrueupError(f"The command cannot start.\n  got:      {got}\n  next:     correct what follows --") from None
        order: dict[str, Any] = {"switches": list(setup.switches)} if setup.switches else {}
        options = CaptureOptions.of(level="api", include=named("loss"))
        if setup.policy:
            file = folder / "policy.toml"
            file.write_text(setup.policy, encoding="utf-8")
            order["policy"] = [str(file), setup.policy]
        else:
            order["options_of"] = compiled(options)
        return launch.execute(
            folder / "capture", options, command, environment=environment, output=output, timeout=self._timeout,
            folder=setup.folder, doing=f"run {folder.name}", **order,
        )  # fmt: skip

    def _judged(self, code: int, folder: Path) -> tuple[Outcome, str]:
        if code == launch.TIMED_OUT and self._timeout is not None:
            return "skip", f"it did not end within {self._timeout:g} s (--timeout)"
        if self._check is None and self._losses is None:
            return _outcome(code, folder / "output.txt")
        if code:
            return "skip", f"the command ended with exit code {code}{last_line(folder / 'output.txt')}"
        if self._losses is not None:
            return self._followed(folder / "capture")
        assert self._check is not None
        command = [_filled(word, {"run": str(folder)}) for word in shlex.split(self._check)]
        output = folder / "check.txt"
        try:
            told = launch.run_to_the_end(
                command, _with(os.environ, {RUN: str(folder)}), output, self._timeout
            )
        except OSError as error:
            got = f"{command[0]}: {error.strerror or error}"
            raise TrueupError(f"The check cannot start.\n  got:      {got}\n  next:     correct --check") from None
        return _outcome(launch.uninterrupted(told), output, own=Path(command[0]).name == "trueup")

    def _followed(self, capture: Path) -> tuple[Outcome, str]:
        """Tell whether the losses are the baseline's, but for rounding."""
        assert self._losses is not None
        recorded = opened(capture)
        if recorded is None:
            return "skip", "it recorded nothing"
        found = apart(self._losses, losses_of(recorded), self._losses, self._unit)
        if not found.steps:
            return "skip", "it drew no loss in a step of the baseline"
        if found.step is None:
            return "good", f"its losses are {percent(found.largest)} off at most, and rounding may do that" if found.largest else ""
        return "bad", f"its loss of step {found.step} is {percent(found.relative)} off"


def _with(given: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    whole: dict[str, str | None] = {**given, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _outcome(code: int, output: Path, *, own: bool = False) -> tuple[Outcome, str]:
    """Return what an exit code says; ``own``: of a command of Trueup's."""
    if code == 0:
        return "good", ""
    if code == (UNTOLD if own else SKIP):
        return "skip", f"the check cannot judge it (exit code {code}){last_line(output)}"
    if code < SKIP and not (own and code == USAGE):
        return "bad", ""
    answers = f"0 good, 1 bad, {UNTOLD} cannot be judged" if own else f"0 good, 1 to 124 bad, {SKIP} cannot be judged"
    raise TrueupError(
        f"The check ended with exit code {code}, which is no answer.\n  where:    {output}\n  expected: {answers}\n"
        f"  got:      {code}{last_line(output)}\n  next:     correct it, and give the same command: what was tried is kept"
    )


def is_compiled(capture: Capture) -> bool:
    """Tell whether the training used ``torch.compile``, as the notes of a capture say."""
    return any(str(note).startswith("torch.compile was used") for one in capture.ranks.values() for note in one.get("notes", ()))


def order(adapter: str, names: Sequence[str]) -> dict[str, object]:
    """Return the order to a launched process: ``left_to_aten`` or ``operators_compiled`` of the adapter's switches."""
    return {"name": "Inductor", "framework": "torch", "adapter": {adapter: list(names)}}


def listed(command: Sequence[str], place: Path) -> tuple[str, ...]:
    """Run the first step, compiled, and return the operators of which Inductor generated code; raises TrueupError if of none."""
    capture = place / "compiled"
    if not capture.exists():
        say("recording the first step, which tells what is compiled")
        place.mkdir(exist_ok=True)
        told = {RUN: str(place.absolute())}
        options = CaptureOptions.of(level="api", include=named("loss"), steps="0", stop=True)
        launch.execute(
            capture.absolute(), options, command, environment=told, output=place / "compiled.txt",
            switches=[order("operators_compiled", ())], options_of=compiled(options),
        )  # fmt: skip
    found: set[str] = set()
    for report in open_capture(capture).processes():
        said = (report.get("switches") or {}).get("torch", {}).get("seen", {}).get("Inductor")
        found.update(str(name) for name in said or () if str(name).isidentifier())
    if not found:
        raise TrueupError(
            f"Inductor generated code of no operator in the first step.\n  where:    {place}{last_line(place / 'compiled.txt')}\n"
            "  expected: a training under torch.compile, with its own backend\n"
            "  next:     --as float32, float64 or cpu change operators that are not compiled"
        )
    return tuple(sorted(found))


def setup(names: Sequence[str]) -> Setup:
    """Return how a run leaves operators to ATen; none: as it is."""
    return Setup(switches=[order("left_to_aten", names)] if names else ())


def written(names: Sequence[str], folder: Path) -> list[str]:
    """Write the list for the user's script; return what to do with it."""
    file = folder / FILE
    text = files("trueup.recording.adapters.torch").joinpath(FILE).read_text(encoding="utf-8")
    file.write_text(f"{text}\n\nleave_to_aten(({''.join(f'{name!r}, ' for name in names).rstrip()}))\n", encoding="utf-8")
    return [f"copy {file} beside the script and import it before the first compiled call: import {file.stem}"]
