"""What a framework's records are called in neutral terms, by the tables of `frameworks`: operators, slots, layouts, arguments, and
the settings of layers and optimizers.

Of settings that are not in the tables nothing is known, so they are left out: two frameworks name and store them in their own ways.
The names of operations in a graph of TensorFlow tell more: forward, backward or optimizer, and of which operation.
``tf.gradients`` puts the backward of ``net/MatMul`` under ``gradients/net/MatMul_grad``, a GradientTape under
``gradient_tape/net/``; an optimizer of TensorFlow 1 works beside ``Adam/update_net/w``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.slots import SINGLE
from trueup.foundation.frameworks import mapping as maps
from trueup.foundation.frameworks.tables import (
    Axes,
    Function,
    Layer,
    Named,
    Optimizer,
    Own,
    functions_by_op,
    layers_by_class,
    layers_by_name,
    optimizers_by_class,
)

CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "num_directions": lambda value: value == 2,
    "time_major": lambda value: not value,
    "mode": lambda value: str(value).rpartition("_")[2].lower(),
    "1-": lambda value: round(1 - value, 12) if isinstance(value, (int, float)) else value,
    "!": lambda value: not value,
}
"""Makes a neutral value of a framework's (the column ``settings`` of the tables)."""

MODULE = "module"  # neutral name of a module that is none of the known layers: which one it is tells its scope

ALONE = "only {framework}'s: {op}"  # neutral name of a function that the others do not have

BUFFER = "output.buffer."

GRADIENT = re.compile(r"(?:.*/)?gradients(?:_\d+)?/(?:(.+)_grad/)?")
APPLIES = re.compile(r"(?:Resource)?(?:Sparse)?Apply[A-Z]")
UPDATE = re.compile(r"(.*?)/update(?:_|/)")
READS = frozenset({"ReadVariableOp", "VariableV2", "Variable"})
"""They give what a variable holds. That counts as given to them: no call says who wrote the variable."""
_MKL = re.compile(r"^_Mkl(?:Native)?(?=[A-Z])")
TAPE = re.compile(r"(?:.*/)?gradient_tape/")
PASSED_OVER = frozenset(
    """
    Placeholder PlaceholderWithDefault Const NoOp VarHandleOp DestroyResourceOp VarIsInitializedOp Shape ShapeN Size Rank
    StopGradient PreventGradient ControlTrigger VariableShape BroadcastGradientArgs
    DebugIdentityV2 Assert Print PrintV2 MergeSummary ScalarSummary WriteScalarSummary DisableCopyOnRead EnsureShape
    """.split()
)
"""Operations that compute nothing that a comparison asks for; a capture leaves them out."""


def neutral_settings(settings: Mapping[str, Any], own: Own) -> dict[str, Any]:
    """Return settings by neutral names and values; those that an instance lacks are left out."""
    held = [(one, name) for one in own.settings for name in (one.own, one.own.lstrip("_")) if name in settings]
    found = {one.neutral: neutral_value(settings[name], one, own.values.get(one.neutral, {})) for one, name in held}
    if found.get("padding_idx") == -1:  # Paddle's none
        found["padding_idx"] = None
    if found.get("stride", 0) is None and "kernel_size" in found:  # a pooling's: Paddle writes that it was left out
        found["stride"] = found["kernel_size"]
    if found.get("padding") == "same" and found.get("stride") == 1:  # of an odd kernel the same on both sides
        found["padding"] = _same_padding(settings, found.get("dilation", 1))
    return found


def _same_padding(settings: Mapping[str, Any], dilation: Any) -> Any:
    """Return the padding in numbers that keeps a result as large as its input; ``same`` if there is no such number."""
    sizes = settings.get("kernel_size", settings.get("_kernel_size"))
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    if not isinstance(dilation, int) or not all(isinstance(size, int) and size % 2 for size in sizes):
        return "same"
    both = [(size - 1) // 2 * dilation for size in sizes]
    return both[0] if all(one == both[0] for one in both) else both


def neutral_value(value: Any, one: Named, values: Mapping[str, Any]) -> Any:
    """Return what a framework's value of an attribute or an argument is in neutral terms: by its table ``values``, else made by
    ``one.how``; equal numbers of a list are one number, and a text is in small letters."""
    try:
        known = json.dumps(value)
    except TypeError:
        known = ""
    if known in values:
        return values[known]
    made = CONVERTED[one.how](value) if one.how else value
    if isinstance(made, (list, tuple)):
        plain = list(made)
        return plain[0] if plain and all(x == plain[0] for x in plain) else plain
    return made.lower() if isinstance(made, str) else made


def same(first: Any, second: Any) -> bool:
    """Tell whether two neutral values are the same; numbers up to float32's rounding, in which Keras holds a learning rate."""
    numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (first, second))
    if numbers:
        return bool(abs(first - second) <= 2 * SINGLE * max(abs(first), abs(second)))
    return bool(first == second)


SELECTIVE = ("apply_decay_param_fun", "exclude_from_weight_decay")
"""Settings that say of which parameters a weight decay is not, by a function or a pattern: what each parameter has is not known."""

