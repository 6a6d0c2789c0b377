"""The calls of an optimizer by the weight that each updates, where ranks step other weights: stages of a pipeline, experts, ZeRO 1.

An optimizer goes through its weights one after the other, and makes the same calls for each. So of an operator that it calls ``m``
times a weight the ``k``-th call updates the weight ``k // m``; the shapes of its results say whether that is so. Where it is not
(flat buffers, kernels for many weights at once) nobody knows, and these calls are left out of both runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trueup.comparison.layout.calls import Call, Calls, Key, plain
from trueup.foundation.frameworks.trees import DTYPE, TIED, path
from trueup.foundation.settings import held_by, list_of, modules_of, names_held

PADDING = 2
"""Elements a rank by which flat buffers are longer than what they hold (DeepSpeed: nccl_start_alignment_factor)."""

STEPPING = ("torch.optim.", "torch.distributed.optim.")
"""How the names of optimizers' steps begin."""


def is_update(key: Key) -> bool:
    """Tell whether a call is one of those that an optimizer makes for its weights."""
    return key[:2] == ("optimizer", "api") and not key[3].startswith(STEPPING)


def updates_in(calls: Calls, weights: int) -> list[Call]:
    """Return the calls that an optimizer makes for its weights, in order: those after the last of which there is not one a weight,
    which clips gradients."""
    updates = [call for key, call in calls.kept.items() if is_update(key)]
    often = Counter(call.key[3] for call in updates)
    alone = max((n for n, call in enumerate(updates) if often[call.key[3]] % max(1, weights)), default=-1)
    return updates[alone + 1 :]


def weights_of(calls: Calls, manifest: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...] | None:
    """Return the names of the weights that a rank's optimizer updates in a step, in order; None where its calls do not show it."""
    steps = [call for key, call in calls.kept.items() if key[0] == "optimizer" and key[3].startswith(STEPPING[0])]
    told = {call.key[1]: call for call in steps}.get("api")
    if told is not None:
        names = [name.removeprefix("input.").removesuffix(".grad") for name in told.rows if name.endswith(".grad")]
    else:
        names = [name for one in list_of(held_by(manifest), "optimizers") for group in names_held(one) for name in group]
    if not any(map(is_update, calls.kept)):
        return ()
    if not any(name in shapes for name in names):  # copies of the weights in a wider dtype
        names = list(order_of(manifest, {name: math.prod(shape) for name, shape in shapes.items()}))
    updates = updates_in(calls, len(names))
    if not updates or any(name not in shapes for name in names) or placed(calls, updates, names, shapes) is None:
        return None
    return tuple(names)


UNNAMED = re.compile(r"(?:input|output)\.group\d+\.\d+(?:\.grad)?")
"""Names of what an optimizer steps that is no weight of a module."""


def flat_in(calls: Calls, ranks: int, manifest: Mapping[str, Any], other: Mapping[str, int]) -> frozenset[str]:
    """Return the slots of an optimizer's step that are flat pieces of the model's weights.

    Of each weight one (ZeRO 3), or of all of them together (ZeRO 1 and 2), as their lengths on all ranks say, padding aside.
    ``other``: how many elements weights have that are let go of in this step."""
    steps = [call for key, call in calls.kept.items() if key[0] == "optimizer" and key[1] == "api" and key[3].startswith(STEPPING)]
    held = {
        name: shape[0] * ranks
        for call in steps for name, at in call.rows.items()
        if UNNAMED.fullmatch(name) and len(shape := calls.rows[at]["shape"] or []) == 1
    }  # fmt: skip
    tied = tied_in(manifest)
    weights = {name: math.prod(shape) or other.get(name, 0) for name, shape in shapes_of(calls).items() if name not in tied}
    each = all(any(0 <= length - size < PADDING * ranks for size in weights.values()) for length in held.values())
    together = 0 <= sum(held.values()) - sum(weights.values()) < PADDING * ranks * max(1, len(held))
    return frozenset(held) if held and weights and (each or together) else frozenset()


