"""What a run says of itself in its manifests: its framework, what it was asked to record, how its products are rounded, and the
policies it ran with; and what two runs have in common by that, so that they can be compared. A manifest is foreign: what has not
the expected form is left out, never trusted.

`Overlap` also says what keeps a capture from being all of its run. Two that were asked to record the same and did so to their end
are whole, however little that is. Of a fragment (a run that did not end, other filters, slots recorded twice) nobody knows what is
missing, so agreement of the rest does not make two runs aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trueup.foundation.facts.slots import TF32
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.tables import FRAMEWORKS
from trueup.foundation.model import LEVELS, PHASES, TrueupError
from trueup.foundation.store.layout import MONITOR
from trueup.foundation.words.wording import counted, in_runs

if TYPE_CHECKING:  # a process that records says this of itself, and reads no capture
    from trueup.foundation.store.reader import Capture

LONGEST = 120  # characters of a filter that are shown
MOST_TEXT = 300  # characters of a text of a manifest that are read
MOST = 1000  # rules of a manifest that are read, as many as a policy may have


def framework_of(capture: Capture) -> str | None:
    """Return the name of the framework that a capture is of, None where nothing says it."""
    return next((str(m["framework"]) for m in capture.ranks.values() if "framework" in m), None)


def recorded_levels(capture: Capture) -> frozenset[str]:
    """Return the levels that a capture was asked for and holds: the loss is a row of level api in all of them."""
    asked, held = asked_levels(capture), capture.levels
    return frozenset(level for level in held if level in asked) or held


def asked_levels(capture: Capture) -> frozenset[str]:
    """Return the levels that a capture was asked for and that its framework has; those that it holds where nothing says it."""
    asked = capture.root.get("levels")
    if not isinstance(asked, list):
        return capture.levels
    return frozenset(map(str, asked)) - (frozenset() if framework_of(capture) in (None, "torch") else {"aten"})


def require_records(capture: Capture) -> None:
    """Raise TrueupError if a capture holds nothing."""
    if MONITOR in capture.root:
        raise TrueupError(
            f"The run has series of a monitor and no calls.\n  where:    {capture.path}\n  expected: a capture of calls\n"
            "  got:      what `trueup monitor` wrote\n  next:     compare it with another monitored run, or trueup report --trend"
        )
    if not capture.rows:
        why = (capture.lost or capture.problems or ["nothing was captured"])[0]
        raise TrueupError(f"{capture.path} holds no records: {why}; record again")


def lender_of(capture: Capture) -> str | None:
    """Return the capture whose inputs a run was given (``trueup capture --inputs-from``), None for an ordinary run."""
    config = capture.root.get("config")
    found = config.get("inputs_from") if isinstance(config, dict) else None
    return found[:MOST_TEXT] if isinstance(found, str) else None


def filters_of(capture: Capture) -> dict[str, Reason] | None:
    """Return the filters of a capture, None where it tells none (another tool's, or one made by hand)."""
    config = capture.root.get("config")
    if not isinstance(config, dict) or not all(isinstance(config.get(name), list) for name in ("phases", "include", "exclude")):
        return None
    said = {}
    for name, option in (("phases", "--phase"), ("include", "--include"), ("exclude", "--exclude")):
        values: list[Any] = sorted(map(str, config[name]))
        nothing = not values or (name == "phases" and set(values) >= set(PHASES))
        said[name] = Why.FILTER(option, None if nothing else " ".join(values)[:LONGEST])
    return said


def keeps_all(config: Any) -> bool:
    """Tell whether options kept all calls: all phases, and all levels down to some."""
    if not isinstance(config, dict) or config.get("include") != [] or config.get("exclude") != []:
        return False
    levels, phases = config.get("levels"), config.get("phases")
    if not isinstance(levels, list) or not isinstance(phases, list):
        return False
    return levels == list(LEVELS[: len(levels)]) and set(map(str, phases)) >= set(PHASES)


@dataclass(frozen=True, slots=True)
class Precision:
    """How float32 matrix products are computed, as the two runs declare it."""

    matmul: float = 0.0
    convolution: float = 0.0


def precision_of(environments: Iterable[dict[str, str]], devices: Iterable[Iterable[str]]) -> Precision:
    """Read from two runs whether float32 products are rounded to TF32 or HF32 on their devices."""
    matmul = convolution = 0.0
    for environment, names in zip(environments, devices, strict=True):
        kinds = {name.partition(":")[0] for name in names}
        low = environment.get("float32_matmul_precision", "highest") != "highest"
        if "cuda" in kinds and (low or environment.get("cuda.matmul.allow_tf32") == "True"):
            matmul = TF32
        if "cuda" in kinds and environment.get("cudnn.allow_tf32") == "True":
            convolution = TF32
        for kind in kinds - {"cuda", "cpu"}:
            matmul = TF32 if environment.get(f"{kind}.matmul.allow_hf32") == "True" else matmul
            convolution = TF32 if environment.get(f"{kind}.conv.allow_hf32") == "True" else convolution
    return Precision(matmul, convolution)


def filters(captures: Sequence[Capture]) -> tuple[tuple[Reason, ...], ...] | None:
    """Return the filters of two captures where they differ, or None. Levels, ranks and steps show in what was recorded;
    `trueup.foundation.store.declared` compares those."""
    if captures[0].root.get("config") == captures[1].root.get("config"):
        return None
    first, second = (filters_of(capture) for capture in captures)
    if first is None or second is None or first == second:
        return None
    return tuple(tuple(its[name] for name in its if first[name] != second[name]) for its in (first, second))


def details(captures: Sequence[Capture]) -> Reason | None:
    """Return that one run keeps less of each tensor than the other, or None."""
    first, second = (capture.root.get("detail") for capture in captures)
    if first == second or not (isinstance(first, str) and isinstance(second, str)):
        return None
    return Why.DETAILS(first[:LONGEST], second[:LONGEST])


def require_common_names(first: Capture, second: Capture) -> bool:
    """Tell whether two captures are of different frameworks; raises TrueupError if one of those has no column in our tables."""
    names = [framework_of(capture) for capture in (first, second)]
    if None in names or names[0] == names[1]:
        return False
    if not all(name in FRAMEWORKS for name in names):
        raise TrueupError(
            f"the captures are of different frameworks: {first.path} of {names[0]}, {second.path} of {names[1]}; "
            f"common names are known of {', '.join(FRAMEWORKS[:-1])} and {FRAMEWORKS[-1]}"
        )
    return True


def forced(capture: Capture, levels: Sequence[str]) -> tuple[list[Reason | str], bool]:
    """Return what to say, and whether agreement at these levels proves nothing. Where each module gets the baseline's inputs and
    gradients, a fault between two modules is overwritten before it is recorded, unless the function itself is recorded."""
    lender = lender_of(capture)
    if lender is None:
        return [], False
    notes = [str(note) for manifest in capture.ranks.values() for note in manifest.get("notes") or ()]
    noted = [note[:MOST_TEXT] for note in notes if "inputs were forced" in note]
    said: list[Reason | str] = [Why.FORCED(noted[0] if noted else Why.LENT(lender)), *noted[1:2]]
    recorded = capture.root.get("levels")  # the loss is a call of level api in every capture
    blind = not any(level in recorded for level in {*levels} - {"module"}) if isinstance(recorded, list) else True
    return ([Why.BLIND(), *said] if blind else said), blind


def fragments(captures: Sequence[Capture], names: Sequence[str]) -> list[Reason]:
    """Return of each capture whose run did not end, or was not recorded to its end, why that is."""
    return [
        Why.FRAGMENT(name, capture.steps[-1] if capture.steps else None, capture.unfinished[0], len(capture.unfinished) - 1 or None)
        for name, capture in zip(names, captures, strict=True) if capture.unfinished
    ]  # fmt: skip


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
    texts = {name: str(said.get(name, ""))[:MOST_TEXT] for name in ("policy", "calls", "change", "why_not")}
    counts = {name: said.get(name) for name in ("rule", "matched", "changed", "shadowed", "random")}
    if not all(type(count) is int and 0 <= count < 2**53 for count in counts.values()):
        return None
    return RuleUse(**texts, **counts)  # type: ignore[arg-type]


def _in_short(numbers: list[int]) -> str:
    return in_runs(numbers, ", ") or "none"


class Overlap:
    """What is compared of two captures, and what there is to say of the rest. ``level``: the levels wanted, None for all that
    both hold. Raises TrueupError where they have nothing in common."""

    def __init__(self, captures: tuple[Capture, Capture], level: str | Sequence[str] | None) -> None:
        self._captures = captures
        for capture in captures:
            require_records(capture)
        self.mixed = require_common_names(*captures)  # whether the captures are of different frameworks
        self.notes: list[Reason | str] = []
        self.is_whole = True  # whether nothing was left out because only one run holds it
        self.levels = self._levels(level)
        held = frozenset().union(*map(recorded_levels, captures))
        self.chosen = None if held == set(self.levels) else self.levels  # levels to read, None for all
        self.ranks = self._common("ranks", [sorted(c.ranks) for c in captures])
        self.steps = self._common("steps", [c.steps for c in captures])
        self.precision = self._precision()
        self.filters = filters(captures)  # how the filters of the two captures differ, None where they do not
        if (said := details(captures)) is not None:
            self.notes.append(said)

    @cached_property
    def same_kernels(self) -> bool:
        """Whether nothing that both runs say is a reason for other kernels: libraries, switches, threads, processor."""
        from trueup.foundation.settings import differing  # here: a process that records compares nothing

        first, second = (next(iter(capture.ranks.values()), {}) for capture in self._captures)
        return not any(one.group in ("switch", "version") and one.severity != "cannot" for one in differing(first, second))

    def of(self, captures: tuple[Capture, Capture]) -> Overlap:
        """Return the same of captures that hold some of the ranks."""
        found = copy(self)
        found._captures = captures
        return found

    def _levels(self, level: str | Sequence[str] | None) -> list[str]:
        wanted = LEVELS if level is None else (level,) if isinstance(level, str) else tuple(level)
        for name in wanted:
            if name not in LEVELS:
                raise TrueupError(f"level {name!r} is unknown: expected {', '.join(LEVELS)}")
        held = [[name for name in LEVELS if name in recorded_levels(capture)] for capture in self._captures]
        for capture, levels in zip(self._captures, held, strict=True):
            if not levels and capture.lost:
                raise TrueupError(f"{capture.path} holds no readable records: {min(capture.lost)}; record again")
        common = [n for n in wanted if all(n in h for h in held)]
        if not common:
            raise TrueupError(
                f"the captures have no level in common among {', '.join(wanted)}: {self._name(0)} holds "
                f"{', '.join(held[0]) or 'none'}, {self._name(1)} holds {', '.join(held[1]) or 'none'}; "
                "capture both with the same --level"
            )
        missing = {n for n in wanted if n in held[0] or n in held[1]} - set(common)
        if missing:
            self.is_whole = not all(missing & asked_levels(capture) for capture in self._captures)  # else one lacks it
            self.notes.append(Why.LEVELS(tuple(sorted(missing)), tuple(common)))
        return common

    def _common(self, what: str, sides: list[list[int]]) -> list[int]:
        common = sorted(set(sides[0]) & set(sides[1]))
        if not common:
            raise TrueupError(
                f"the captures have no {what} in common: {self._name(0)} holds {_in_short(sides[0])}, "
                f"{self._name(1)} holds {_in_short(sides[1])}; capture the same {what} on both sides"
            )
        for n, side in enumerate(sides):
            if extra := sorted(set(side) - set(common)):
                self.is_whole = False
                self.notes.append(Why.ONLY_IN(what, _in_short(extra), self._name(n)))
        return common

    def finer(self) -> Reason:
        """Return how the gradients of weights and the optimizer come to be compared, where they were not."""
        if all("api" in recorded_levels(capture) for capture in self._captures):
            return Why.LEVEL_API()
        return Why.RECORD_API()

    def _precision(self) -> Precision:
        manifests = [next(iter(c.ranks.values()), {}) for c in self._captures]
        for capture in self._captures:
            self.notes += [Why.PROBLEM(capture.path.name, problem) for problem in capture.problems]
        if (given := policy_note(*(recorded_uses(c.ranks.values()) for c in self._captures))) is not None:
            self.notes.append(given)
        found = precision_of([m.get("environment", {}) for m in manifests], [m.get("devices", []) for m in manifests])
        if found.matmul or found.convolution:
            products = (("matrix products", found.matmul), ("convolutions", found.convolution))
            self.notes.append(Why.DECLARED(tuple(name for name, on in products if on)))
        return found

    def _name(self, side: int) -> str:
        return str(self._captures[side].path)
