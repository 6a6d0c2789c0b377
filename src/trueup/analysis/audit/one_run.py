"""What is odd in one run by itself, without a baseline: a sentence each.

``odd`` is wrong in nearly every training; what is right in many (`worth_a_look`) is said and fails no check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from trueup.analysis.audit.first_step import FirstStep, same_batches, undivided
from trueup.foundation.frameworks.trees import DTYPE, TIED, TRAINED, path
from trueup.foundation.settings import Setting, differing, held_by, list_of, modules_of, names_held, odd_switches
from trueup.foundation.store import Capture
from trueup.foundation.words.setting_sentence import setting_text, some
from trueup.foundation.words.wording import counted

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
