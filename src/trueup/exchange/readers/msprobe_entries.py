"""One entry of msprobe's dump.json: tensors with their numbers, and the arguments that are none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trueup.exchange.readers import names
from trueup.exchange.readers.dump import Array, ForeignTensor
from trueup.exchange.readers.left_gradients import Left, left_gradients, transposed
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.statistics import told_statistics

TENSORS = frozenset({
    "torch.Tensor", "DTensor", "FakeTensor", "AsyncCollectiveTensor", "NestedTensor", "BatchedTensor", "GradTrackingTensor",
    "numpy.ndarray", "mindspore.Tensor",
})  # fmt: skip

GROUPS = {
    "input_args": "input", "input_kwargs": "input", "output": "output", "input": "grad_output", "parameters": "param",
    "grad_input": "grad_input", "grad_output": "grad_output",
}  # fmt: skip
"""Members of an entry and the slots that they are; in a backward entry ``output`` is what leaves, and a name that is none of these
is a parameter with its gradient."""

_CHECKSUM = re.compile(r"(0x)?[0-9a-fA-F]{8,128}")

Found = tuple[list[ForeignTensor], dict[str, Any]]
Loader = Callable[[str], Array]


def tensors_and_arguments(
    name: str, entry: dict[str, Any], op: str, level: str, backward: bool, load: Loader, notes: Notes, *,
    by_argument: bool = False,
) -> Found:  # fmt: skip
    """Read an entry.

    Args:
        name: of the entry.
        entry: as decoded.
        op: of the call, in our words.
        level: of the call.
        backward: whether it is of the backward pass.
        load: reads the tensor in the file of that name; raises UnreadableError.
        notes: where to say what is odd.
        by_argument: whether gradients that leave a call bear the places of its arguments (`trueup.exchange.readers.marker`).
    """
    tensors: list[ForeignTensor] = []
    arguments: dict[str, Any] = {}
    for group, content in entry.items():
        if group == "output" and level == "module" and not backward:
            content = _of_names(content)
        leaves_node = backward and group in ("output", "grad_input")
        left = [] if not leaves_node else _of_arguments(content, op) if by_argument else _leaving(content, op, level)
        for path, leaf in names.leaves(content):
            if leaf is None:
                continue
            slot, turned = _slot(group, path, op, left)
            if isinstance(leaf, dict) and isinstance(leaf.get("tensor"), dict):  # an operation of batch_isend_irecv
                arguments |= {f"{slot}.{key}": leaf[key] for key in ("op", "peer", "tag") if key in leaf}
                leaf = leaf["tensor"]
            if _is_tensor(leaf):
                tensor = _tensor(_named(name, group, path), slot, leaf, load, notes)
                tensors.append(transposed(tensor) if turned else tensor)
            elif slot.startswith("input.") and isinstance(leaf, dict):
                _keep(arguments, slot.removeprefix("input.").split("."), value_of(leaf))
            elif not isinstance(leaf, dict):
                notes.say("a member of an entry is neither tensor nor argument", f"{name}.{group}")
    return tensors, {key: _as_list(value) for key, value in arguments.items()}


def _of_names(content: Any) -> Any:
    """Return what a module returned: one object with names (a ``ModelOutput``) is no list of one, as a native capture has it."""
    lone = content[0] if isinstance(content, list) and len(content) == 1 else None
    return lone if isinstance(lone, dict) and not names.is_leaf(lone) else content


def _named(name: str, group: str, path: tuple[str, ...]) -> str:
    """Return the tensor's name as msprobe's own results and files have it."""
    if group not in GROUPS:
        return ".".join((name, group, *path[1:]))
    return ".".join((name, "input" if group in ("input_args", "input_kwargs") else group, *path))


def _leaving(content: Any, op: str, level: str) -> list[Left]:
    """Return whose gradients the members of a list are that left a call in the backward."""
    gradients = content if isinstance(content, list) else [content]
    if level == "module":
        return [Left(f"grad_input.{k}") for k in range(len(gradients))]
    return left_gradients(op, [names.sizes(one.get("shape")) if isinstance(one, dict) else None for one in gradients])


def _of_arguments(content: Any, op: str) -> list[Left]:
    count = len(content) if isinstance(content, list) else 1
    return [Left(f"grad_input.{names.argument(op, str(k))}") for k in range(count)]


def _slot(group: str, path: tuple[str, ...], op: str, left: Sequence[Left]) -> Left:
    first, rest = (path[0], path[1:]) if path else ("0", ())
    if group not in GROUPS:
        return Left(".".join(("grad_param", group, *path[1:])))  # {parameter: [gradient]}
    kind = GROUPS[group]
    if kind == "input":
        return Left(".".join(("input", names.argument(op, first) if group == "input_args" else first, *rest)))
    if left:
        of = left[int(first)] if first.isdigit() and int(first) < len(left) else Left(f"grad_input.{first}")
        return Left(".".join((of.slot, *rest)), of.transposed and not rest)
    return Left(".".join((kind, first, *rest)))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, dict) and ("shape" in leaf or leaf.get("type") in TENSORS) and "dtype" in leaf


def _tensor(name: str, slot: str, leaf: dict[str, Any], load: Loader, notes: Notes) -> ForeignTensor:
    shape, dtype = names.sizes(leaf.get("shape")), names.dtype(leaf.get("dtype"))
    if shape is None or dtype is None:
        notes.lose("a tensor has no shape or dtype that can be read", name)
    numbers: tuple[Any, ...] = tuple(leaf.get(key) for key in ("Max", "Min", "Mean", "Norm"))
    if shape == () and isinstance(leaf.get("md5"), float):  # msprobe 26.2 puts the value of a scalar where its XOR belongs
        numbers = (leaf["md5"],) * 4
    statistics, told = told_statistics(numbers, dtype, shape)
    file = leaf.get("data_name")
    reader = partial(load, file) if isinstance(file, str) else None
    return ForeignTensor(slot, name, dtype, shape, statistics, told, _checksum(leaf.get("md5")), reader, _part_in_whole(leaf))


def _part_in_whole(leaf: dict[str, Any]) -> str | None:
    """Say how a DTensor's local shard is placed, as a native capture does; the whole's shape is not in the dump."""
    placements = leaf.get("placements")
    if not isinstance(placements, list):
        return None
    words = [
        f"{kind}({next(iter(details.values()), '') if isinstance(details, dict) else ''})"
        for placement in placements[:8]
        if isinstance(placement, dict)
        for kind, details in placement.items()
    ]
    ranks = _short(leaf.get("device_mesh"), 2000)
    return json.dumps({"placements": words, "mesh": {"ranks": "many" if ranks is None else json.loads(ranks)}})


def _short(value: Any, limit: int) -> str | None:
    """Encode a value, None where that would be long or deep."""
    try:
        text = json.dumps(value, sort_keys=True)
    except (RecursionError, TypeError):
        return None
    return text if len(text) <= limit else None


def _checksum(text: Any) -> str | None:
    """Return a checksum with its algorithm: 16 digits after 0x are an XOR, 8 a CRC-32, whatever the field is called."""
    if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
        return None
    if text.startswith("0x"):
        return f"xor64:{text[2:].lower()}"
    return f"{ {8: 'crc32', 16: 'xxh3', 32: 'md5'}.get(len(text), f'unknown{len(text)}') }:{text.lower()}"


def value_of(leaf: dict[str, Any]) -> Any:
    """Return an argument as a native capture encodes it."""
    kind, value = leaf.get("type"), leaf.get("value")
    if kind == "slice" and isinstance(value, list):
        return ":".join(str(part) for part in value[:3])
    if kind in ("torch.device", "torch.ProcessGroup"):
        return None
    if kind == "torch.memory_format":
        return f"torch.{leaf.get('format')}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None and kind not in ("NoneType",):
        return _short({k: v for k, v in leaf.items() if k != "type"}, 400)
    return value


def _keep(arguments: dict[str, Any], path: list[str], value: Any) -> None:
    """Put a value into nested objects; lists are objects of numbered members until `_as_list`."""
    if value is None:
        return
    for part in path[:-1]:
        inner = arguments.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        arguments = inner
    arguments[path[-1]] = value


def _as_list(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _as_list(one) for key, one in value.items()}
    return list(inner.values()) if inner and all(key.isdigit() for key in inner) else inner