CLIPPINGS: Mapping[str, str] = {
    "norm": "norm", "ClipGradByGlobalNorm": "norm", "global_clipnorm": "norm", "ClipGradByNorm": "norm of each gradient",
    "clipnorm": "norm of each gradient", "ClipGradByValue": "value", "clipvalue": "value", "value": "value",
}  # fmt: skip
"""What a clipping is called in PyTorch's words, by the first word of what a manifest says: ``norm at 1``."""


def neutral_optimizers(held: Sequence[Mapping[str, Any]], framework: str) -> list[dict[str, Any]]:
    """Return what a manifest says of optimizers, in neutral terms; nothing where one of them is in no table."""
    known = optimizers_by_class(framework)
    rows = [known.get(str(one.get("class"))) for one in held]
    return [_optimizer(one, row, framework) for one, row in zip(held, rows, strict=True) if row] if all(rows) else []


def _optimizer(held: Mapping[str, Any], row: Optimizer, framework: str) -> dict[str, Any]:
    own = row.own[framework]
    groups = [one for one in _list(held, "groups") if isinstance(one, Mapping)]
    unknown = {"weight_decay"} if any(group.get(name) for group in groups for name in SELECTIVE) else set()

    def known(group: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
        return {n: v for n, v in {**beside, **neutral_settings(group, own)}.items() if n not in unknown and v is not None}

    found: dict[str, Any] = {"class": row.name, "groups": [known(group, row.defaults) for group in groups]}
    changes = [one for one in _list(held, "changes") if isinstance(one, list) and len(one) == 3 and isinstance(one[2], Mapping)]
    found["changes"] = [[step, group, known(change, {})] for step, group, change in changes]
    how, _, most = str(held.get("clipping", "")).rpartition(" at ")
    if how and how.split()[0] in CLIPPINGS:
        found["clipping"] = f"{CLIPPINGS[how.split()[0]]} at {_plain(most)}"
    return found | ({"parameters": held["parameters"]} if "parameters" in held else {})


def defined_otherwise(classes: Sequence[str], first: str, second: str) -> list[str]:
    """Return what two frameworks define in other ways in optimizers of these classes, which no setting of theirs says."""
    rows = [row for one in classes if (row := optimizers_by_class(second).get(one)) and first in row.own]
    told = {row.name: (row.differs, *(row.own[one].differs for one in (first, second))) for row in rows}
    return [f"{name}: {one}" for name, said in told.items() for one in said if one]


def _list(held: Mapping[str, Any], name: str) -> list[Any]:
    """A manifest is anybody's, and what is of another kind is not there."""
    found = held.get(name)
    return found if isinstance(found, list) else []


def _plain(number: str) -> str:
    try:
        return f"{float(number):g}"
    except ValueError:
        return number


def neutral_modules(held: Mapping[str, Mapping[str, Any]], framework: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the scope and the settings of each module that is in the tables."""
    known = layers_by_class(framework)
    for scope, module in held.items():
        row = known.get(str(module.get("class")))
        if row is not None:
            training = {"training": module["training"]} if isinstance(module.get("training"), bool) else {}
            yield scope, {"class": row.name, **training, **neutral_settings(module, row.own[framework])}


@dataclass(frozen=True, slots=True)
class Slotted:
    """What becomes of a slot: its neutral name, None where it is not compared, and how its elements lie."""

    name: str | None
    axes: Axes | None = None


class Dialect:
    """The names in one framework's records. The user's ``mapping`` has the candidate's scopes and layouts (``candidate``: these
    are its)."""

    def __init__(self, framework: str, mapping: maps.Mapping, *, candidate: bool) -> None:
        self.framework, self.mapping, self.candidate = framework, mapping, candidate
        self._functions: dict[str, Function] = functions_by_op(framework)
        self._layers = layers_by_class(framework)

    def scope(self, scope: str) -> str:
        """Return the baseline's name of a scope."""
        return self.mapping.scope(scope) if self.candidate else scope

    def layer(self, scope: str, op: str) -> Layer | None:
        """Return the row of a module: as the map says, else by its class."""
        kind = self.mapping.kinds.get(self.scope(scope))
        return layers_by_name().get(kind) if kind else self._layers.get(op)

    def function(self, op: str) -> Function | None:
        """Return the row of a function."""
        return self._functions.get(op)

    def neutral(self, level: str, scope: str, op: str, *, other: bool) -> str:
        """Return the name by which a call is matched; ``other``: it was given what makes another function of it."""
        if level == "module":
            layer = self.layer(scope, op)
            return MODULE if layer is None or not layer.tensors else layer.name
        row = self.function(op)
        return ALONE.format(framework=self.framework, op=op) if row is None or other else row.name

    def slot(self, level: str, scope: str, op: str, slot: str) -> Slotted:
        """Return what becomes of a slot."""
        found = self._of_layer(self.layer(scope, op), slot) if level == "module" else self._of_function(self.function(op), slot)
        if found.name is None or not self.candidate:
            return found
        name, axes = self.mapping.slot(self.scope(scope), op, found.name)
        return Slotted(name, axes or found.axes)

    def _of_layer(self, layer: Layer | None, slot: str) -> Slotted:
        if layer is None:
            return Slotted(slot)
        for prefix in ("param.", BUFFER):
            if slot.startswith(prefix):
                own = slot.removeprefix(prefix)
                name = layer.neutral(self.framework, own)
                if own in layer.own[self.framework].ignored or (name in layer.buffers and prefix != BUFFER):
                    return Slotted(None)
                return Slotted(f"{prefix}{name}", layer.axes(self.framework, name))
        return Slotted(slot)

    def _of_function(self, row: Function | None, slot: str) -> Slotted:
        if row is None:
            return Slotted(slot)
        own = row.own[self.framework]
        plain = slot.removeprefix("grad_")
        kind, _, rest = plain.partition(".")
        first, _, below = rest.partition(".")
        if kind == "input":
            name = _taken(own.takes, first)
            if name not in row.takes:
                return Slotted(slot)
            neutral = f"input.{row.takes.index(name)}"
            found = Slotted(slot.replace(plain, f"{neutral}.{below}" if below else neutral), own.axes.get(name))
        elif kind == "output":
            given = own.gives[int(first)] if first.isdigit() and int(first) < len(own.gives) else first
            if given == "-":
                return Slotted(None)
            place = str(row.gives.index(given)) if given in row.gives else first
            found = Slotted(slot.replace(plain, f"output.{place}"))
        else:
            found = Slotted(slot)
        return found

    def given(self, op: str, value: str | None) -> dict[str, Any]:
        """Return the other arguments of a function by neutral names and values."""
        row, recorded = self.function(op), decoded(value)
        if row is None:
            return {}
        own, found = row.own[self.framework], dict(row.defaults)
        for n, one in enumerate(own.takes):
            at = one.own if one.own in recorded else str(n)
            if at in recorded:
                found[one.neutral] = neutral_value(recorded[at], one, own.values.get(one.neutral, {}))
        return found

    def arguments(self, op: str, value: str | None) -> str | None:
        """Return what of a function's arguments is compared, as JSON; None: nothing."""
        row = self.function(op)
        if row is None or not row.same:
            return None
        same = {name: _number(given) for name, given in self.given(op, value).items() if name in row.same}
        return json.dumps(same, sort_keys=True) if same else None

    def is_other(self, op: str, slots: set[str], value: str | None) -> bool:
        """Tell whether a call was given what makes another function of it (`Function.unless`)."""
        row = self.function(op)
        if row is None or not row.unless:
            return False
        own = row.own[self.framework]
        plain = [slot.removeprefix("grad_").removeprefix("input.").partition(".")[0] for slot in slots if "input." in slot]
        tensors = {_taken(own.takes, name) for name in plain}
        given = self.given(op, value)
        numbers = {name for name in row.unless if given.get(name) and not (name in row.one and given[name] == 1)}
        return bool(row.unless & tensors) or bool(numbers)


@lru_cache(maxsize=4096)
def _taken(takes: tuple[Named, ...], own: str) -> str:
    """Return the neutral name of a parameter that a slot names by its place or its name."""
    if own.isdigit():
        return takes[int(own)].neutral if int(own) < len(takes) else ""
    return next((one.neutral for one in takes if one.own == own), "")


def _number(value: Any) -> Any:
    """Return a whole number as any other: 1 and 1.0 are the same argument."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def device_name(text: str | None) -> str:
    """Return ``cpu``, ``gpu:0``, ``npu:1`` ... for ``/job:localhost/replica:0/task:0/device:GPU:0``."""
    kind, _, number = (text or "").rpartition("device:")[2].lower().partition(":")
    return "cpu" if kind in ("", "cpu") else f"{kind}:{number or 0}"


def operation(kind: str) -> str:
    """Return ``tf.raw_ops.MatMul`` for ``MatMul``, and for ``_MklMatMul``, its kernel on a CPU with oneDNN."""
    return f"tf.raw_ops.{_MKL.sub('', kind).lstrip('_')}"


def standing(name: str, kind: str, updated: frozenset[str]) -> tuple[str, str, str | None]:
    """Return what the name of a graph's operation (``net/head/MatMul``, of type ``kind``) tells: its phase, its scope (with dots)
    and, in the backward, its forward operation. ``updated`` holds optimizers' scopes: the part before ``/update`` of an operation
    that applies gradients."""
    if APPLIES.match(kind) or any(name.startswith(f"{scope}/") for scope in updated):
        return "optimizer", "", None
    if (found := GRADIENT.match(name)) is not None:
        forward = found[1]
        return "backward", ".".join((forward or "").split("/")[:-1]), forward
    if (taped := TAPE.match(name)) is not None:
        return "backward", ".".join(name[taped.end() :].split("/")[:-1]), None
    return "forward", ".".join(name.split("/")[:-1]), None
