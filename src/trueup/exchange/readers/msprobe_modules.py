"""Gradients of a function that is all its module computes: in msprobe's level mix they stand with the module.

Of a linear layer on three dimensions msprobe sees the gradient of a view (`left_gradients`). The dump has what the input of the
``Linear`` around it got and, as ``parameters_grad``, what ``weight.grad`` held after the backward. Where the module passes its
tensors on to one function and returns its result, these are the function's::

    Module.head.Linear.backward.0           output.0   ->   Functional.linear.6.backward   grad_input.0
    Module.head.Linear.parameters_grad.0    weight     ->                                  grad_input.1

A parameter's ``.grad`` is taken only where it is the gradient of that one call. Three things must hold: nothing else in the step
read the parameter (told by its numbers, but for biases and scales not trained yet); it is the first backward through it; and for
some other function of one autograd node the dump shows that ``.grad`` held what left the node, so batches do not add up.

Names of entries in msprobe's files taken apart: ``Functional.linear.0.forward``, ``Module.head.Linear.parameters_grad.0``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trueup.exchange.readers import ascend
from trueup.exchange.readers.ascend import left_gradients
from trueup.exchange.readers.dump import ForeignCall

MODULES = frozenset({
    "Linear", "Embedding", "LayerNorm", "GroupNorm", "RMSNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv2d",
    "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Bilinear", "Dropout", "CrossEntropyLoss", "MSELoss",
    "NLLLoss",
    "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool2d", "Softmax", "LogSoftmax", "GELU", "SiLU", "ReLU",
    "LeakyReLU", "ELU", "Softplus", "Mish", "GLU", "PixelShuffle", "Upsample",
})  # fmt: skip
"""Classes of torch.nn that are one function and pass their input and parameters to it as they are."""

Signature = tuple[Any, ...]  # shape, dtype and numbers of a tensor in the dump; None where something is missing


@dataclass(slots=True)
class _Forward:
    """What went in and came out of a forward call, by the slot's name without ``input.``."""

    inputs: dict[str, Signature]
    outputs: list[Signature | None]
    parameters: dict[str, Signature] = field(default_factory=dict)


