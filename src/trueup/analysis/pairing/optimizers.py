"""Two optimizers side by side: the kind, the settings as they are, clipping, and what the frameworks define in other ways."""

from __future__ import annotations

from trueup.analysis.pairing.settings import Difference, neutral_settings, same
from trueup.foundation.frameworks.tables import Optimizer, optimizers_by_class
from trueup.foundation.frameworks.trees import OptimizerFacts


def compare_optimizers(baseline: OptimizerFacts, candidate: OptimizerFacts) -> list[Difference]:
    """Return what the two do in different ways."""
    frameworks = baseline.framework, candidate.framework
    rows = _row(baseline), _row(candidate)
    where = f"optimizer {baseline.classes[0]} against {candidate.classes[0]}"
    if rows[0] is None or rows[1] is None:
        unknown = [one.classes[0] for one, row in zip((baseline, candidate), rows, strict=True) if row is None]
        return [Difference(where, f"{' and '.join(unknown)} is in no table, so its settings were not compared", "", None, None)]
    if rows[0] is not rows[1]:
        return [Difference(where, "they are different algorithms", "", None, None)]
    row = rows[0]
    sides = [
        {**row.defaults, **neutral_settings(one.settings, row.own[one.framework])} for one in (baseline, candidate)
    ]
    found = [
        Difference(where, row.name, name, sides[0][name], sides[1][name], frameworks)
        for name in sides[0] if name in sides[1] and not same(sides[0][name], sides[1][name])
    ]  # fmt: skip
    if frameworks[0] != frameworks[1]:
        said = [row.differs, *(row.own[one].differs for one in frameworks)]
        found += [Difference(where, one, "", None, None) for one in said if one]
    for name in ("clipping", "schedule"):
        told = getattr(baseline, name), getattr(candidate, name)
        if told[0] != told[1]:
            words = [one or "none of its own" for one in told]
            found.append(Difference(where, row.name, name, words[0], words[1], frameworks))
    if baseline.groups != candidate.groups:
        sizes = len(baseline.groups) + 1, len(candidate.groups) + 1
        only = "only the first groups were compared"
        found.append(Difference(where, row.name, "groups of parameters", sizes[0], sizes[1], frameworks, only))
    return found


def _row(facts: OptimizerFacts) -> Optimizer | None:
    known = optimizers_by_class(facts.framework)
    return next((known[name] for name in facts.classes if name in known), None)
