"""A rule at work: which calls it is for, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trueup.adapters.torch.policies_calls import Call
from trueup.remedy import PolicyRule, RuleUse


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
    def counting_draws(self, call: Call) -> Iterator[None]:
        """Count a call that draws random numbers in a block, in another dtype or on another device."""
        if not (self.rule.moves and call.changes):
            yield
            return
        generators = call.generators()
        before = generators.state()
        yield
        self.random += generators.drew(before)
