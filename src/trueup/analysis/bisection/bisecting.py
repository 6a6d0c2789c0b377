"""A bisection from the command line's words to the sentence that it ends in.

    DIR/journal.jsonl      each attempt; the same command with the same DIR goes on where it was stopped
    DIR/first-step         what the training calls, where no capture was given
    DIR/runs/001 ...       the runs
    DIR/policy.toml        what heals the run: or environment.sh, requirements.txt
    DIR/bisect.json        what was found
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.analysis.bisection import changes
from trueup.analysis.bisection.changes import KINDS, RUN, Changes, Runner
from trueup.analysis.bisection.search import Attempt, Chosen, Found, Journal, Search, Word
from trueup.analysis.triage.running import last_line
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import counted, say
from trueup.recording.recorder import launch
from trueup.recording.recorder.options import CaptureOptions

OUTPUT = "trueup-bisect"
JOURNAL = "journal.jsonl"
FIRST = "first-step"
SHOWN = 8  # names of a set that a sentence holds
LARGEST_REPORT = 1 << 26  # bytes that are read of a comparison's report
# Where to look next when no set of changes heals the run
ELSEWHERE = {
    "scopes": "--as float64 or --as cpu changes more; --over environment and --over packages look beyond the script",
    "operators": "--over scopes: a module computes in that dtype as a whole, while a function's result goes back into its own",
    "switches": "--over scopes: what is computed rather than how it is optimised",
    "environment": "--over packages: the versions of what the training imports",
    "packages": "--over environment: the variables that choose numbers",
}
EXIT_CODES: dict[Word, int] = {"found": 0, "outside": 1, "nothing to find": 1, "could not tell": 2}


@dataclass(frozen=True)
class Bisection:
    """What was found."""

    verdict: Word
    sentence: str  # several lines of plain text
    chosen: Chosen  # the smallest set with which the check passes; of commits and steps the first with which it fails
    directory: Path
    runs: int
    advice: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 found; 1 the check passes as it is, or fails with all changes; 2 could not tell."""
        return EXIT_CODES[self.verdict]