class SoleFunctions:
    """The modules of a step that are one function. ``parents``: which call is around which."""

    def __init__(self, parents: Mapping[str, str]) -> None:
        self._parents = parents
        inside: defaultdict[str, list[str]] = defaultdict(list)
        for inner, outer in parents.items():
            if inner.endswith(".forward") and _class(outer) in MODULES:
                inside[outer].append(inner)
        self._inside = {outer: inner[0] for outer, inner in inside.items() if len(inner) == 1 and _class(inner[0]) is None}
        self._outside = {inner: outer for outer, inner in self._inside.items()}
        self._functions = set(self._inside.values())
        self._forwards: dict[str, _Forward] = {}
        self._readers: defaultdict[Signature, list[str]] = defaultdict(list)
        self._left: dict[str, dict[str, Signature | None]] = {}  # by function's backward: gradients that left its node, by input
        self._held: dict[tuple[str, str], Signature] = {}  # by module's backward and parameter: what ``.grad`` held
        self._headers: dict[str, ForeignCall] = {}
        self._fresh: bool | None = None
        self.repeated: set[str] = set()  # calls that checkpointing ran again

    def look(self, name: str, entry: Any) -> None:
        """Take from an entry, in a first pass over all, what tells whether a module's tensors are its function's."""
        parsed = parse(name)
        if parsed is None or not isinstance(entry, dict):
            return
        key = parsed.key()
        if not parsed.backward:
            self._look_forward(key, parsed, entry)
        elif parsed.kind in ascend.MODULES:
            if name.endswith(".parameters_grad.0"):
                self._held |= {(key, at): found for at, leaf in entry.items() if (found := signature(_first(leaf))) is not None}
        elif parsed.forward() in self._functions:
            self._left[key] = _left(parsed, entry)

    def _look_forward(self, key: str, parsed: Name, entry: dict[str, Any]) -> None:
        is_module = parsed.kind in ascend.MODULES
        found = _Forward(dict(_inputs(parsed, entry)), [signature(leaf) for _, leaf in ascend.leaves(entry.get("output"))])
        if not is_module:
            for one in set(found.inputs.values()):
                self._readers[one].append(key)
        else:
            parameters = entry.get("parameters")
            of = parameters.items() if isinstance(parameters, dict) else ()
            found.parameters = {str(at): told for at, leaf in of if (told := signature(leaf)) is not None}
        if key in self._functions or key in self._inside:
            self._forwards[key] = found

    def gradients(self, name: str, call: ForeignCall) -> ForeignCall | None:
        """Return, of a module's backward, the piece of its function's backward that it tells; None where it tells none."""
        parsed = parse(name)
        if parsed is None or not parsed.backward:
            return None
        if parsed.kind not in ascend.MODULES:
            if parsed.forward() in self._functions:
                self._headers[call.key] = replace(call, tensors=(), arguments={})
            return None
        inner = self._inside.get(parsed.forward() or "")
        backward = "" if inner is None else f"{inner.removesuffix('.forward')}.backward"
        header = self._headers.get(backward)  # a hook at the function comes before the module's
        if header is None or self._parents.get(backward, call.key) != call.key:
            return None
        slots = dict(self._slots(call.key, str(parsed.forward()), str(inner)))
        known = self._left.get(backward, {})
        tensors = [
            replace(tensor, slot=f"grad_input.{slots[tensor.slot]}") for tensor in call.tensors
            if tensor.slot in slots and slots[tensor.slot] not in known
        ]  # fmt: skip
        return replace(header, tensors=tensors) if tensors else None

    def _slots(self, backward: str, outer: str, inner: str) -> Iterator[tuple[str, str]]:
        """Yield slots of a module's backward and the input of its function that each is the gradient of."""
        module, function = self._forwards.get(outer), self._forwards.get(inner)
        if module is None or function is None or not module.outputs or module.outputs != function.outputs or None in module.outputs:
            return
        for at, told in module.inputs.items():
            if function.inputs.get(at) == told:
                yield f"grad_input.{at}", at
        for parameter, told in module.parameters.items():
            places = [where for where, one in function.inputs.items() if one == told]
            if len(places) != 1 or (backward, parameter) not in self._held:
                continue
            if self._is_only_reader(told) and self._adds_nothing_up():
                yield f"grad_param.{parameter}", places[0]

    def _is_only_reader(self, parameter: Signature) -> bool:
        readers = [key for key in self._readers[parameter] if key not in self.repeated]
        return len(readers) == 1 or (_is_initial(parameter) and self._have_modules_of_their_own(readers, parameter))

    def _have_modules_of_their_own(self, readers: list[str], parameter: Signature) -> bool:
        """Tell whether each reader is the function of another module with such a parameter."""
        modules = [self._forwards.get(self._outside.get(key, "")) for key in readers]
        scopes = {self._outside.get(key, "").rpartition(".forward")[0] for key in readers}
        held = all(module is not None and parameter in module.parameters.values() for module in modules)
        return held and len(scopes) == len(readers)

    def _adds_nothing_up(self) -> bool:
        """Tell whether some parameter's ``.grad`` held what left the node of the function that reads it."""
        if self._fresh is None:
            self._fresh = any(map(self._is_as_left, self._held))
        return self._fresh

    def _is_as_left(self, held: tuple[str, str]) -> bool:
        backward, parameter = held
        outer = f"{backward.removesuffix('.backward')}.forward"
        inner = self._inside.get(outer, "")
        module, function = self._forwards.get(outer), self._forwards.get(inner)
        if module is None or function is None:
            return False
        at = [where for where, one in function.inputs.items() if one == module.parameters.get(parameter)]
        left = self._left.get(f"{inner.removesuffix('.forward')}.backward", {})
        return len(at) == 1 and left.get(at[0]) == self._held[held] and any(self._held[held][2:])


