"""What can be changed about a run, one thing at a time or several together.

    scopes        modules whose functions run in another dtype, on the CPU or deterministically: a policy
    operators     functions that do, wherever they are called: a policy
    switches      optimisations of the framework, switched off (those of `trueup triage`)
    environment   variables, as they are where the training is right
    packages      versions, as they are there
    commits       of a git history between a good and a bad one; ordered: the first with which the check fails is looked for
    steps         of the training; ordered likewise

And one run of the command with some of them, with the check asked about it.

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
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from trueup.analysis.bisection.search import Attempt, Chosen, Outcome
from trueup.analysis.bisection.search import apart as independent
from trueup.analysis.triage.running import compiled, last_line, load, losses_of, opened, switched_off
from trueup.analysis.triage.triaging import apart, by_hand, percent, rounding_unit
from trueup.foundation import toml
from trueup.foundation.facts.operators import has, named
from trueup.foundation.facts.slots import UNIT_ROUNDOFF
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.progress import advance
from trueup.foundation.redaction import MASK, is_recorded, redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted, one_line, say, shorten
from trueup.recording.policy_file import DEVICES, DTYPES, exactly, in_toml
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

SKIP = 125  # that the run cannot be judged: the convention of ``git bisect run``
UNTOLD, USAGE = 2, 64  # Trueup's own: it could not tell; it was called in a wrong way
RUN = "TRUEUP_RUN"

ATEN = "aten"
BY_ATEN = "computed by ATen's kernels"
FILE = "inductor_fallbacks.py"
"""What a process is changed by, and what a user imports: it stands without Trueup."""

KINDS = ("scopes", "operators", "switches", "environment", "packages", "commits", "steps")
OUTSIDE = "(outside all modules)"
DONE = {"cpu": "on the CPU", "deterministic": "deterministic"}  # what is done to a call, in words; else it runs ``in`` the dtype
CASTS = "the code casts by itself, which no rule undoes"
HERE = "here"  # where the training is wrong, unless another capture or file was named
VALUE_WIDTH = 40  # characters of a value in a sentence
MOST_COMMITS = 100_000
TEXT = "a capture, or a text file"
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
PACKAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*==\s*([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
COMMIT = re.compile(r"[0-9a-f]{40,64}")


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


@dataclass(frozen=True)
class Changes:
    """A set of changes to choose from."""

    kind: str
    items: Chosen
    noun: str  # one of them: ``module``
    done: str  # what is done to chosen ones: ``in float32``
    setup: Callable[[Chosen, Path], Setup]  # how a command runs with some of them, in the run's folder
    write: Callable[[Chosen, Path], list[str]]  # writes what heals the run into a folder; returns instructions
    ordered: bool = False
    said: Callable[[str], str] = str  # an item in a sentence: ``MY_LR (5 here, 0.01 in the good run)``
    overlap: Callable[[str, str], bool] = independent  # whether two items change something in common
    unless: str = ""  # what else may be the cause where no such change heals the run
    close: Callable[[], None] = lambda: None  # removes what the runs needed


def _by_policy(kind: str, noun: str, capture: Capture, key: str, change: Sequence[str]) -> Changes:
    words = change or _usual(capture)
    lines = [_line(word) for word in words]
    if kind == "operators" and _is_autocast(capture):  # a result that is cast back has lost what the function computed
        lines += [f'returns = "{word}"' for word in words if word in DTYPES and word != "bfloat16"]
    rows = capture.records(columns=[key, "slot", "dtype"], level="api", phase="forward")
    columns = zip(*(rows[name].cast("string").to_pylist() for name in (key, "slot", "dtype")), strict=True)
    kinds = UNIT_ROUNDOFF if set(words) <= set(DTYPES) else None  # what reads no such tensor has no other dtype
    read = {name for name, slot, dtype in columns if slot.startswith("input") and (kinds is None or dtype in kinds)}
    items = tuple(sorted(name or OUTSIDE for name in read))

    def rule(names: Sequence[str], *level: str) -> str:
        return "\n".join(["[[rule]]", *level, f"{key} = {in_toml(exactly(*names))}", *lines, ""])

    def rules(names: Sequence[str]) -> str:
        inside = [name for name in names if name != OUTSIDE]
        whole = ('level = "module"',) if kind == "scopes" else ()  # what is between a module's functions runs so too
        return "\n".join([rule(inside, *whole)] * bool(inside) + [rule([""])] * (OUTSIDE in names))

    def write(found: Chosen, folder: Path) -> list[str]:
        file = folder / "policy.toml"
        file.write_text("\n".join(rules([name]) for name in found), encoding="utf-8")
        told = [f"trueup capture --policy {file} -o RUN -- COMMAND runs the training with it"]
        if kind == "operators" and _frameworks(capture) == {"paddle"}:
            told.append(f"or in the script: paddle.amp.auto_cast(custom_black_list={{{_black_list(found, capture)}}})")
        return told

    def setup(names: Chosen, _: Path) -> Setup:
        return Setup(policy=rules(names))

    done = " ".join(DONE.get(word, f"in {word}") for word in words)
    overlap = _is_inside if kind == "scopes" else independent
    return Changes(kind, items, noun, done, setup, write, overlap=overlap, unless=CASTS if kinds else "")


def _black_list(names: Sequence[str], capture: Capture) -> str:
    """Write operators as Paddle's auto_cast calls them, by what the capture says of that."""
    said = [known for manifest in capture.ranks.values() if isinstance(known := manifest.get("auto_cast"), Mapping)]
    listed = [found for name in names for one in said for found in one.get(name, ())]
    return ", ".join(repr(str(name)) for name in dict.fromkeys(listed or (name.rpartition(".")[2] for name in names)))


