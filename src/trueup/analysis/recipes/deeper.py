"""What to do after a step: record inside the module that differs, set a switch alike, or look at the call that is to blame."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from trueup.analysis.recipes.found import RecipeResult
from trueup.analysis.remedy.advice import next_command
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.wording import one_line
from trueup.recording.recorder import launch

Advice = tuple[str, tuple[str, ...]]

INSIDE = "-inside"
"""What the captures of the inside of a module are called, after the capture that led there."""


def advice(found: RecipeResult, captures: tuple[Capture, Capture]) -> Advice | None:
    """Return what to do next and the commands for it, or None where everything passes."""
    outcome = found.deviating
    if outcome is None:
        return None
    if outcome.check == "environment":
        return "set it the same on both sides, record again, and follow the recipe again", ()
    if outcome.check == "inputs":
        told = next_command(found.result)
        return None if told is None else (told[0], (told[1],))
    if outcome.check in ("forward", "backward") and outcome.scope and not found.has_operators:
        lines = [_words(*recording(capture, outcome.scope, found.step, _command(capture))) for capture in captures]
        pair = _words("trueup", "align", *(f"{capture.path}{INSIDE}" for capture in captures), "--recipe", found.recipe)
        return f"record inside {one_line(outcome.scope)} on both sides, and follow the recipe again", (*lines, pair)
    told = next_command(found.result)
    return None if told is None else (told[0], (told[1],))


def recording(capture: Capture, scope: str, step: int, command: Sequence[str]) -> list[str]:
    """Return the command that records the operators inside a module, in one step."""
    options = ["--level", "module", "--level", "api", "--steps", str(step), "--stop", "--include", scope, "--include", f"{scope}.*"]
    return ["trueup", "capture", "-o", f"{capture.path}{INSIDE}", *options, "--", *command]


def record(capture: Capture, scope: str, step: int, command: Sequence[str]) -> Path:
    """Record the operators inside a module, by running the training again.

    Raises:
        TrueupError: the command failed, or nothing was recorded.
    """
    directory = Path(f"{capture.path}{INSIDE}")
    code = launch.run(
        {
            "directory": str(directory), "level": ("module", "api"), "steps": str(step), "stop": True,
            "include": (scope, f"{scope}.*"),
        },
        command,
    )  # fmt: skip
    if code or not directory.exists():
        raise TrueupError(
            f"The inside of {scope} was not recorded.\n  where:    {directory}\n  expected: a capture\n"
            f"  got:      exit code {code} of the command\n  next:     run {_words(*command)} by itself"
        )
    return directory


def further(
    found: RecipeResult, command: Sequence[str], base_command: Sequence[str] | None, recipe: str | Path, mapping: str | Path | None
) -> RecipeResult | None:
    """Record inside the module that differs on both sides and follow the recipe there; None where nothing has to be recorded.

    Raises:
        TrueupError: a command failed, or the baseline's is not known: a command that a capture names is never run by itself.
    """
    from trueup.analysis.recipes.following import follow

    outcome = found.deviating
    captures = open_capture(found.result.baseline.path), open_capture(found.result.candidate.path)
    if outcome is None or not outcome.scope or outcome.check not in ("forward", "backward") or found.has_operators:
        return None
    step = found.step
    if base_command is None:
        own = _words(*recording(captures[0], outcome.scope, step, _command(captures[0])))
        raise TrueupError(
            f"The inside of {one_line(outcome.scope)} has to be recorded in the baseline, too.\n"
            "  expected: --base-command 'python train.py ...'\n  got:      the candidate's command alone\n"
            f"  next:     give it, or record it where the baseline runs: {own}"
        )
    first, second = (record(one, outcome.scope, step, words) for one, words in zip(captures, (base_command, command), strict=True))
    return follow(first, second, recipe, mapping=mapping)


def _command(capture: Capture) -> list[str]:
    told = capture.root.get("command")
    return [str(word) for word in told] if isinstance(told, list) and told else ["COMMAND"]


def _words(*words: str) -> str:
    return " ".join(shlex.quote(one_line(word)) for word in words)
