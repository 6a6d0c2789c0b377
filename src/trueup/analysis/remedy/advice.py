"""What to do next, as a command that can be pasted."""

from __future__ import annotations

import shlex

from trueup.analysis.remedy import suggest
from trueup.foundation.model import Finding, Result
from trueup.foundation.words.wording import one_line
from trueup.recording.adapters import ADAPTERS


def next_command(result: Result) -> tuple[str, str] | None:
    """Return ``(what it is for, command)`` for the first culprit, else for the first unmatched call, else None."""
    if result.culprit is not None:
        if _executes(result) and _can_be_executed(result.culprit):
            return "the call as a test by itself, for whoever maintains the operator", _reproduce(result, result.culprit)
        side = "baseline" if result.culprit.side == "baseline" else "candidate"
        return f"the call and its neighbours in the {side}", _show(result, result.culprit, side)
    if result.unmatched:
        side = "candidate" if result.unmatched[0].side == "candidate" else "baseline"
        return f"where the {side} has a call of its own", _show(result, result.unmatched[0], side)
    if result.verdict == "inconclusive":
        return "what the candidate capture holds", f"trueup show {_quoted(result.candidate.path)}"
    return None


def _executes(result: Result) -> bool:
    """Tell whether Trueup executes calls of the runs' framework again."""
    lacking = {adapter.name for adapter in ADAPTERS if not adapter.executes}
    frameworks = {result.baseline.framework, result.candidate.framework}
    return len(frameworks) == 1 and not frameworks & lacking


def _can_be_executed(culprit: Finding) -> bool:
    """Tell whether a culprit is a call whose elements both sides kept."""
    told = culprit.kind == "operator" and culprit.level in ("api", "aten") and culprit.phase != "collective"
    return told and culprit.seq[0] >= 0 and any(slot.method == "tensor" for slot in culprit.slots)


def _reproduce(result: Result, culprit: Finding) -> str:
    rank = ["--rank", str(culprit.rank)] if result.baseline.ranks > 1 else []
    device = next((name.partition(":")[0] for name in result.candidate.devices if name != "cpu"), None)
    where = ["--device", device] if device else []
    words = [result.baseline.path, str(culprit.seq[0]), *rank, *where, "-o", f"{result.candidate.path}-reproducer"]
    return " ".join(["trueup reproduce", *map(_quoted, words)])


def policy_to_try(result: Result) -> tuple[str, str] | None:
    """Return ``(text of a policy for the first culprit, how to try it)``, or None where no policy can help."""
    framework = result.candidate.framework
    if result.culprit is None or any("policy" in adapter.lacks for adapter in ADAPTERS if adapter.name == framework):
        return None
    if result.candidate.policy:  # what a policy did not heal is no matter for the same guess
        return None
    text = suggest(result.culprit)
    if text is None:
        return None
    path = _quoted(f"{result.candidate.path}-policy")
    return text, f"trueup capture --policy policy.toml -o {path} -- COMMAND"


def _show(result: Result, finding: Finding, side: str) -> str:
    path = result.baseline.path if side == "baseline" else result.candidate.path
    where = ["--scope", finding.scope] if finding.scope else ["--op", finding.op]
    rank = ["--rank", str(finding.rank)] if max(result.baseline.ranks, result.candidate.ranks) > 1 else []
    selection = [*where, "--phase", finding.phase, "--step", str(finding.step), *rank]
    return " ".join(["trueup show", _quoted(path), *map(_quoted, [*selection, "--level", finding.level])])


def _quoted(word: str) -> str:
    """Quote for a shell; text with control characters is spelled out first, so a paste cannot run a hidden line."""
    return shlex.quote(one_line(word))