def _is_inside(one: str, other: str) -> bool:
    """Tell whether one module is inside the other: a rule for the outer one is for both."""
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _is_autocast(capture: Capture) -> bool:
    """Tell whether some function that is no conversion reads float32 alone and gives a narrower dtype."""
    rows = capture.records(columns=["rank", "step", "seq", "op", "slot", "dtype"], level="api", phase="forward")
    read: dict[tuple[int, ...], set[str]] = {}
    given: dict[tuple[int, ...], set[str]] = {}
    for row in rows.to_pylist():
        if row["dtype"] in UNIT_ROUNDOFF and not has(row["op"], "converts"):
            side = given if str(row["slot"]).startswith("output") else read
            side.setdefault((row["rank"], row["step"], row["seq"]), set()).add(row["dtype"])
    wide = UNIT_ROUNDOFF["float32"]
    return any(read.get(call) == {"float32"} and any(UNIT_ROUNDOFF[one] > wide for one in dtypes) for call, dtypes in given.items())


def _usual(capture: Capture) -> tuple[str, ...]:
    """Return the default change: the CPU in place of an accelerator, else the next wider dtype."""
    devices = {str(device).partition(":")[0] for manifest in capture.ranks.values() for device in manifest.get("devices", ())}
    if devices - {"cpu"}:
        return ("cpu",)
    names = capture.records(columns=["dtype"], level="api")["dtype"].cast("string").unique().to_pylist()
    narrow = any(UNIT_ROUNDOFF.get(name or "", 0) > UNIT_ROUNDOFF["float32"] for name in names)
    return ("float32",) if narrow else ("float64",)


def _line(word: str) -> str:
    if word in DTYPES:
        return f'dtype = "{word}"'
    if word in DEVICES:
        return f'device = "{word}"'
    if word == "deterministic":
        return "deterministic = true"
    allowed = ", ".join((*DTYPES, *DEVICES, "deterministic")) + f"; of compiled code {ATEN}, alone"
    raise UsageError(f"There is no change {word!r}.\n  expected: one of {allowed}\n  got:      {word}\n  next:     correct --as")


def _frameworks(capture: Capture) -> set[str]:
    return {str(manifest.get("framework")) for manifest in capture.ranks.values()}


def modules(capture: Capture, change: Sequence[str] = ()) -> Changes:
    """Offer the modules of a capture, and one more for what runs outside them."""
    return _by_policy("scopes", "module", capture, "scope", change)


def operators(capture: Capture, change: Sequence[str] = ()) -> Changes:
    """Offer the functions that a capture saw in a forward."""
    return _by_policy("operators", "operator", capture, "op", change)


def compiled_operators(names: Chosen) -> Changes:
    """Offer operators of which Inductor generates code."""
    return Changes(
        "operators", names, "compiled operator", BY_ATEN, lambda chosen, _: setup(chosen), written
    )


