"""What the Ascend tools (ptdbg and msprobe) write of an API call, in Trueup's words: names, numbers and gradients.

**Names.** Both name an API by where its function was found (``Tensor``, ``Torch``, ``Functional`` ...) and count it; the count is
dropped, for it runs over the whole step: one more call would rename all later ones. ``Functional.linear`` is
``torch.nn.functional.linear``.

**Numbers.** They take max, min, mean and norm over all elements. A NaN or Inf shows in maximum or minimum, and then nothing is
known of the finite elements, which ours are of. So does the largest finite number, of which attention masks are made and which
our statistics leave out (`kernels.MASKING`). Sums are in the tensor's dtype or float32: ``mean`` and ``l2`` are good to about
1e-6 (1e-3 for half precision).

**Gradients.** Of a function's backward they see what leaves its last autograd node. If the function is one node, these are the
gradients of its inputs, in the order of the node's arguments. Else they are those of a tensor in between, which no native capture
has: a linear layer on three dimensions ends in a view of a product, and the incoming gradient leaves the view in another shape.

**Marker.** `trueup_compat` leaves one beside the files of an old tool's layout, so that it is known who wrote them. ``trueup.json``
in the folder of a rank says where the native capture of the same run is, and that gradients bear the places of their arguments.
``trueup-names.jsonl`` has a line ``[seq, name]`` for each call that the folder holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trueup.exchange.readers.dump import Array, ForeignTensor, Tree, UnreadableError, folder_of
from trueup.foundation import toml
from trueup.foundation.kernels import is_mask

MODULES = ("Module", "Cell")


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, Any]]:
    """Return ``torch_names.toml``."""
    return toml.packaged(__package__, "torch_names.toml")


def operator(kind: str, api: str, framework: str | None = "torch") -> tuple[str, str, str]:
    """Return ``(op, level, phase)`` of a forward call of an API.

    >>> operator("Functional", "linear")
    ('torch.nn.functional.linear', 'api', 'forward')
    >>> operator("Tensor", "__matmul__")
    ('torch.Tensor.matmul', 'api', 'forward')
    """
    if kind == "Functional" and framework != "mindspore" and api in (known := table()["passed_on"]):
        return str(known[api]), "api", "forward"
    prefix = table()["prefixes"]["mindspore" if framework == "mindspore" else "torch"].get(kind, f"{kind}.")
    if kind == "Tensor" and framework != "mindspore":
        api = table()["tensor"].get(api, api)
    level = "aten" if kind == "Aten" else "api"
    phase = "collective" if kind in ("Distributed", "MintDistributed") else "forward"
    return f"{prefix}{api}", level, phase


def argument(op: str, position: str) -> str:
    """Return the name under which a native capture knows a positional argument: mostly its position.

    >>> argument("torch.nn.functional.layer_norm", "2")
    'weight'
    """
    names = table()["functional"].get(op.removeprefix("torch.nn.functional.")) if position.isdigit() else None
    if not names or not op.startswith("torch.nn.functional."):
        return position
    place = int(position) - int(names[0])
    return str(names[1 + place]) if 0 <= place < len(names) - 1 else position


def position(op: str, name: str) -> str:
    """Return the position at which a caller mostly gives an argument that a native capture knows by name; else the name.

    >>> position("torch.nn.functional.layer_norm", "weight")
    '2'
    """
    known = op.startswith("torch.nn.functional.")
    names: list[Any] = list(table()["functional"].get(op.removeprefix("torch.nn.functional."), ())) if known else []
    return str(int(names[0]) + names.index(name) - 1) if name in names[1:] else name


def nodes(op: str) -> list[str] | None:
    """Return which arguments' gradients leave the autograd node that a function is, in order; None where it is not one node."""
    found = table()["nodes"].get(op)
    return None if found is None else [str(name) for name in found]


def dtype(name: Any) -> str | None:
    """Return the name of a dtype without its framework: ``torch.float32``, ``paddle.float32`` and ``Float32`` are ``float32``."""
    if not isinstance(name, str) or not name:
        return None
    plain = name.rpartition(".")[2].lower()
    return str(table()["dtypes"].get(plain, plain))[:40]


def leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what nested lists and objects hold that is neither, an object that `is_leaf` included, with its path."""
    path: list[str] = []
    around: list[Iterator[tuple[str, Any]]] = []
    inner, down = value, True
    while down or around:
        if down and (members := _members(inner)) is not None:
            around.append(members)
            path.append("")
        elif down:
            yield tuple(path), inner
        down = False
        if around:
            found = next(around[-1], None)
            if found is None:
                around.pop()
                path.pop()
            else:
                path[-1], inner = found
                down = True


def _members(value: Any) -> Iterator[tuple[str, Any]] | None:
    if isinstance(value, list):
        return ((str(k), one) for k, one in enumerate(value))
    if isinstance(value, dict) and not is_leaf(value):
        return ((str(key), one) for key, one in value.items())
    return None


def is_leaf(value: dict[str, Any]) -> bool:
    """Tell whether an object describes one tensor or one value."""
    return isinstance(value.get("type"), str) or isinstance(value.get("class_type"), str)


def module_name(parts: list[str]) -> tuple[str, str]:
    """Return scope and class of a module: ``layers.0.norm.LayerNorm``."""
    return ".".join(parts[:-1]), parts[-1] if parts else ""


def sizes(shape: Any) -> tuple[int, ...] | None:
    """Return a shape, None where it is none."""
    if not isinstance(shape, (list, tuple)) or len(shape) > 64:
        return None
    return tuple(shape) if all(type(size) is int and 0 <= size < 2**62 for size in shape) else None


FIGURES = ("max", "min", "mean", "norm")


def told_statistics(
    numbers: Sequence[Any], dtype: str | None, shape: tuple[int, ...] | None
) -> tuple[dict[str, float], str | None]:
    """Return columns of a record, and the numbers as JSON where they do not mean what the columns do.

    >>> told_statistics((2.0, -1.0, 0.5, 3.0), "float32", (4,))
    ({'max': 2.0, 'min': -1.0, 'n_nan': 0, 'n_posinf': 0, 'n_neginf': 0, 'mean': 0.5, 'l2': 3.0}, None)
    >>> told_statistics((float("inf"), -1.0, float("inf"), float("inf")), "float32", (4,))
    ({}, '{"max": "inf", "min": -1.0, "mean": "inf", "norm": "inf"}')

    ``numbers`` are max, min, mean and norm, unknown where they are no numbers; ``dtype`` is the tensor's, without prefix.
    """
    known = {name: value for name, number in zip(FIGURES, numbers, strict=False) if (value := _number(number)) is not None}
    if not known:
        return {}, None
    extremes = known.get("max", math.nan) - known.get("min", math.nan)
    if dtype is None or shape is None or dtype.startswith("complex") or not math.isfinite(extremes):  # complex: of magnitudes
        return {}, _told(known)
    if any(is_mask(known[name], dtype) for name in ("max", "min")):
        return {}, _told(known)
    columns = {"max": known["max"], "min": known["min"], "n_nan": 0, "n_posinf": 0, "n_neginf": 0}
    if math.isfinite(known.get("mean", math.nan)):
        columns["mean"] = known["mean"]
    if math.isfinite(known.get("norm", math.nan)):
        columns["l2"] = abs(known["norm"])  # of a scalar the tools give the value itself
    overflown = any(name in known and not math.isfinite(known[name]) for name in ("mean", "norm"))
    return columns, _told(known) if overflown else None


def _told(known: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else str(value) for name, value in known.items()})


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, str) and value.strip().lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    return None


Shape = tuple[int, ...] | None  # none of a gradient that is not there, because its tensor wants none


class Left(NamedTuple):
    """What a gradient is in our words."""

    slot: str
    transposed: bool = False  # whether the dump has it with rows and columns exchanged: ``addmm`` gets the transposed weight


def left_gradients(op: str, shapes: Sequence[Shape]) -> list[Left]:
    """Return what each gradient is that left the last node of a call.

    >>> left_gradients("torch.nn.functional.gelu", [(2, 8)])
    [Left(slot='grad_input.0', transposed=False)]
    >>> [left.slot for left in left_gradients("torch.nn.functional.linear", [(8,), (4, 16), (16, 8)])]
    ['grad_input.2', 'grad_input.0', 'grad_input.1']
    """
    known = _of_linear(shapes) if op == "torch.nn.functional.linear" else None
    if known is None:
        order = nodes(op)
        known = [Left(f"grad_input.{name}") for name in order] if order is not None and len(order) == len(shapes) else None
    return known or [Left(f"grad_input.node.{k}") for k in range(len(shapes))]


def _of_linear(shapes: Sequence[Shape]) -> list[Left] | None:
    """Tell by the shapes which node ended a linear layer: ``addmm(bias, input, weight.t())``, ``mm(input, weight.t())``, itself.
    A node with a single gradient, of any shape, is a view of the product."""
    ranks = [None if shape is None else len(shape) for shape in shapes]
    given, weight, bias = Left("grad_input.0"), Left("grad_input.1"), Left("grad_input.2")
    if len(ranks) == 3 and ranks[0] in (1, None) and ranks[1] in (2, None) and ranks[2] in (2, None) and ranks[1:] != [None, None]:
        return [bias, given, weight._replace(transposed=True)]
    if len(ranks) == 3 and ranks[1] in (2, None) and ranks[2] in (1, None) and ranks[0] is not None and ranks[0] > 1:
        return [given, weight, bias]
    if ranks in ([2, 2], [None, 2], [2, None]):
        return [given, weight._replace(transposed=True)]
    return None


def transposed(tensor: ForeignTensor) -> ForeignTensor:
    """Exchange rows and columns of a matrix; its checksum compares with none of the other order, but an XOR has no order."""
    load: Callable[[], Array] | None = partial(_load_transposed, tensor) if tensor.load is not None else None
    shape = tensor.shape[::-1] if tensor.shape is not None else None
    algorithm, _, value = (tensor.checksum or "").partition(":")
    checksum = tensor.checksum if algorithm.startswith("xor") or not value else f"{algorithm}-transposed:{value}"
    return replace(tensor, shape=shape, checksum=checksum, load=load, strides=None)


def _load_transposed(tensor: ForeignTensor) -> Array:
    assert tensor.load is not None
    array = tensor.load()
    if tensor.shape is not None and array.shape != tensor.shape:
        raise UnreadableError(f"the file holds shape {list(array.shape)} where the dump says {list(tensor.shape)}")
    return np.ascontiguousarray(array.T)


MARKER, NAMES = "trueup.json", "trueup-names.jsonl"
SIZE_LIMIT = 1 << 16
MOST_NAMES = 1 << 22
_CAPTURE = re.compile(r"(?:\.\./){1,3}[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""A capture lies a few folders above, and nowhere else, whatever a marker says."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of ``trueup.json``."""

    capture: str  # path of the native capture from the marker's folder
    rank: int  # the capture's rank that the folder is of
    step: int | None  # the step, None where the folder holds all
    filtered: bool  # whether integers, booleans, and tensors without dimensions or elements were left out
    sides: tuple[str, ...]  # which of all, forward, backward, input and output were asked for
    levels: tuple[str, ...]

    def to_json(self, version: str) -> dict[str, Any]:
        """Encode; ``version`` is Trueup's."""
        return {
            "written_by": f"trueup {version}", "gradients": "arguments", "capture": self.capture, "rank": self.rank,
            "step": self.step, "filtered": self.filtered, "sides": list(self.sides), "levels": list(self.levels),
        }  # fmt: skip


