"""From an overflow to a policy that is known to heal it: take the suggested rule, run the step again with it, judge it again.

    runs/large-healed/policy.toml     the rules, one more each round
    runs/large-healed/run-1           the capture of the first round, of the step found and the one after it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueup.analysis.anomalies import overflow
from trueup.foundation.facts.anomaly import Anomaly, OverflowResult
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.policy_uses import policy_lines
from trueup.recording.policies.policy import load
from trueup.recording.recorder import launch

POLICY = "policy.toml"
ROUNDS = 4
"""Runs at most: each adds the rule for the call that overflows next."""

HealWord = Literal["healed", "not healed", "nothing to heal", "could not tell"]


@dataclass(frozen=True)
class Healed:
    """What became of it."""

    verdict: HealWord
    sentence: str
    """Several lines of plain text."""
    policy: Path | None = None
    """The file that was tried last."""
    runs: tuple[Path, ...] = ()
    uses: tuple[str, ...] = ()
    """What each rule changed in the last run."""
    result: OverflowResult | None = None
    """Of the last run."""

    @property
    def exit_code(self) -> int:
        """0 healed, or nothing to heal; 1 not healed; 2 could not tell."""
        return {"healed": 0, "nothing to heal": 0, "not healed": 1, "could not tell": 2}[self.verdict]


def heal(
    capture: str | Path, command: Sequence[str], output: str | Path | None = None, *, policy: str | Path | None = None,
    rounds: int = ROUNDS,
) -> Healed:  # fmt: skip
    """Find rules with which the step that overflowed does not, by running its command again.

    Args:
        capture: of the run that overflowed.
        command: the same training; it ends when the step was recorded.
        output: where policy.toml and the captures go; else beside the capture, ``<capture>-healed``.
        policy: a policy to verify; else the rule that `trueup.overflow` suggests, and those for what overflows then.
        rounds: runs at most; with a policy that was given, one.

    Raises:
        TrueupError: the capture or the policy cannot be read, the command does not start, or ``output`` holds something.
    """
    opened = open_capture(capture)
    before = overflow(opened)
    first = _first(before)
    if first is None:
        return Healed("nothing to heal", f"nothing in {opened.path} matters: {before.sentence.splitlines()[0]}")
    folder = _folder(opened, output)
    target = folder / POLICY
    rules = load(policy).text if policy is not None else first.policy
    if not rules.strip():
        return Healed("not healed", f"no rule is known for {first.place.name}: {_why_none(first)}")
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Path] = []
    steps = f"{first.place.step}:{first.place.step + 2}"
    now: Anomaly | None = first
    result: OverflowResult | None = None
    while now is not None and len(runs) < (rounds if policy is None else 1):
        target.write_text(rules, encoding="utf-8")
        runs.append(folder / f"run-{len(runs) + 1}")
        code = launch.run(
            {
                "directory": str(runs[-1]), "level": tuple(sorted(opened.levels)), "steps": steps, "stop": True,
                "policy": str(target),
            },
            command,
        )
        if code or not runs[-1].exists():
            said = f"the command ended with exit code {code} under the policy"
            return Healed("could not tell", said, target, tuple(runs))
        result = overflow(runs[-1])
        now = _first(result)
        more = "" if now is None else now.policy
        if now is not None and (not more or more in rules):
            break
        rules += more
    assert result is not None
    uses = tuple(policy_lines(open_capture(runs[-1]).ranks.values()))
    return _ended(first, now, result, target, runs, uses)


def _ended(
    first: Anomaly, now: Anomaly | None, result: OverflowResult, policy: Path, runs: Sequence[Path], uses: tuple[str, ...]
) -> Healed:
    more = Healed("could not tell", "", policy, tuple(runs), uses, result)
    name = f"{first.place.name} ({first.place.op})"
    if result.verdict == "inconclusive" or first.place.step not in open_capture(runs[-1]).steps:
        text = f"step {first.place.step} was not recorded again, so what became of {name} is not known"
        return _with(more, "could not tell", text)
    if now is None:
        rules = len(load(policy).rules)
        count = "1 rule" if rules == 1 else f"{rules} rules"
        lines = [f"with {count}, {name} is clean, and the rest of step {first.place.step} too", f"policy: {policy}"]
        return _with(more, "healed", "\n".join(lines))
    lines = [f"with the policy: {now.sentence}", f"policy: {policy}"]
    if not now.policy:
        lines.insert(1, f"no rule is known for it: {_why_none(now)}")
    return _with(more, "not healed", "\n".join(lines))


def _with(found: Healed, verdict: HealWord, sentence: str) -> Healed:
    return Healed(verdict, sentence, found.policy, found.runs, found.uses, found.result)


def _first(result: OverflowResult) -> Anomaly | None:
    return next((one for one in result.anomalies if one.matters != "harmless" and one.place.seq >= 0), None)


def _why_none(one: Anomaly) -> str:
    if one.kind in ("input", "parameters", "collective"):
        return "no call is to blame that could run in another way"
    if one.place.phase == "backward":
        return "a gradient has the dtype of its tensor; a smaller loss scale helps"
    if one.kind == "nan":
        return "NaN in float32 is mathematics (the logarithm of a negative number, 0/0), not range"
    return "a wider dtype does not help"


def _folder(capture: Capture, output: str | Path | None) -> Path:
    folder = Path(f"{capture.path}-healed") if output is None else Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrueupError(f"{folder} is not empty\n  next:     name another directory with -o, or remove it")
    return folder