def switches(capture: Capture, only: Sequence[str] = ()) -> Changes:
    """Offer the optimisations that a capture's framework has on its devices."""
    devices = [str(device) for manifest in capture.ranks.values() for device in manifest.get("devices", ())]
    rows = [row for name in sorted(_frameworks(capture)) for row in load(only=only).top(name, devices)]
    by_name = {row.name: row for row in rows}

    def setup(names: Chosen, folder: Path) -> Setup:
        environment, orders = switched_off([by_name[name] for name in names], folder / "fusion_switch.json")
        return Setup(environment, switches=orders)

    def write(found: Chosen, _: Path) -> list[str]:
        return [line for name in found for line in by_hand(by_name[name])]

    return Changes("switches", tuple(by_name), "optimisation", "off", setup, write)


def environment(good: Mapping[str, str], bad: Mapping[str, str] | None = None) -> Changes:
    """Offer the variables that differ between a good and a bad environment (None: our own, of which only what the good one names
    or what may choose numbers counts: no HOME, no PATH)."""
    where = HERE if bad is None else "in the bad run"
    if bad is None:
        bad = {name: value for name, value in os.environ.items() if name in good or is_recorded(name)}
    unlike = {name: (good.get(name), bad.get(name)) for name in good.keys() | bad.keys() if good.get(name) != bad.get(name)}
    items = tuple(sorted(name for name, values in unlike.items() if MASK not in f"{values}"))  # what is masked cannot be set

    def setup(names: Chosen, _: Path) -> Setup:
        return Setup({name: (good if name in names else bad).get(name) for name in items})

    def write(found: Chosen, folder: Path) -> list[str]:
        file = folder / "environment.sh"
        values = {name: shlex.quote(str(redacted(good[name], name))) for name in found if name in good}
        lines = [f"export {name}={values[name]}" if name in values else f"unset {name}" for name in found]
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return [f"source {file} before the training", *lines]

    return Changes("environment", items, "variable", "as in the good run", setup, write, said=_with_values(good, bad, where))


def _with_values(good: Mapping[str, str], bad: Mapping[str, str], where: str) -> Callable[[str], str]:
    """Return what says of a variable or package both values: ``MY_LR (5 here, 0.01 in the good run)``."""

    def value(side: Mapping[str, str], name: str) -> str:
        return shorten(one_line(str(redacted(side[name], name))) or "empty", VALUE_WIDTH) if name in side else "not set"

    return lambda name: f"{name} ({value(bad, name)} {where}, {value(good, name)} in the good run)"


