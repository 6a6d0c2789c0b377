"""What to do next, as a command to paste; and the text of a `policy.toml` that runs a blamed call in another way.

    # suggested for: neck.lstm, backward, step 0, rank 0 (torch.lstm)
    # the result is wrong on its device, so it runs on the CPU
    # a guess, until a run with it has been compared
    [[rule]]
    scope = "neck.lstm"
    op = "torch.lstm"
    device = "cpu"
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

from trueup.foundation.facts.slots import STEP
from trueup.foundation.model import Finding, Result
from trueup.foundation.words.wording import one_line
from trueup.recording.policy_file import exactly, in_toml
from trueup.recording.registry import ADAPTERS


def next_command(result: Result) -> tuple[str, str] | None:
    """Return ``(what it is for, command)`` for the first culprit, else for the first unmatched call, else None."""
    if result.culprit is not None:
        if _executes(result) and _can_be_executed(result.culprit):
            return "the call as a test by itself, for whoever maintains the operator", _reproduce(result, result.culprit)
        if result.culprit.cause and _executes(result):
            paths = _quoted(result.baseline.path), _quoted(result.candidate.path)
            return "all settings that differ between the runs", " ".join(["trueup preflight", *paths])
        side = "baseline" if result.culprit.side == "baseline" else "candidate"
        return f"the call and its neighbours in the {side}", _show(result, result.culprit, side)
    if result.unmatched:
        side = "candidate" if result.unmatched[0].side == "candidate" else "baseline"
        return f"where the {side} has a call of its own", _show(result, result.unmatched[0], side)
    if result.verdict == "inconclusive":
        return "what the candidate capture holds", f"trueup show {_quoted(result.candidate.path)}"
    return None


def _executes(result: Result) -> bool:
    """Tell whether Trueup can execute calls of the runs' framework again."""
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
    text = suggest(result.culprit, on=result.candidate.devices)
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


HALVES = ("float16", "bfloat16")
ROUNDING = 64.0
"""Times the explained error up to which an error in half precision is taken for one of rounding: a wider dtype is tried first then.
Accumulating 4,096 terms in the dtype itself, instead of float32, is off by about sqrt(4096) = 64 times the rounding of one result
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2, with random signs)."""


ON_CPU = 'device = "cpu"'


def suggest(finding: Finding, on: Collection[str] = ()) -> str | None:
    """Return the text of a policy for ``finding``, a culprit of `trueup.compare`, or None if no policy can help. A rounding-like
    error or an overflow in half precision asks for float32, a result that is wrong on its device for the CPU; the text calls that a
    guess. Nothing moves to the CPU if the run was there: ``on`` has its devices, as ``npu:0``; empty: not known."""
    if finding.cause or finding.kind != "operator" or finding.phase not in ("forward", "recompute", "backward", "optimizer"):
        return None
    where = _where(finding)
    if where is None:
        return None
    change, because = _change(finding)
    if change == ON_CPU and (set(on) == {"cpu"} or finding.rule.startswith("random")):  # the CPU would draw other numbers still
        return None
    lines = [
        f"# suggested for: {one_line(finding.name)} ({one_line(finding.op)})",
        f"# {because}",
        "# a guess, until a run with it has been compared",
        "[[rule]]",
        *(f"{key} = {in_toml(value)}" for key, value in where),
        change,
    ]
    return "\n".join(lines) + "\n"


def _where(finding: Finding) -> list[tuple[str, str]] | None:
    """Return the keys that select the call, or None if no rule reaches it."""
    op = finding.api if finding.level == "aten" else finding.op
    if op is None or "::" in op or op == STEP:  # an update as a whole is a node of the comparison, and no call of a run
        return None
    found = [("level", "module")] if finding.level == "module" else []
    if not finding.alike and (finding.scope or finding.level == "module"):  # else it is wrong wherever it runs
        found.append(("scope", exactly(finding.scope)))
    found.append(("op", exactly(op)))
    if finding.phase == "optimizer":
        found.append(("phase", "optimizer"))
    return found


def _change(finding: Finding) -> tuple[str, str]:
    dtypes = {slot.dtype[1] for slot in finding.slots if slot.dtype[1]}
    overflows = any(
        getattr(slot.candidate, name, 0) > getattr(slot.baseline, name, 0)
        for slot in finding.slots if slot.slot.startswith(("output", "grad_input"))
        for name in ("n_nan", "n_posinf", "n_neginf", "n_saturated")
    )  # fmt: skip
    halves = sorted(dtypes.intersection(HALVES))
    if halves and (overflows or finding.ratio <= ROUNDING):
        what = "it leaves the range" if overflows else "its error is like one of rounding"
        return 'dtype = "float32"', f"{what} in {' and '.join(halves)}, so it runs in float32"
    wider = '\ndtype = "float32"' if halves else ""  # not every function of the CPU takes half precision
    return f"{ON_CPU}{wider}", "the result is wrong on its device, so it runs on the CPU"
