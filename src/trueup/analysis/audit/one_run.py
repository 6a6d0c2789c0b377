"""What is odd in one run by itself, without a baseline: a sentence each.

``odd`` is wrong in nearly every training; what is right in many (`worth_a_look`) is said and fails no check.

What the records of the first step tell of a training, where its manifest cannot: initial weights, batches, dtypes, draws.

Digests are compared, no tensor is read: a capture of one step and of detail ``digest`` is enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any

from trueup.analysis.audit.reading import calls, outermost, stream_of
from trueup.comparison.result.shown import Times, loss_factors
from trueup.foundation.facts.criteria import load
from trueup.foundation.frameworks.trees import DTYPE, TIED, TRAINED, path
from trueup.foundation.settings import ABSENT, Setting, differing, held_by, list_of, modules_of, names_held, odd_switches
from trueup.foundation.store import Capture
from trueup.foundation.words.setting_sentence import setting_text, some
from trueup.foundation.words.wording import counted, user_source

LIKE_RANK_0 = ("optimizer", "scaler", "module", "switch", "version")  # equal on all ranks
TWO_MODES = ("Dropout", "BatchNorm", "InstanceNorm")  # class name prefixes: training and evaluation differ
RANKLESS = ("RandomSampler", "SequentialSampler", "WeightedRandomSampler")  # of torch.utils.data
MOST = 3
"""Settings of two ranks that are named."""


def odd(capture: Capture, step: FirstStep) -> Iterator[str]:
    """Yield what is wrong in nearly every training."""
    manifest = next(iter(dict(sorted(capture.ranks.items())).values()), {})
    yield from _modes(manifest)
    yield from _left_out(manifest)
    yield from _switched(manifest)
    if _in_half(manifest, step) and not scales_loss(manifest):
        yield "the run computes in float16 without a scaler of the loss: small gradients become 0"
    ranks = sorted(capture.ranks.items())
    for rank, other in ranks[1:]:
        alike = [one for one in differing(ranks[0][1], other) if one.group in LIKE_RANK_0 and _matters(one)]
        if alike:
            sides = f"on rank {ranks[0][0]}", f"on rank {rank}"
            more = f"; and {counted(len(alike) - MOST, 'more setting')}" if len(alike) > MOST else ""
            yield f"ranks differ: {'; '.join(setting_text(one, sides) for one in alike[:MOST])}{more}"
            break
    pair, groups = same_batches(step), _groups(manifest)
    if pair is not None and groups <= 1:
        yield f"ranks {pair[0]} and {pair[1]} are given the same batch in the first step, and learn the same twice"


def worth_a_look(capture: Capture, step: FirstStep) -> Iterator[str]:
    """Yield what is right in many trainings, and the cause in some."""
    ranks = sorted(capture.ranks.items())
    manifest = ranks[0][1] if ranks else {}
    frozen = [name for name, trained in _parameters(manifest).items() if not trained]
    if frozen:
        yield f"{counted(len(frozen), 'parameter')} {'is' if len(frozen) == 1 else 'are'} frozen: {some(frozen)}"
    yield from filter(None, map(_uneven, list_of(held_by(manifest), "data")))
    if len(ranks) > 1 and _groups(manifest) <= 1 and same_batches(step) is None:
        yield from _shared(manifest, ranks[1][1])
    for rank, other in ranks[1:]:
        seeds = [one for one in differing(ranks[0][1], other) if one.group == "seed"]
        if seeds:
            text = setting_text(seeds[0], (f"on rank {ranks[0][0]}", f"on rank {rank}"))
            yield f"ranks have seeds of their own: {text}; weights that each rank draws differ, unless they are broadcast"
            break
    if undivided(step):
        n = f"{step.passes:,}"
        yield f"the model runs forward {n} times in a step, and no loss is divided by {n}: gradients are added up, and not averaged"
    if same_batches(step) is None:
        yield from _given_twice(ranks)
    pair, groups = same_batches(step), _groups(manifest)
    if pair is not None and groups > 1:
        yield f"ranks {pair[0]} and {pair[1]} are given the same batch in the first step, as ranks of one model are"


def _uneven(loader: Mapping[str, Any]) -> str:
    """Say of a loader that its last batch is smaller."""
    size, samples = loader.get("batch_size"), loader.get("samples")
    if not (isinstance(size, int) and isinstance(samples, int)) or loader.get("drop_last"):
        return ""
    last = samples % size if 0 < size < samples else 0
    return f"the last batch of {loader.get('class')} has {last:,} of {size:,} samples, for drop_last is False" if last else ""


def _shared(manifest: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Say of the loaders of two ranks that each draws from all samples: their samplers know no ranks."""
    for loader, there in zip(list_of(held_by(manifest), "data"), list_of(held_by(other), "data"), strict=False):
        samples, sampler = loader.get("samples"), loader.get("sampler")
        alone = samples == there.get("samples") and loader.get("batch_sampler") in (None, "BatchSampler")
        if alone and isinstance(samples, int) and sampler in RANKLESS:
            yield (
                f"each rank draws from {samples:,} samples by a {sampler}, which knows no ranks: where these are the whole data "
                "set, ranks are given the same samples in an epoch, and a DistributedSampler shares them out"
            )
            return