def packages(good: Mapping[str, str], bad: Mapping[str, str], folder: Path, python: str, where: str = HERE) -> Changes:
    """Offer the packages whose versions differ; each version is installed into a folder of its own."""
    items = tuple(sorted(name for name in good.keys() & bad.keys() if good[name] != bad[name]))

    def place(name: str, version: str) -> str:
        target = folder / f"{name}-{version}"
        if not (target / ".complete").exists():
            shutil.rmtree(target, ignore_errors=True)
            command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), f"{name}=={version}"]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                said = (made.stderr.strip().splitlines() or ["pip said nothing"])[-1]
                raise TrueupError(
                    f"{name} {version} cannot be installed.\n  got:      {redacted(said)}\n"
                    "  next:     give pip an index that has it"
                )
            (target / ".complete").touch()
        return str(target.absolute())

    def setup(names: Chosen, _: Path) -> Setup:
        paths = [place(name, (good if name in names else bad)[name]) for name in items]
        return Setup({"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])})

    def write(found: Chosen, folder: Path) -> list[str]:
        file = folder / "requirements.txt"
        lines = [f"{name}=={good[name]}" for name in found]
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        return [f"pip install -r {file}", *lines]

    return Changes("packages", items, "package", "as in the good run", setup, write, said=_with_values(good, bad, where))


def commits(good: str, bad: str, folder: Path) -> Changes:
    """Offer the commits after a good one up to a bad one; each is checked out into a folder of its own while it is tried."""
    top = Path(_git("rev-parse", "--show-toplevel").strip())
    ends = [_commit(name) for name in (good, bad)]
    listed = _git("rev-list", "--first-parent", "--reverse", f"--max-count={MOST_COMMITS}", f"{ends[0]}..{ends[1]}").split()
    here = Path.cwd().relative_to(top) if Path.cwd().is_relative_to(top) else Path()

    def setup(names: Chosen, _: Path) -> Setup:
        (commit,) = names
        target = (folder / "tree").absolute()
        if target.exists():
            _git("-C", str(target), "checkout", "--quiet", "--force", "--detach", commit)
            _git("-C", str(target), "clean", "--quiet", "-fd")
        else:
            _git("worktree", "prune")
            _git("worktree", "add", "--quiet", "--detach", str(target), commit)
        inside = target / here
        return Setup(folder=inside if inside.is_dir() else target)

    def write(found: Chosen, _: Path) -> list[str]:
        return [_git("log", "-1", "--format=%h %an, %ad: %s", "--date=short", found[0]).strip(), f"git show {found[0]}"]

    def close() -> None:
        target = folder / "tree"
        if target.exists():
            _git("worktree", "remove", "--force", str(target.absolute()))

    return Changes(
        "commits", tuple(listed), "commit", "", setup, write, ordered=True, said=lambda name: f"commit {name}", close=close
    )  # fmt: skip


def steps(most: int) -> Changes:
    """Offer trainings of 1 up to ``most`` steps: ``{steps}`` in the command."""
    items = tuple(str(number) for number in range(1, most + 1))

    def setup(names: Chosen, _: Path) -> Setup:
        return Setup({"TRUEUP_STEPS": names[0]}, words={"steps": names[0]})

    return Changes("steps", items, "step", "", setup, lambda *_: [], ordered=True, said=in_steps)


def in_steps(number: str) -> str:
    """Say how long a training is: ``8 steps``."""
    return counted(int(number), "step")


def variables(source: str) -> dict[str, str]:
    """Read an environment, of a capture or from a file of ``NAME=value`` lines; raises TrueupError if it is neither."""
    if Path(source).is_dir():
        return _of_capture(source, "environment", VARIABLE)
    lines = [line.strip().removeprefix("export ") for line in toml.text_of(Path(source), TEXT, "name another").splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    wrong = next((name for name, equals, _ in pairs if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name)), None)
    if wrong is not None:
        raise UsageError(
            f"{source} is no environment.\n"
            f"  expected: lines NAME=value\n  got:      {wrong}\n"
            "  next:     correct it: env > FILE"
        )
    return {name: value.strip("'\"") for name, _, value in pairs}


def versions(source: str | None) -> dict[str, str]:
    """Read versions of packages: of a capture, from lines ``name==version``, or (None) as installed; raises TrueupError if
    neither."""
    if source is None:
        return {_plain(one.metadata["Name"]): one.version for one in metadata.distributions() if one.metadata["Name"]}
    if Path(source).is_dir():
        found = _of_capture(source, "versions", re.compile(r"[\w.-]+"))
        return {_plain(name): version for name, version in found.items() if name not in ("python", "trueup")}
    matches = [PACKAGE.match(line.strip()) for line in toml.text_of(Path(source), TEXT, "name another").splitlines()]
    return {_plain(match[1]): match[2] for match in matches if match}


def _plain(name: str) -> str:
    """Return the normal form of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _of_capture(path: str, key: str, names: re.Pattern[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for manifest in open_capture(path).ranks.values():
        held = manifest.get(key)
        for name, value in held.items() if isinstance(held, Mapping) else ():
            if isinstance(value, str) and names.fullmatch(name):
                found.setdefault(name, value)
    return found


def _commit(name: str) -> str:
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    if not COMMIT.fullmatch(found):
        raise UsageError(
            f"{name} is no commit.\n"
            f"  expected: a commit, a branch or a tag\n  got:      {name}\n"
            "  next:     git log --oneline"
        )
    return found


def _git(*arguments: str) -> str:
    try:
        made = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise TrueupError(f"git cannot be run: {error.strerror or error}") from None
    if made.returncode:
        said = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1]
        raise (UsageError if arguments[0] == "rev-parse" else TrueupError)(
            f"git {arguments[0]} failed.\n"
            f"  where:    {Path.cwd()}\n  got:      {said}\n"
            "  next:     run it inside the training's repository"
        )
    return made.stdout