def bisect(
    over: str, command: Sequence[str], output: str | Path | None = None, *, check: str | None = None,
    baseline: str | Path | None = None, capture: str | Path | None = None, good: str | None = None, bad: str | None = None,
    change: Sequence[str] = (), suspects: str | Path | None = None, most: int | None = None, timeout: float | None = None,
    tell: Callable[[Attempt], None] = lambda _: None,
) -> Bisection:  # fmt: skip
    """Find the smallest set of changes with which a training is right again, by running its command.

    Args:
        over: what is changed: one of `KINDS`.
        command: the training where it is wrong.
        output: folder of the search; else ``trueup-bisect``. A search that was stopped goes on there.
        check: a command that ends with 0 after a good run, 1 to 124 after a bad one, 125 where that cannot be judged; it finds
            the run's folder in the variable ``TRUEUP_RUN``. Else the exit code of the training itself is asked.
        baseline: in place of a check: a capture; a run is good where its losses are those, but for rounding.
        capture: of the training, for ``scopes``, ``operators`` and ``switches``; else its first step is recorded.
        good: the good side of ``environment`` (a capture, or a file of ``NAME=value``), of ``packages`` (a capture, or
            ``name==version``), of ``commits`` (a commit).
        bad: the bad side; else this environment, what is installed, ``HEAD``.
        change: what is done to modules and operators: dtypes, ``cpu``, ``deterministic``; else the CPU in place of an accelerator,
            or the next wider dtype.
        suspects: folder of a report of `trueup.compare`: what it names is tried first.
        most: of ``steps``: up to so many.
        timeout: seconds after which a run is ended; it cannot be judged then.
        tell: called with each attempt, those of a search that was stopped first.

    Raises:
        TrueupError: an argument is wrong or missing, the command or the check cannot start, or the folder holds another search.
    """
    folder = Path(OUTPUT if output is None else output)
    _refuse(over, command, check, baseline)
    if not _is_ours(folder):
        raise UsageError(f"{folder} is not empty\n  next:     name another directory with -o, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    offered = _offered(over, command, folder, capture, good, bad, change, most)
    named = _named(Path(suspects)) if suspects is not None else frozenset()
    first = tuple(item for item in offered.items if item in named)
    items = first + tuple(item for item in offered.items if item not in named)
    question = {"over": over, "command": redacted(list(command)), "check": redacted(check or ""), "items": list(items)}
    journal = Journal(folder / JOURNAL, {**question, "baseline": str(baseline or "")})
    known = None if baseline is None else open_capture(baseline)
    runner = Runner(command, check, known, offered.setup, folder / "runs", timeout=timeout, tell=tell)
    for known_before in journal.attempts:
        tell(known_before)
    search = Search(items, first, runner, journal, offered.said, offered.overlap)
    try:
        found = search.first_bad() if offered.ordered else search.smallest()
    finally:
        offered.close()
    advice = tuple(offered.write(found.chosen, folder)) if found.word == "found" else ()
    if found.word == "outside":
        advice = (ELSEWHERE[over],)
    text = "\n".join([_sentence(found, offered, journal.attempts), *_remarks(found, offered, journal.attempts)])
    result = Bisection(found.word, text, found.chosen, folder, len(journal.attempts), advice)
    told: dict[str, Any] = {"verdict": result.verdict, "sentence": text, "chosen": list(found.chosen), "advice": list(advice)}
    (folder / "bisect.json").write_text(json.dumps({**told, **question, "runs": result.runs}, indent=1), encoding="utf-8")
    return result


def _is_ours(folder: Path) -> bool:
    """Tell whether a search may work in a folder: new, empty, or of a search that was stopped."""
    if not folder.exists():
        return True
    return folder.is_dir() and ((folder / JOURNAL).exists() or {one.name for one in folder.iterdir()} <= {FIRST})


def _refuse(over: str, command: Sequence[str], check: str | None, baseline: str | Path | None) -> None:
    if over not in KINDS:
        raise UsageError(
            f"There is no search over {over}.\n"
            f"  expected: one of {', '.join(KINDS)}\n  got:      {over}\n"
            "  next:     --over scopes"
        )
    if not command:
        example = "trueup bisect --over scopes --check 'python judge.py' -- python train.py"
        raise UsageError(f"There is nothing to run.\n  expected: the training's command\n  got:      none\n  next:     {example}")
    if check is not None and baseline is not None:
        raise UsageError("--check and --baseline exclude each other.\n  next:     leave one of them out")
    try:
        words = shlex.split(check or "")
    except ValueError as error:
        raise UsageError(f"--check cannot be read: {error}\n  got:      {check}\n  next:     close its quotes") from None
    if check is not None and not words:
        raise UsageError(
            "--check is empty.\n"
            "  expected: a command\n"
            "  next:     leave it out: the training's own exit code is asked then"
        )


def _offered(
    over: str, command: Sequence[str], folder: Path, capture: str | Path | None, good: str | None, bad: str | None,
    change: Sequence[str], most: int | None,
) -> Changes:  # fmt: skip
    if over in ("environment", "packages", "commits") and good is None:
        raise UsageError(f"--over {over} needs the good side.\n  next:     --good {'v1.0' if over == 'commits' else 'runs/good'}")
    if over == "environment":
        return changes.environment(changes.variables(str(good)), None if bad is None else changes.variables(bad))
    if over == "packages":
        python = command[0] if "python" in Path(command[0]).name else "python3"
        where = changes.HERE if bad is None else "in the bad run"
        return changes.packages(changes.versions(good), changes.versions(bad), folder / "packages", python, where)
    if over == "commits":
        return changes.commits(str(good), bad or "HEAD", folder)
    if over == "steps":
        if most is None or most < 1 or not any("{steps}" in word for word in command):
            raise UsageError(
                "--over steps needs a training whose length can be chosen.\n  expected: {steps} in its command, and --most N\n"
                "  next:     trueup bisect --over steps --most 1000 -- python train.py --max-steps {steps}"
            )
        return changes.steps(most)
    if over == "operators" and tuple(change) == (changes.ATEN,):
        return changes.compiled_operators(changes.listed(command, folder / FIRST))
    seen = open_capture(capture) if capture is not None else _first_step(command, folder)
    if over in ("scopes", "operators") and changes.is_compiled(seen):
        raise UsageError(
            "The training uses torch.compile, and no rule reaches into compiled code.\n"
            f"  where:    {seen.path}\n  expected: a training whose Python code runs\n"
            f"  next:     --over operators --as {changes.ATEN} tries the operators that are compiled, --over switches the compiler"
        )
    offer = {"scopes": changes.modules, "operators": changes.operators, "switches": changes.switches}[over]
    return offer(seen, change)


def _first_step(command: Sequence[str], folder: Path) -> Capture:
    """Record the first step of the training; a search that goes on has recorded it."""
    place = folder / FIRST
    if (folder / JOURNAL).exists():
        return open_capture(place / "capture")
    say("recording the first step, which tells what can be changed")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    options = CaptureOptions.of(level=("module", "api"), steps="0", stop=True)
    told = {RUN: str(place.absolute())}
    output = place / "output.txt"
    code = launch.execute((place / "capture").absolute(), options, command, environment=told, output=output)
    try:
        return open_capture(place / "capture")  # whatever the exit code: a wrong run may end with 1
    except TrueupError:
        raise TrueupError(
            f"The first step could not be recorded: the command ended with exit code {code}{last_line(output)}\n"
            "  next:     record it yourself (trueup capture --steps 0 --stop), and name the capture with --capture"
        ) from None


def _named(report: Path) -> frozenset[str]:
    """Return the scopes and operators of the calls that a comparison blames."""
    file = report / "verdict.json" if report.is_dir() else report
    try:
        with file.open("rb") as opened:
            content = json.loads(opened.read(LARGEST_REPORT))
        culprits = content["culprits"]
        return frozenset(str(one[key]) for one in culprits for key in ("scope", "op", "api") if one.get(key))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrueupError(
            f"{file} is no report of a comparison.\n  expected: verdict.json, as `trueup compare -o DIR` writes it\n"
            f"  got:      {type(error).__name__}\n  next:     name its folder, or leave out --suspects"
        ) from None


def _sentence(found: Found, offered: Changes, attempts: Sequence[Attempt]) -> str:
    if found.word == "could not tell":
        return f"COULD NOT TELL  {found.why}"
    whole = counted(len(offered.items), offered.noun)
    if found.word == "nothing to find":
        until = f", up to {offered.said(offered.items[-1])}" if offered.ordered else ""
        why = f": {attempts[-1].why}" if attempts and attempts[-1].why else ""
        return f"NOTHING TO FIND  the check passes as it is{until}{why}"
    if found.word == "outside":
        every = f"the only {offered.noun}" if len(offered.items) == 1 else f"all {whole}"
        unless = f", or {offered.unless}" if offered.unless else ""
        return f"NOT AMONG THESE  with {every} {offered.done} the check still fails: the cause lies elsewhere{unless}"
    if offered.ordered:
        return f"FOUND  the check first fails with {offered.said(found.chosen[0])} ({whole} searched)"
    more = f" and {len(found.chosen) - SHOWN} more" if len(found.chosen) > SHOWN else ""
    named = ", ".join(map(offered.said, found.chosen[:SHOWN])) + more
    many = "this one" if len(found.chosen) == 1 else f"these {len(found.chosen)}"
    many = f"{many} of {whole}" if len(offered.items) > 1 else "it"
    return f"FOUND  {named}: the check passes with {many} {offered.done}"


def _rest(count: int, noun: str) -> str:
    return noun if count == 1 else counted(count, noun)


def _remarks(found: Found, offered: Changes, attempts: Sequence[Attempt]) -> list[str]:
    lines = []
    if found.word == "found" and not offered.ordered:
        rest = found.rest
        if found.others:
            heals = "heals" if rest == 1 else "heal"
            lines.append(f"the other {_rest(rest, offered.noun)} {offered.done} {heals} it as well: more than one change does")
        elif found.why:
            these, others = "it" if len(found.chosen) == 1 else "them", f"the other {_rest(rest, offered.noun)} {offered.done}"
            lines.append(f"it passed twice more with {these}; whether {others} heal it, too, is not known: {found.why}")
        elif rest:
            these = "it" if len(found.chosen) == 1 else "them"
            others = f"the other {_rest(rest, offered.noun)} {offered.done}"
            lines.append(f"verified: it passed twice more with {these}, and failed with {others}")
    elif found.word == "found":
        lines.append("verified: it failed again there, and passed again before")
    if not found.steady:
        lines.append("the check is not steady: each set was tried until a sequential test decided (1 % risk)")
    times = {chosen: [one.seconds for one in attempts if one.chosen == chosen] for chosen in ((), found.chosen)}
    typical = statistics.median([one.seconds for one in attempts]) if attempts else 0.0
    cost = f"{counted(len(attempts), 'run')}, {typical:.2g} s each"
    if found.word == "found" and not offered.ordered and times[()] and times[found.chosen]:
        before, after = (statistics.median(times[chosen]) for chosen in ((), found.chosen))
        cost += f"; a run takes {after:.2g} s with what was found, {before:.2g} s without"
    skipped = sum(one.outcome == "skip" for one in attempts)
    return [*lines, cost + (f"; {counted(skipped, 'run')} could not be judged" if skipped else "")]