def marker_in_tree(tree: Tree, path: str) -> Marker | None:
    """Return the marker beside a file of a dump, None where there is none; the files of the marker count as read."""
    folder = folder_of(path)
    found = tree.within(folder, MARKER)
    if found is None:
        return None
    if (names := tree.within(folder, NAMES)) is not None:
        tree.open(names).close()
    with tree.open(found) as file:
        return _parse(file.read(SIZE_LIMIT))


def marker_beside(path: Path) -> Marker | None:
    """Return the marker beside a file."""
    try:
        with path.with_name(MARKER).open("rb") as file:
            return _parse(file.read(SIZE_LIMIT))
    except OSError:
        return None


def names_beside(path: Path) -> dict[int, str]:
    """Return the tool's names of calls, by their `seq`; lines that are none are passed over."""
    found: dict[int, str] = {}
    try:
        with path.with_name(NAMES).open(encoding="utf-8", errors="replace") as file:
            while len(found) < MOST_NAMES and (line := file.readline(SIZE_LIMIT)):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], str):
                    found[entry[0]] = entry[1]
    except OSError:
        pass
    return found


def _parse(content: bytes) -> Marker | None:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("gradients") != "arguments":
        return None
    capture, rank, step = told.get("capture"), told.get("rank"), told.get("step")
    lists = [tuple(map(str, told[name][:8])) if isinstance(told.get(name), list) else () for name in ("sides", "levels")]
    if not isinstance(capture, str) or not _CAPTURE.fullmatch(capture):
        return None
    if type(rank) is not int or not (step is None or type(step) is int):
        return None
    return Marker(capture, rank, step, bool(told.get("filtered")), lists[0] or ("all",), lists[1] or ("api",))
