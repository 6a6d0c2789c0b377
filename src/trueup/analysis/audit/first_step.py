"""What the records of the first step tell of a training, where its manifest cannot: initial weights, batches, dtypes, draws.

Digests are compared, no tensor is read: a capture of one step and of detail ``digest`` is enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from trueup.analysis.audit.reading import calls, outermost, stream_of
from trueup.comparison.result.shown import Times, loss_factors
from trueup.foundation.facts.criteria import load
from trueup.foundation.frameworks.trees import path
from trueup.foundation.settings import ABSENT, Setting
from trueup.foundation.store import Capture
from trueup.foundation.words.wording import user_source

MOST_RANKS = 64
"""Ranks whose first step is read."""
SHORT = 8
"""Characters of a digest that are shown."""
PARAM, INPUT = "param.", "input."


@dataclass(frozen=True, slots=True)
class Draw:
    """A call that draws random numbers."""

    op: str
    scope: str
    shape: str  # of what it draws
    line: str = ""  # of the user's code

    @property
    def text(self) -> str:
        """Say what is drawn, and where: ``aten::rand (4, 8) in net.noise, train.py:30``."""
        line = self.line.rpartition(" in ")[0].rpartition("/")[2]
        return f"{self.op} {self.shape}{f' in {self.scope}' if self.scope else ''}{f', {line}' if line else ''}"


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a run begins with; empty where the capture holds no calls of modules."""

    weights: dict[str, str] = field(default_factory=dict)  # digest of each parameter before the first update, rank 0
    batches: dict[int, list[str]] = field(default_factory=dict)  # by rank: digests of what its models are given, in order
    samples: int = 0  # length of the first axis of what models are given, all micro-batches and ranks of the step
    passes: int = 0  # how often the model runs forward in a step, rank 0
    dtypes: Counter[str] = field(default_factory=Counter)  # what modules return, rank 0
    draws: dict[str, tuple[Draw, ...]] = field(default_factory=dict)  # by level: what draws random numbers, in order, rank 0
    factors: tuple[Times, ...] = ()  # by which numbers the loss is multiplied or divided before it goes backward, rank 0
    levels: tuple[str, ...] = ()
    devices: frozenset[str] = frozenset()  # kinds of them: each has operators of its own that draw


def first_step(capture: Capture) -> FirstStep:
    """Read the first step of a capture."""
    if not capture.steps or capture.steps[0] != 0 or "module" not in capture.levels:
        return FirstStep(levels=tuple(sorted(capture.levels)))
    weights: dict[str, str] = {}
    batches: dict[int, list[str]] = {}
    samples, passes, dtypes = 0, 0, Counter[str]()
    ranks = sorted(capture.ranks)[:MOST_RANKS]
    for rank in ranks:
        modules = calls(capture, rank, 0, lambda _, level: level == "module", ("digest", "shape"), levels=("module",))
        modules = [one for one in modules if one.phase == "forward"]
        models = [one for one in outermost(modules) if any(one.scope == "" or inner.scope for inner in modules)]
        given = [rows for one in models if (rows := [one.slots[name] for name in one.slots if name.startswith(INPUT)])]
        known = [rows for rows in given if all(row["digest"] is not None for row in rows)]  # a GPU takes statistics, and no digests
        batches[rank] = [" ".join(str(row["digest"]) for row in rows) for rows in known]
        samples += sum(_length(rows[0]["shape"]) for rows in given)
        if rank == ranks[0]:
            passes = len(given)
            dtypes.update(str(row["dtype"]) for one in modules for row in one.made)
            for one in modules:
                for name, row in one.slots.items():
                    if name.startswith(PARAM) and row["digest"] is not None:
                        weights.setdefault(path(one.scope, name.removeprefix(PARAM)), str(row["digest"]))
    drawing = [level for level in ("aten", "api") if level in capture.levels] if ranks else []
    draws: dict[str, tuple[Draw, ...]] = {level: tuple(_drawing(capture, ranks[0], level)) for level in drawing}
    factors = tuple(sorted(loss_factors(stream_of(capture, ranks[0], 0)))) if ranks else ()
    devices = frozenset(str(one).partition(":")[0] for rank in capture.ranks.values() for one in rank.get("devices", ()))
    return FirstStep(weights, batches, samples, passes, dtypes, draws, factors, tuple(sorted(capture.levels)), devices)


