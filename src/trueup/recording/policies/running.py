"""Rules at work: which calls each is for, and what it did."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trueup.foundation.store.policy_uses import RuleUse
from trueup.recording.policies.calls import RuledCall
from trueup.recording.policies.policy import Policy, PolicyRule


@dataclass(slots=True, eq=False)
class Running:
    """A rule at work, with what it did."""

    rule: PolicyRule
    fits: Callable[[str, str], bool]
    matched: int = 0
    changed: int = 0
    shadowed: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Reasons why calls were left as they were."""
    random: int = 0
    """Calls that drew random numbers."""

    def count(self, left: str) -> None:
        """Count a call, changed unless there is a reason why it was left as it was."""
        self.matched += 1
        if left:
            self.left[left] += 1
        else:
            self.changed += 1

    @property
    def why_not(self) -> str:
        """The most frequent reason why calls were left as they were."""
        return self.left.most_common(1)[0][0] if self.left else ""

    def use(self, path: str) -> RuleUse:
        """Return what it did so far, as a rule of the policy of that path."""
        rule = self.rule
        counts = self.matched, self.changed, self.shadowed
        return RuleUse(path, rule.number, rule.calls, rule.change, *counts, self.why_not, self.random)

    @contextmanager
    def counting_draws(self, call: RuledCall) -> Iterator[None]:
        """Count a call that draws random numbers in a block, in another dtype or on another device."""
        if not (self.rule.moves and call.changes):
            yield
            return
        drew = call.draws()
        yield
        self.random += drew()


class Rules:
    """The rules of a policy at work in this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rules = [Running(rule, rule.matcher()) for rule in policy.rules]
        self._found: dict[tuple[str, bool, str, str], tuple[Running | None, tuple[Running, ...]]] = {}

    def first(self, level: str, scope: str, op: str, *, optimizer: bool) -> Running | None:
        """Return the first rule that is for a call."""
        key = (level, optimizer, scope, op)
        found = self._found.get(key)
        if found is None:
            fitting = [
                r for r in self._rules
                if r.rule.level == level and (r.rule.phase == "optimizer") == optimizer and r.fits(scope, op)
            ]  # fmt: skip
            found = self._found[key] = (fitting[0] if fitting else None), tuple(fitting[1:])
        for running in found[1]:
            running.shadowed += 1
        return found[0]

    def uses(self) -> tuple[RuleUse, ...]:
        """Return how many calls each rule was for, and how many it changed."""
        return tuple(running.use(self.policy.path) for running in self._rules)

    def tell(self) -> None:
        """Say on stderr which rules changed nothing."""
        for use in self.uses():
            if use.nothing is not None:
                print(f"trueup: note: {use}", file=sys.stderr, flush=True)
