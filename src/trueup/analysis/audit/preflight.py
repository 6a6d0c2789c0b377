"""Before a run is trusted: its settings, beside another run, beside required values, and by themselves. `preflight` reads
manifests (docs/format.md, ``settings``) and the digests of the first step: a capture of one step is enough, no tensor is read.

What is odd in one run without a baseline gets a sentence each. `odd` is wrong in nearly every training; what is right in many
(`worth_a_look`) is said and fails no check. Hyper-parameters are also named together where they came along with a port: a script
that was moved to more devices was given another batch, and with it a learning rate, clipping or a schedule, which change the
training whatever the devices do.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.audit.reading import calls, outermost, stream_of
from trueup.comparison.result.shown import Times, loss_factors
from trueup.foundation import toml
from trueup.foundation.facts.criteria import load
from trueup.foundation.frameworks.trees import DTYPE, TIED, TRAINED, path
from trueup.foundation.model import TrueupError
from trueup.foundation.settings import (
    ABSENT,
    GROUPS,
    SEVERITIES,
    Setting,
    aliases,
    differing,
    held_by,
    list_of,
    modules_of,
    names_held,
    odd_switches,
    seeds_of,
)
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.setup_sentence import BASELINE, CANDIDATE, setting_text, some, subject, value
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


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found."""

    baseline: str
    candidate: str
    settings: tuple[Setting, ...] = ()  # what differs between the runs, what changes numbers first
    broken: tuple[str, ...] = ()  # what must hold and does not, a sentence each
    odd: tuple[str, ...] = ()  # what is odd in the candidate by itself, a sentence each
    held: int = 0  # how many required values hold
    unread: tuple[str, ...] = ()  # why something could not be told, a sentence each
    came_along: str = ""  # hyper-parameters that differ between runs of a script that was ported
    looks: tuple[str, ...] = ()  # what is right in many trainings and the cause in some, a sentence each

    @property
    def changes(self) -> tuple[Setting, ...]:
        """The settings that differ and change numbers."""
        return tuple(one for one in self.settings if one.severity == "changes")

    @property
    def verdict(self) -> Literal["clear", "differs", "could not tell"]:
        """The word; a change of numbers or a broken rule outweighs what could not be read."""
        if self.changes or self.broken or self.odd:
            return "differs"
        return "could not tell" if self.unread else "clear"

    @property
    def exit_code(self) -> int:
        """0: nothing that changes numbers; 1: something does, or a required value does not hold; 2: could not tell."""
        return {"clear": 0, "differs": 1, "could not tell": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """What a tired engineer reads first."""
        may = sum(one.severity == "may" for one in self.settings)
        rest = f"; {counted(may, 'more setting')} may" if may else ""
        if self.changes:
            further = len(self.changes) - 1
            more = f", and {counted(further, 'more setting')} that change{'s' if further == 1 else ''} numbers" if further else ""
            return setting_text(self.changes[0]) + more
        if self.broken or self.odd:
            return (*self.broken, *self.odd)[0]
        if self.unread:
            return self.unread[0]
        holds = f"{counted(self.held, 'required value')} {'holds' if self.held == 1 else 'hold'}; " if self.held else ""
        if not self.baseline:
            return f"{holds}nothing is set in a way that is odd by itself"
        return f"{holds}no setting that changes numbers differs{rest}"


def preflight(
    baseline: str | Path | None, candidate: str | Path, *, require: str | Path | None = None, name: str | None = None
) -> Preflight:  # fmt: skip
    """Compare what two runs are set to, or look at one run alone.

    Args:
        baseline: capture of the trusted run; None: look at the candidate by itself.
        candidate: capture of the run that is to be trusted; one step is enough.
        require: a TOML file of values that must hold (docs/preflight.md).
        name: what the candidate is called, if not by its path.

    Raises:
        TrueupError: a capture or the file cannot be read.
    """
    first, second = None if baseline is None else open_capture(Path(baseline)), open_capture(Path(candidate))
    sides = [(capture, _first(capture)) for capture in (first, second) if capture is not None]
    called = str(second.path) if name is None else name
    unread = [
        f"{called if capture is second else capture.path} does not say what it was set to: no step of its training ended, or an "
        "older version recorded it"
        for capture, manifest in sides if not isinstance(manifest.get("settings"), Mapping)
    ]  # fmt: skip
    if first is not None and _first(first).get("framework") != _first(second).get("framework"):
        unread.append("the runs are of two frameworks, with names of their own for each setting: trueup align compares them")
    steps = [capture.steps[-1] for capture in (first, second) if capture is not None and capture.steps]
    begun, found = first_step(second), []
    if first is not None:
        found = differing(_first(first), _first(second), min(steps, default=None))
        if not unread:
            found += beginnings(first_step(first), begun, found)
            found.sort(key=lambda one: (SEVERITIES.index(one.severity), GROUPS.index(one.group)))
    holds, broken = (0, []) if require is None else _required(Path(require), _first(second))
    return Preflight(
        "" if first is None else str(first.path), called, tuple(found), tuple(broken),
        tuple(odd(second, begun)), holds, tuple(unread), "" if first is None else came_along(found, _first(first), _first(second)),
        tuple(worth_a_look(second, begun)),
    )  # fmt: skip


def _first(capture: Capture) -> Mapping[str, Any]:
    return next((manifest for _, manifest in sorted(capture.ranks.items())), {})


# Groups that a file of required values may name
Required = Literal["optimizer", "module", "data", "seed", "argument", "switch", "version"]


def _required(file: Path, manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return how many required values hold, and a sentence for each that does not."""
    table = toml.read(file, "The file of required values", "docs/preflight.md says what it holds")
    held = flat(manifest)
    try:
        groups = toml.checked(table, dict[Required, dict[str, Any]])
    except ValueError as error:
        raise TrueupError(
            f"The file of required values {file} cannot be read: {error}\n"
            "  expected: tables optimizer, module, data, seed, argument, switch or version of names and values\n"
            "  next:     docs/preflight.md has an example"
        ) from None
    said = [_broken(group, name, must, held) for group, wanted in groups.items() for name, must in _dotted(wanted)]
    return said.count(""), [one for one in said if one]


def _broken(group: str, name: str, must: Any, held: Mapping[tuple[str, str], list[Any]]) -> str:
    """Say that a required value does not hold; empty where it does."""
    values = held.get((group, name), [])
    wrong = [one for one in values if one != must]
    if not values:
        return f"{group} {name} must be {value(must)}, and is {ABSENT}"
    where = f" in {counted(len(wrong), 'place')}" if len(values) > 1 else ""
    return f"{group} {name} must be {value(must)}, and is {value(wrong[0])}{where}" if wrong else ""


def _dotted(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; TOML makes a table of a name whose dots are not quoted."""
    for name, must in table.items():
        if isinstance(must, dict):
            yield from ((f"{name}.{rest}", one) for rest, one in _dotted(must))
        else:
            yield name, must


def flat(manifest: Mapping[str, Any]) -> dict[tuple[str, str], list[Any]]:
    """Return values by group and name: ``AdamW.lr``, ``LayerNorm.eps`` and ``encoder.norm.eps``, ``torch``, ``batch_size``."""
    held = held_by(manifest)
    found: dict[tuple[str, str], list[Any]] = {}

    def put(group: str, prefix: str, values: Any) -> None:
        for name, one in (values if isinstance(values, Mapping) else {}).items():
            found.setdefault((group, f"{prefix}.{name}" if prefix else str(name)), []).append(one)

    for optimizer in list_of(held, "optimizers"):
        for group in list_of(optimizer, "groups"):
            put("optimizer", str(optimizer.get("class", "")), group)
    for scope, own in modules_of(manifest).items():
        module = {**{name.removesuffix(DTYPE): True for name in own if name.endswith(DTYPE)}, **own}  # parameters that it has
        for prefix in dict.fromkeys((str(module.get("class", "")), scope)):
            put("module", prefix, module)
    for loader in list_of(held, "data"):
        put("data", str(loader.get("class", "")), loader)
    for name, values in (
        ("seed", seeds_of(manifest)), ("argument", held.get("arguments")), ("switch", manifest.get("environment")),
        ("version", manifest.get("versions")),
    ):  # fmt: skip
        put(name, "", values)
    return found


BATCH = ("samples in a step", "global_batch_size", "batch_size")  # the surest first
RATE = "lr"
MOVED = ("devices", "world_size", "framework")
NEAR = 0.01
"""How far a learning rate may be from a rule's, relative to it."""


def came_along(settings: Sequence[Setting], baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """Say which hyper-parameters differ between runs on other devices, or on another number of them; empty where none does."""
    if all(baseline.get(name) == candidate.get(name) for name in MOVED) and not _code_differs(settings):
        return ""
    found = {name: one for one in reversed(settings) if (name := _hyper(one))}
    told = next((one for one in settings if one.group == "argument" and _hyper(one) == RATE), None)
    if told is not None and "schedule" in found:  # what holds in the first step is what a warm-up begins with
        found[RATE] = told
    batch = next((_times(found[name]) for name in BATCH if name in found), None)
    said = [_said(name, one, batch) for name, one in sorted(found.items(), key=lambda pair: _place(pair[0]))]
    return f"hyper-parameters came along with the port: {'; '.join(said)}" if said else ""


def _code_differs(settings: Sequence[Setting]) -> bool:
    return any(one.group == "code" for one in settings)


def _place(name: str) -> int:
    return (*BATCH, RATE).index(name) if name in (*BATCH, RATE) else len(BATCH) + 1


def _hyper(setting: Setting) -> str:
    """Return the name under which a setting is a hyper-parameter, empty where it is none."""
    if setting.group == "optimizer" and setting.severity == "changes" and setting.name not in ("parameters", "optimizers"):
        return setting.name
    if setting.group == "data" and setting.name in BATCH:
        return setting.name
    if setting.group == "argument" and (name := aliases().get(setting.name.rpartition(".")[2])):
        return "" if name == "seed" else name
    return ""


def _times(setting: Setting) -> float | None:
    sides = setting.baseline, setting.candidate
    if all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in sides):
        return float(sides[1] / sides[0])
    return None


def _said(name: str, setting: Setting, batch: float | None) -> str:
    if ABSENT in (setting.baseline, setting.candidate):
        side, held = (CANDIDATE, setting.candidate) if setting.baseline == ABSENT else (BASELINE, setting.baseline)
        return f"{subject(setting)} {side} alone ({value(held)})"
    times, rule = _times(setting), ""
    if name == RATE and batch is not None and times is not None and batch != 1:
        rules = [(said, factor) for said, factor in _rules(batch) if abs(times / factor - 1) <= NEAR]
        linear = setting.baseline * batch
        rule = f", {rules[0][0]}" if rules else f"; in proportion to the batch it would be {linear:.3g}"
    often = f" ({times:.3g} times{rule})" if times is not None and times >= 1 else ""
    often = often or (f" (1/{1 / times:.3g} of it{rule})" if times else "")
    return f"{subject(setting)} {value(setting.baseline)} to {value(setting.candidate)}{often}"


def _rules(batch: float) -> Iterator[tuple[str, float]]:
    """Yield by what a learning rate follows the batch: Goyal et al. 2017; Krizhevsky 2014, and for Adam Malladi et al. 2022."""
    yield "in proportion to the batch", batch
    yield "by the root of the batch", math.sqrt(batch)
