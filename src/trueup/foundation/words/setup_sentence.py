"""What there is to say of how two runs are set up: a setting that differs, ``AdamW lr: 0.001 in the baseline, 0.0011 in the
candidate``; ranks that do not hold what they should, and results off by the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from trueup.foundation.model import SetOtherwise
from trueup.foundation.settings import ABSENT, GROUP, OF_PARAMETERS, Setting
from trueup.foundation.words.wording import ELLIPSIS, counted, one_line, sci, shorten

BASELINE, CANDIDATE = "in the baseline", "in the candidate"
NAMED = 3  # modules, parameters or operators that are named of many
WIDTH = 60

TENSORS_NAMED = 3

TWO_LAYOUTS = "because the layouts differ: {}; compare runs of one layout, or record all ranks of both"
PUT_TOGETHER = "the layouts differ ({}): the ranks of each run were put together before they were compared"
IN_ONE_ORDER = "; samples came in another order, and were put in one"
BY_STATISTICS = (
    "because pieces of tensors on several ranks were put together by their statistics alone, which cannot say whether "
    "the inputs of {} agree: record both runs with --detail tensor"
)
SOME_RANKS = "{} made by some ranks alone were not compared"
OF_BASELINE = "in the baseline, too: {}"

LIES_UNKNOWN = "because nothing says how weights lie that ranks hold pieces of"
GRADIENTS_UNKNOWN = (
    "because the gradients that the optimizer is given could not be held against each other, and its own calls do not show which "
    "weight each is for: record both runs with --detail tensor"
)


def setting_text(setting: Setting, sides: tuple[str, str] = (BASELINE, CANDIDATE)) -> str:
    """Say what is set differently, both values, and where; ``sides`` are the words for the two."""
    since = "" if setting.step is None else f" (from step {setting.step})"
    first, second = values(setting)
    if setting.name.endswith(OF_PARAMETERS):
        return f"{subject(setting)} is {first} {sides[0]}, {second} {sides[1]}"
    return f"{subject(setting)}: {first} {sides[0]}, {second} {sides[1]}{since}"


def values(setting: Setting) -> tuple[str, str]:
    """Write both values of a setting."""
    write = partial(_state, setting) if setting.name.endswith(OF_PARAMETERS) else value
    return write(setting.baseline), write(setting.candidate)


def _state(setting: Setting, held: Any) -> str:
    """Say what a parameter is: trained or frozen, its own or another one."""
    if setting.name.endswith("requires_grad"):
        return "absent" if held == ABSENT else "frozen" if held is False else "trained"
    return "its own" if held == ABSENT else f"tied to {value(held)}"


def subject(setting: Setting) -> str:
    """Say what is set: ``AdamW lr``, ``eps of 3 LayerNorms (1.norm, 2.norm, 3.norm)``, ``seed of torch``."""
    name, kind = one_line(setting.name), one_line(setting.kind)
    if setting.name.endswith(OF_PARAMETERS):
        name = name.rpartition(".")[0]
    if setting.group == "optimizer" and setting.places and not setting.places[0].startswith(GROUP):
        count = len(setting.places)
        return f"{kind} {name} of {f'{count:,} parameters (' if count > 1 else ''}{some(setting.places)}{')' * (count > 1)}"
    if setting.group == "module" and setting.places:
        shown = some([place or "the model" for place in setting.places])
        if len(setting.places) == 1:
            return f"{name} of {shown}" + (f" ({kind})" if kind != shown else "")  # a loss is called by its class
        return f"{name} of {len(setting.places):,} {kind}s ({shown})"
    if setting.group == "optimizer" and name == "class":
        return "optimizer"
    if (setting.group, name) == ("data", "loaders"):
        return "data loaders"
    if setting.group in ("optimizer", "data", "scaler"):
        return f"{kind} {name}".strip()
    if setting.group == "seed":
        return f"seed of {name}"
    if setting.group == "random" and name in ("python", "numpy"):
        return f"state of {name}'s random generator after the first step"
    if setting.group == "code":
        return "commit of the script's repository" if name == "commit" else f"code of {name}"
    if setting.group == "parallel":
        return {"ranks": "number of ranks", "groups": "groups of ranks"}.get(name, name)
    return f"version of {name}" if setting.group == "version" else name


def some(names: Sequence[str]) -> str:
    """Name the first of some."""
    return ", ".join(map(one_line, names[:NAMED])) + (ELLIPSIS if len(names) > NAMED else "")


def settings_text(settings: Sequence[Setting]) -> str:
    """Say several in one line; what two optimizers of a class have alike once."""
    return "; ".join(dict.fromkeys(map(setting_text, settings)))


def set_otherwise(settings: Sequence[Setting]) -> tuple[SetOtherwise, ...]:
    """Say of each setting what it is and both values, as rows of a table."""
    since = ("" if one.step is None else f" (from step {one.step})" for one in settings)
    rows = (SetOtherwise(subject(one) + later, *values(one), one.severity) for one, later in zip(settings, since, strict=True))
    return tuple(dict.fromkeys(rows))


def value(held: Any) -> str:
    """Write a value as a script would."""
    return shorten(one_line(str(held)), WIDTH)


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 1``, ``ranks 0, 1, 2…``."""
    shown = ", ".join(map(str, ranks[:8])) + ("…" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def not_equal(names: Sequence[str], where: str, ranks: Sequence[int], world: int, apart: float) -> str:
    """Say that replicas differ: weights, or another slot; ``ranks`` are the odd ones of ``world``, or all."""
    who = (
        f"{ranks_text(ranks)} is odd, the other {world - 1} agree"
        if len(ranks) == 1 and world > 2
        else f"{ranks_text(ranks)} differ"
    )
    return (
        f"{_named(names)} of {one_line(where)} must be the same on all ranks, and {who}{_off(apart)}: "
        "replicas drifted apart, or a reduction is missing"
    )


def gradients(names: Sequence[str], ranks: Sequence[int], apart: float) -> str:
    """Say that gradients differ between ranks where an optimizer reads them."""
    one = len(names) == 1
    what, reads, was = ("the gradient", "differs", "it was") if one else ("the gradients", "differ", "they were")
    return f"{what} of {_named(names)} {reads} on {ranks_text(ranks)} when the optimizer runs{_off(apart)}: {was} not reduced"


def gradients_off(names: Sequence[str], ratio: float, told: str) -> str:
    """Say that the gradients of weights, of all of them together where none is named, are a multiple; ``told``: of what."""
    of = f" of {_named(names)}" if names else ""
    many = f"the gradient{'' if len(names) == 1 else 's'}{of} that the optimizer is given {'is' if len(names) == 1 else 'are'} "
    return many + (told or f"off by a factor of {ratio:.3f}")


def gradients_differ(names: Sequence[str], distance: float) -> str:
    """Say that gradients differ that an optimizer is given whose own calls were not compared."""
    return (
        f"because the gradients of {_named(names)} that the optimizer is given differ{_off(distance)}, and nobody knows whether "
        "they are those of these weights: its calls do not show which weight each is for"
    )


def stays(slot: str, where: str, steps: Sequence[int]) -> str:
    """Say that a weight was not updated between two steps."""
    before, after = steps
    return f"{slot} of {where} is in step {after} what it was in step {before}, and the baseline's moved: it was not updated"


def half_reduced(slot: str, where: str, size: int) -> str:
    """Say that gradients of ranks add up to no whole."""
    return (
        f"{one_line(slot)} of {one_line(where)} differs on {size} ranks, and the sum is not the whole gradient: a part of it was "
        "reduced, another was not; a reduction is missing in the backward of what runs inside"
    )


def fits_nothing(slot: str, where: str, ranks: Sequence[int]) -> str:
    """Say that values of ranks make no whole."""
    return (
        f"{one_line(slot)} of {one_line(where)} is not the same on {ranks_text(ranks)}, and is neither a piece of the whole "
        "nor a term of a sum that is: a reduction is missing, or one rank computes something else"
    )


def _off(apart: float) -> str:
    return f" (rel. L2 {sci(apart)})" if apart == apart else ""


def undeclared(slot: str, where: str, axis: str, count: int, modules: int, run: str) -> str:
    """Say of how many slots of a run, in so many modules, nothing tells how the ranks' pieces lie, and how to declare it."""
    return (
        f"nothing says how {counted(count, 'slot')} of {counted(modules, 'module')} lie along {axis} in the {run}, the first "
        f"{one_line(slot)} of {one_line(where)}: say it in a file of lines and compare with --shards (docs/layouts.md), or record "
        "both runs with --detail tensor, whose bytes may tell"
    )


def unreduced(given: str, slot: str, where: str, ranks: Sequence[int]) -> str:
    """Say that a partial sum is read as the whole."""
    return (
        f"{one_line(given)} of {where} is a partial sum on {ranks_text(ranks)}, and is read as if it were the whole "
        f"({one_line(slot)} fits no layout): a reduction is missing before it"
    )


def same_masks(where: str, ranks: Sequence[int]) -> str:
    """Say that ranks drew the same random numbers that must differ."""
    return f"{ranks_text(ranks)} drew the same mask in {where}, on different data: their generators were seeded alike"


def same_samples(slot: str, where: str, ranks: Sequence[int], some: str) -> str:
    """Say that ranks are given some samples of the batch again and again, and others not at all."""
    which = f"{ranks_text(ranks)} are given" if len(ranks) > 1 else f"{ranks_text(ranks)} is given"
    return f"{which} some samples several times, and others not at all: {one_line(slot)} of {one_line(where)} holds {some}"


def same_places(slot: str, where: str, ranks: Sequence[int]) -> str:
    """Say that ranks count places of their own pieces as if each were the whole sequence."""
    return (
        f"{one_line(slot)} of {one_line(where)} counts from 0 on {ranks_text(ranks)} alike, and each holds another piece of the "
        "sequence: their places are not those of the whole"
    )


def other_order(slot: str, where: str, order: Sequence[int]) -> str:
    """Say that shards lie in another order than in the other run."""
    shown = ", ".join(map(str, order))
    return (
        f"{one_line(slot)} of {where} is cut as in the baseline, and its pieces are swapped: rank by rank they are pieces {shown}"
    )


def held_twice(slot: str, where: str, order: Sequence[int]) -> str:
    """Say that ranks hold the same shard, which each should hold its own of."""
    shown = ", ".join(map(str, order))
    return f"{one_line(slot)} of {where} is cut as in the baseline, and a piece is held twice: rank by rank they are pieces {shown}"


def biases(where: str, size: int) -> str:
    """Say that a bias is added to each term of a sum."""
    return f"the bias of {one_line(where)} is added on each of {size} ranks before their sum is taken: it counts {size} times"


def unsummed(op: str, where: str, size: int) -> str:
    """Say that a call is given terms of a sum of gradients, and gives on a term as if it were the sum."""
    return (
        f"{one_line(op)} of {one_line(where)} is given a term of a sum on each of {size} ranks, and what it makes is no piece of "
        "the sum: a reduction is missing in the backward"
    )


def not_passed_on(slot: str, where: str, given: str, size: int) -> str:
    """Say that a gradient that is a term of a sum becomes part of one that is the whole."""
    return (
        f"{one_line(slot)} of {one_line(where)} is a term of a sum on {size} ranks, and {one_line(given)} is given a gradient that "
        f"is neither such a term nor the whole: a reduction is missing in the backward of {one_line(where)}"
    )


def multiple(ratio: float, size: int, axis: str) -> str:
    """Say that a result is off by the number of ranks along an axis, ``2.000 = 2 ranks``."""
    shown = f"{ratio:.3f} = {'' if ratio > 1 else '1/'}{size}"
    return f"off by exactly {shown}, the number of {axis}: {'added up or multiplied' if ratio > 1 else 'divided'} once too often"


def one_micro_batch(names: Sequence[str], which: int, count: int) -> str:
    """Say that an optimizer is given gradients of one micro-batch in place of those of all; ``which`` counts from 1."""
    what, are, others = ("gradient", "is that", "that") if len(names) == 1 else ("gradients", "are those", "those")
    return (
        f"the {what} of {_named(names)} that the optimizer is given {are} of micro-batch {which} of {count} alone: {others} of the "
        "others are lost, as where gradients are set to zero between micro-batches"
    )


def scaled_apart(factors: Sequence[float]) -> str:
    """Say by which factors the gradients are off that ranks give the optimizer, one after the other."""
    told = ", ".join(f"{one:.3f}" for one in factors[:4]) + (" …" if len(factors) > 4 else "")
    return (
        f"the gradients that the optimizer is given are off by another factor on each rank, in their order {told}: each scales its "
        "piece by itself, as where it clips by the norm of that piece alone"
    )


def not_gone_through(rank: int, which: Sequence[int], count: int) -> str:
    """Say that a stage of a pipeline makes no gradients of some of its micro-batches; ``which`` count from 1."""
    batches, its = ("micro-batch", "its") if len(which) == 1 else ("micro-batches", "their")
    return (
        f"rank {rank} does not go backward through {batches} {', '.join(map(str, which))} of {count}, whose gradient the next "
        f"stage sends: {its} gradients are missing in what the optimizer is given"
    )


def travels(dtype: str, ranks: int, where: str, makes: float) -> str:
    """Say of sums over ranks that their terms travel in a narrower dtype than in the other run, and what that makes."""
    place = f" in {one_line(where)}" if where else ""
    return (
        f"terms of sums over {ranks} ranks travel in {dtype}{place} in the candidate alone, which makes a relative error of about "
        f"{sci(makes)}: reduce in the dtype of the result, or in {dtype} in both runs"
    )


def added_otherwise(where: str, times: int, kind: str, others: int, usual: int) -> str:
    """Say of a module that it adds up over its ranks more or less often in a step than others of its class."""
    return (
        f"{one_line(where)} adds up over its ranks {counted(times, 'time')} in a step, and {others} other modules of its class "
        f"({one_line(kind)}) {counted(usual, 'time')} each: a reduction is {'missing' if times < usual else 'made too often'}"
    )


def over_pieces(what: str, ranks: Sequence[int], same: Sequence[int]) -> str:
    """Say that a sum over ranks adds up different pieces of a gradient."""
    return (
        f"the gradient of {one_line(what)} is added up over {ranks_text(ranks)}, which hold different pieces of it: add it up over "
        + (f"{ranks_text(same)}, which hold the same one" if len(same) > 1 else "no ranks: each holds another one")
    )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:TENSORS_NAMED])
    return shown if len(names) <= TENSORS_NAMED else f"{counted(len(names), 'tensor')} ({shown}…)"