def _is_initial(parameter: Signature) -> bool:
    """Tell whether a parameter is a vector of one number, as biases and scales begin: equal ones need not be the same."""
    shape, _, high, low, *_ = parameter
    return len(shape) == 1 and high is not None and high == low


def _class(key: str) -> str | None:
    """Return the class of a module call, None of a function's."""
    parts = key.split(".")
    return parts[-3] if parts[0] in ascend.MODULES and len(parts) >= 4 else None


def _inputs(parsed: Name, entry: dict[str, Any]) -> Iterator[tuple[str, Signature]]:
    op = ascend.operator(parsed.kind, ".".join(parsed.parts))[0]
    is_module = parsed.kind in ascend.MODULES
    for path, leaf in ascend.leaves(entry.get("input_args")):
        if len(path) == 1 and (told := signature(leaf)) is not None:
            yield path[0] if is_module else ascend.argument(op, path[0]), told
    for path, leaf in ascend.leaves(entry.get("input_kwargs")):
        if len(path) == 1 and (told := signature(leaf)) is not None:
            yield path[0], told


def _left(parsed: Name, entry: dict[str, Any]) -> dict[str, Signature | None]:
    """Return the gradients that left a function's node and are one of its inputs'."""
    content = entry.get("output", entry.get("grad_input"))
    leaves = content if isinstance(content, list) else [content]
    op = ascend.operator(parsed.kind, ".".join(parsed.parts))[0]
    shapes = [ascend.sizes(leaf.get("shape")) if isinstance(leaf, dict) else None for leaf in leaves]
    told = zip(left_gradients(op, shapes), leaves, strict=True)
    slots = ((left.slot.removeprefix("grad_input."), leaf) for left, leaf in told if leaf is not None)
    return {slot: signature(leaf) for slot, leaf in slots if not slot.startswith("node.")}


def _first(leaf: Any) -> Any:
    return leaf[0] if isinstance(leaf, list) and leaf else leaf


def signature(leaf: Any) -> Signature | None:
    """Return what tells a tensor from others in a dump, None where it has no shape or no numbers."""
    if not isinstance(leaf, dict):
        return None
    shape, dtype = ascend.sizes(leaf.get("shape")), leaf.get("dtype")
    numbers = tuple(leaf.get(key) for key in ("Max", "Min", "Mean", "Norm", "md5"))
    if shape is None or not isinstance(dtype, str) or not all(isinstance(n, (int, float, str, type(None))) for n in numbers):
        return None
    if all(n is None for n in numbers) or any(n != n for n in numbers):
        return None
    return (shape, dtype, *numbers)


@dataclass(slots=True)
class Name:
    """A name of dump.json taken apart."""

    kind: str  # ``Functional``, ``Module`` ...
    parts: list[str]
    index: str
    backward: bool

    def key(self) -> str:
        """Return what names the call: a module's gradients of parameters belong to its backward."""
        return ".".join((self.kind, *self.parts, self.index, "backward" if self.backward else "forward"))

    def forward(self) -> str | None:
        """Return the key of the forward call of a backward call."""
        return ".".join((self.kind, *self.parts, self.index, "forward")) if self.backward else None


def parse(name: str) -> Name | None:
    """Take a name apart: ``Functional.linear.0.forward``, ``Module.head.Linear.backward.0``, ``...parameters_grad.0``."""
    parts = name.split(".")
    if len(parts) >= 4 and parts[0] in ascend.MODULES and parts[-2] in ("forward", "backward", "parameters_grad"):
        return Name(parts[0], parts[1:-2], parts[-1], parts[-2] != "forward")
    if len(parts) >= 4 and parts[-1] in ("forward", "backward") and parts[-2].isdigit():
        return Name(parts[0], parts[1:-2], parts[-2], parts[-1] == "backward")
    if len(parts) >= 3 and parts[0] in ascend.MODULES and parts[-1] == "parameters_grad":  # versions before call indices
        return Name(parts[0], parts[1:-1], "0", True)
    return None


def key_of(name: str) -> str:
    """Return what names the call of an entry; the name itself where it is of no known form."""
    parsed = parse(name)
    return name if parsed is None else parsed.key()
