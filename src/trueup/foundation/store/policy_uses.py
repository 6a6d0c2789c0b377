"""What a run says of the policies it ran with: written into the manifest of each rank, read by every report. A manifest is
foreign: what has not the expected form is left out, never trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trueup.foundation.words.wording import counted

MOST = 1000  # rules of a manifest that are read, as many as a policy may have

LONGEST = 300  # characters of a text of a manifest that are read


@dataclass(frozen=True, slots=True)
class RuleUse:
    """How often a rule held."""

    policy: str  # path of the file
    rule: int
    calls: str  # which calls it is for, in words
    change: str  # what it does to them, in words
    matched: int = 0  # calls that it was for
    changed: int = 0  # calls that it really changed
    shadowed: int = 0  # calls that it would have been for, had an earlier rule not come first
    why_not: str = ""  # why calls were left as they were
    random: int = 0  # calls that drew random numbers in the other dtype or on the other device

    @property
    def nothing(self) -> str | None:
        """Why the rule changed nothing, or None if it did."""
        if self.changed:
            return None
        if not self.matched:
            return f"an earlier rule came first for all {self.shadowed:,} calls" if self.shadowed else "no call matched"
        return f"{counted(self.matched, 'call')} matched, but {self.why_not or 'there was nothing to change'}"

    def __str__(self) -> str:
        name = f"{self.policy}, rule {self.rule} ({self.calls}: {self.change})"
        if (reason := self.nothing) is not None:
            return f"{name} changed nothing: {reason}"
        rest = self.matched - self.changed
        left = f", {rest:,} left as they were ({self.why_not or 'nothing to change'})" if rest > 0 else ""
        drew = f"; {self.random:,} drew random numbers so, perhaps others than without it" if self.random else ""
        return f"{name}: {counted(self.changed, 'call')}{left}{drew}"

    def to_json(self) -> dict[str, Any]:
        """Return the form in which it stands in a manifest."""
        return {name: getattr(self, name) for name in self.__slots__}


def recorded_uses(manifests: Iterable[Mapping[str, Any]]) -> tuple[RuleUse, ...]:
    """Return the rules that a capture ran with, by the manifests of its ranks, each with its calls on all ranks."""
    found: dict[tuple[Any, ...], RuleUse] = {}
    for manifest in manifests:
        for use in filter(None, map(_use, uses[:MOST] if isinstance(uses := manifest.get("policy"), list) else [])):
            key = (use.policy, use.rule, use.calls, use.change)
            before = found.get(key)
            found[key] = use if before is None else replace(
                before, matched=before.matched + use.matched, changed=before.changed + use.changed,
                shadowed=before.shadowed + use.shadowed, why_not=before.why_not or use.why_not, random=before.random + use.random,
            )  # fmt: skip
    return tuple(found.values())


def policy_lines(manifests: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return one sentence for each rule that a capture ran with."""
    return tuple(map(str, recorded_uses(manifests)))


def policy_note(baseline: Sequence[RuleUse], candidate: Sequence[RuleUse]) -> str | None:
    """Say that two runs did not run with the same policy, or return None."""
    if {(use.calls, use.change) for use in baseline} == {(use.calls, use.change) for use in candidate}:
        return None
    said = {side: _short(uses) for side, uses in (("baseline", baseline), ("candidate", candidate)) if uses}
    if len(said) == 2:
        return f"the runs were given different policies: the baseline {said['baseline']}, the candidate {said['candidate']}"
    side, text = said.popitem()
    return f"only the {side} was given a policy: {text}"


def _short(uses: Sequence[RuleUse]) -> str:
    path, changed = uses[0].policy, sum(use.changed for use in uses)
    return f"{path} ({counted(len(uses), 'rule')}, {counted(changed, 'call')} changed)"


def _use(said: Any) -> RuleUse | None:
    if not isinstance(said, dict):
        return None
    texts = {name: str(said.get(name, ""))[:LONGEST] for name in ("policy", "calls", "change", "why_not")}
    counts = {name: said.get(name) for name in ("rule", "matched", "changed", "shadowed", "random")}
    if not all(type(count) is int and 0 <= count < 2**53 for count in counts.values()):
        return None
    return RuleUse(**texts, **counts)  # type: ignore[arg-type]