def order_of(manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the weights in the order in which the model has them, each once."""
    tied = tied_in(manifest)
    named = [(scope, name) for scope, held in modules_of(manifest).items() for name in held if name.endswith(DTYPE)]
    known = [plain(path(scope, name.removesuffix(DTYPE))) for scope, name in named]
    return {name: sizes[name] for name in known if name in sizes and name not in tied}


def updated_in(calls: Calls, names: Sequence[str] | None, order: Mapping[str, int] | tuple[()] | None) -> dict[Key, str]:
    """Return the weight that each call of an optimizer updates; ``calls`` as `by_weight` numbered them, where ``order`` says so."""
    if order:
        numbers = {number: name for name, number in reversed(list(order.items()))}
        return {key: numbers[number] for key, (_, number) in calls.updates.items()}
    updates = updates_in(calls, len(names or ()))
    whose = None if order is None or names is None else placed(calls, updates, names, None)
    return {} if whose is None else {key: name for key, (name, _) in whose.items()}


def shapes_of(calls: Calls) -> dict[str, tuple[int, ...]]:
    """Return the shape that a rank holds of each weight."""
    found = {}
    for key, call in calls.kept.items():
        if key[:2] == ("forward", "module"):
            for name, at in call.rows.items():
                if name.startswith("param.") and calls.rows[at]["shape"] is not None:
                    found[path(key[2], name.removeprefix("param."))] = tuple(calls.rows[at]["shape"])
    return found


def tied_in(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return weights that are another one, by name, each with that one's."""
    modules = modules_of(manifest)
    root = next(iter(modules), "")
    prefix = f"{root}." if root and all(name == root or name.startswith(f"{root}.") for name in modules) else ""
    return {
        plain(path(scope, name.removesuffix(TIED)).removeprefix(prefix)): plain(str(other).removeprefix(prefix))
        for scope, module in modules.items()
        for name, other in module.items()
        if name.endswith(TIED)
    }


def by_weight(calls: Calls, names: Sequence[str] | None, order: Mapping[str, int] | None) -> Calls:
    """Return the calls with those of the optimizer numbered by the weight that each updates; ``order``: the number of each weight,
    None: they are left out."""
    updates = updates_in(calls, len(names or ()))
    whose = None if order is None or names is None else placed(calls, updates, names, None)
    found = Calls({}, calls.rows, calls.sketches, {}, calls.outer, calls.made, calls.head)
    time, last = 0, -1
    for key, call in calls.kept.items():
        new: Call | None = call
        if is_update(key):
            new = None
            if whose is not None and order is not None and key in whose and (name := whose[key][0]) in order:
                new = replace(call, key=(*key[:4], order[name] * whose[key][1] + key[4] % whose[key][1]))
                local = key[4] // whose[key][1]
                time, last = time + (local < last), local
                found.updates[new.key] = time, order[name]
        if new is None:
            calls.outer[call.seq] = call.parent
        else:
            found.kept[new.key] = new
            found.keys[new.seq] = new.key
    return found


def placed(
    calls: Calls, updates: Sequence[Call], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]] | None
) -> dict[Key, tuple[str, int]] | None:
    """Return the weight of each call that updates one, and how often its operator is called for one; None: it is not known."""
    if not names:  # an optimizer that does not say what it updates
        return None
    often: dict[str, int] = {}
    for call in updates:
        often[call.key[3]] = often.get(call.key[3], 0) + 1
    found = {}
    for call in updates:
        each, rest = divmod(often[call.key[3]], len(names))
        if rest or not each:
            return None
        name = names[call.key[4] // each]
        at = call.rows.get("output.0")
        shape = None if at is None else calls.rows[at]["shape"]
        if shapes is not None and shape and tuple(shape) != shapes[name]:
            return None
        found[call.key] = name, each
    return found