def _drawing(capture: Capture, rank: int, level: str) -> Iterator[Draw]:
    rows, sites = load("default"), capture.sites(rank)
    for one in calls(capture, rank, 0, lambda op, of: rows.row(op, of, "forward").random, ("shape", "site"), (level,)):
        frames = next((sites[row["site"]][0] for row in one.slots.values() if row["site"] in sites), ())
        shape = next((str(row["shape"]) for row in one.made), "")
        yield Draw(one.op, one.scope, f"({shape.strip('[]()')})", user_source(frames[0], frames) if frames else "")


def _length(shape: Any) -> int:
    """Return the length of the first axis of a shape, which captures write as a list or a text."""
    found = re.findall(r"\d+", str(shape))
    return int(found[0]) if found else 0


def beginnings(baseline: FirstStep, candidate: FirstStep, known: Sequence[Setting] = ()) -> Iterator[Setting]:
    """Yield what two first steps begin with and do otherwise, as settings; not what follows from settings that are ``known``: from
    another seed other weights and batches, from another loader other batches."""
    groups = {one.group for one in known if one.severity == "changes"}
    both = [name for name in baseline.weights if name in candidate.weights]
    other = tuple(name for name in both if baseline.weights[name] != candidate.weights[name])
    if other and "seed" not in groups:
        digests = baseline.weights[other[0]][:SHORT], candidate.weights[other[0]][:SHORT]
        yield Setting("module", "parameter", "initial weights", *digests, "changes", other)
    sides = baseline.batches, candidate.batches
    for rank in sorted(sides[0].keys() & sides[1].keys()):
        pair = [side[rank][0] for side in sides if side[rank]]
        if len(pair) == 2 and pair[0] != pair[1] and groups.isdisjoint(("seed", "data")):
            yield Setting("data", "", "digest of the first batch", pair[0][:SHORT], pair[1][:SHORT], "changes")
            break
    for name, first, second in (
        ("samples in a step", baseline.samples, candidate.samples), ("forward passes in a step", baseline.passes, candidate.passes),
    ):  # fmt: skip
        if first and second and first != second:
            yield Setting("data", "", name, first, second, "changes")
    if baseline.dtypes and candidate.dtypes and set(baseline.dtypes) != set(candidate.dtypes):
        yield Setting("module", "", "dtypes that modules return", _counts(baseline), _counts(candidate), "changes")
    if baseline.factors != candidate.factors and baseline.levels == candidate.levels:
        yield Setting("data", "", "loss is scaled", _factors(baseline), _factors(candidate), "changes")
    finest = [next(iter(side.draws), "") for side in (baseline, candidate)]
    level = "api" if baseline.devices != candidate.devices or finest[0] != finest[1] else finest[0]
    if level in baseline.draws and level in candidate.draws:
        yield from _draws(baseline.draws[level], candidate.draws[level], sized=baseline.samples == candidate.samples)


def _draws(baseline: Sequence[Draw], candidate: Sequence[Draw], *, sized: bool) -> Iterator[Setting]:
    """Yield the first draw in which two runs differ, and what is drawn more often; ``sized``: what is drawn has to be as large."""
    lists = [[(one.op, one.scope, one.shape if sized else "") for one in side] for side in (baseline, candidate)]
    at = next((n for n, pair in enumerate(zip_longest(*lists)) if pair[0] != pair[1]), None)
    if at is not None:
        said = [side[at].text if at < len(side) else ABSENT for side in (baseline, candidate)]
        yield Setting("random", "", "first draw that differs", said[0], said[1], "changes")
    counts = [Counter((one.op, one.scope) for one in side) for side in (baseline, candidate)]
    for op, scope in dict.fromkeys((*counts[0], *counts[1])):
        times = [side[op, scope] for side in counts]
        if times[0] != times[1]:
            said = [f"drawn {n} times" if n > 1 else "drawn once" if n else ABSENT for n in times]
            yield Setting("random", "", f"{op}{f' in {scope}' if scope else ''}", said[0], said[1], "changes")


def _factors(step: FirstStep) -> str:
    return ", ".join(f"{done} by {number:g}" for done, number in step.factors) or ABSENT


def undivided(step: FirstStep) -> bool:
    """Tell whether gradients of several forward passes are added up whose loss is divided by no number of them."""
    return step.passes > 1 and not step.factors and not {"api", "aten"}.isdisjoint(step.levels)


def _counts(step: FirstStep) -> str:
    return ", ".join(f"{dtype} ({n})" for dtype, n in step.dtypes.most_common())


def same_batches(step: FirstStep) -> tuple[int, int] | None:
    """Return two ranks that are given the same batch in the first step; None where there are none such."""
    seen: dict[str, int] = {}
    for rank, digests in sorted(step.batches.items()):
        for digest in digests[:1]:
            if digest in seen:
                return seen[digest], rank
            seen[digest] = rank
    return None