def _given_twice(ranks: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[str]:
    """Say which samples of the first step the two ranks share that share most. What one rank is given twice counts as no sample:
    it may be padding."""
    lists = {rank: list(map(str, found)) for rank, one in ranks if isinstance(found := held_by(one).get("samples"), list)}
    own = {rank: {text for text, times in Counter(found).items() if times == 1} for rank, found in lists.items()}
    shared = {(a, b): own[a] & own[b] for a, b in combinations(own, 2) if own[a] & own[b]}
    if shared:
        (a, b), texts = max(shared.items(), key=lambda pair: len(pair[1]))
        places = [str(lists[a].index(text) + 1) for text in lists[a] if text in texts]
        named = f"number {', '.join(places[:MOST])}{' and more' if len(places) > MOST else ''} of those of rank {a}"
        other = len(shared) - 1
        more = f"; {counted(other, 'more pair')} of ranks {'shares' if other == 1 else 'share'} some, too" if other else ""
        yield (
            f"ranks {a} and {b} share {len(texts):,} of the first {counted(len(lists[b]), 'sample')} that rank {b} is given "
            f"({named}){more}"
        )


def _matters(setting: Setting) -> bool:
    return setting.severity == "changes" or (setting.severity == "may" and setting.group in ("switch", "version"))


def _groups(manifest: Mapping[str, Any]) -> int:
    """Count the groups of ranks in which a run communicates; 0 where it does not say."""
    held = manifest.get("parallel")
    groups = held.get("groups") if isinstance(held, Mapping) else None
    return len(groups) if isinstance(groups, list) else 0


def _modes(manifest: Mapping[str, Any]) -> Iterable[str]:
    held = {scope: module for scope, module in modules_of(manifest).items() if "training" in module}
    idle = [s for s, module in held.items() if module["training"] is False and str(module.get("class", "")).startswith(TWO_MODES)]
    if idle and any(module["training"] is True for module in held.values()):
        what = f"{counted(len(idle), 'module')} evaluate{'s' if len(idle) == 1 else ''} while others train"
        yield f"{what}, the first: {idle[0]} ({held[idle[0]]['class']})"


def _parameters(manifest: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether each parameter of a run's modules is trained; one that is another's is left out."""
    found = {}
    for scope, module in modules_of(manifest).items():
        for name in [one.removesuffix(DTYPE) for one in module if one.endswith(DTYPE)]:
            if f"{name}{TIED}" not in module:
                found[path(scope, name)] = module.get(f"{name}{TRAINED}") is not False
    return found


def _left_out(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Name parameters that are to be trained and that no optimizer holds: by their names where all that it holds have one, for it
    may hold frozen ones; else by their number."""
    parameters = _parameters(manifest)
    trained = [name for name, is_trained in parameters.items() if is_trained]
    optimizers = list_of(held_by(manifest), "optimizers")
    counts = [group.get("parameters") for one in optimizers for group in list_of(one, "groups")]
    held = sum(count for count in counts if isinstance(count, int))
    known = {name for one in optimizers for group in names_held(one) for name in group}
    told = known <= parameters.keys() and len(known) == held
    names = [name for name in trained if name not in known] if known else []
    missing = len(names) if told else len(trained) - held
    if counts and None not in counts and missing > 0:
        which = f": {some(names)}" if len(names) == missing else ""
        verb = "is" if missing == 1 else "are"
        yield f"{missing:,} of {counted(len(trained), 'parameter')} with a gradient {verb} in no optimizer{which}"


def _switched(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Say which switches of the table of odd ones are on, where the devices are there that they are for."""
    environment, devices = manifest.get("environment"), manifest.get("devices")
    if not isinstance(environment, Mapping) or not isinstance(devices, list):
        return
    for row in odd_switches():
        held = environment.get(row["name"])
        if (
            held is not None
            and str(held) in row["values"].split()
            and any(str(one).startswith(tuple(row["devices"].split())) for one in devices)
        ):
            yield f"{row['name']} is {held}: {row['says']}"


def _in_half(manifest: Mapping[str, Any], step: FirstStep) -> bool:
    held = any(
        value == "float16" for module in modules_of(manifest).values() for name, value in module.items() if name.endswith(DTYPE)
    )
    return held or step.dtypes["float16"] > 0


def scales_loss(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a run scales its loss; a run without an optimizer trains nothing."""
    held = held_by(manifest)
    optimizers = [str(one.get("class", "")) for one in list_of(held, "optimizers")]
    scaled = any(one.get("enabled") is not False for one in list_of(held, "scalers"))
    return scaled or not optimizers or any("LossScale" in kind for kind in optimizers)


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
