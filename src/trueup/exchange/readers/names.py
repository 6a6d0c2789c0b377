"""How names of the Ascend tools become Trueup's: ``Functional.linear`` is ``torch.nn.functional.linear``.

Both ptdbg and msprobe name an API by where its function was found (``Tensor``, ``Torch``, ``Functional`` ...) and count it; the
count is not kept, for it runs over the whole step and one more call would rename all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from trueup.foundation import toml

PREFIXES = {
    "Functional": "torch.nn.functional.", "Tensor": "torch.Tensor.", "Torch": "torch.", "VF": "torch.", "NPU": "torch_npu.",
    "Aten": "aten::", "Distributed": "torch.distributed.", "MindSpeed": "mindspeed.", "Triton": "triton.",
}  # fmt: skip
"""Kinds of API in PyTorch dumps: what their names begin with in a capture."""

MINDSPORE = {
    "Functional": "mindspore.ops.", "Tensor": "mindspore.Tensor.", "Mint": "mindspore.mint.", "Primitive": "mindspore.ops.",
    "MintFunctional": "mindspore.mint.nn.functional.", "MintDistributed": "mindspore.mint.distributed.", "Jit": "mindspore.jit.",
    "Distributed": "mindspore.communication.comm_func.", "Torch": "torch.", "NPU": "torch_npu.",
}  # fmt: skip
"""The same in MindSpore dumps."""

MODULES = ("Module", "Cell")

DTYPES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16"}


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return toml.packaged(__package__, "torch_names.toml")


def operator(kind: str, api: str, framework: str | None = "torch") -> tuple[str, str, str]:
    """Return ``(op, level, phase)`` of a forward call of an API.

    >>> operator("Functional", "linear")
    ('torch.nn.functional.linear', 'api', 'forward')
    >>> operator("Tensor", "__matmul__")
    ('torch.Tensor.matmul', 'api', 'forward')
    """
    if kind == "Functional" and framework != "mindspore" and api in (known := _table()["passed_on"]):
        return str(known[api]), "api", "forward"
    prefix = (MINDSPORE if framework == "mindspore" else PREFIXES).get(kind, f"{kind}.")
    if kind == "Tensor" and framework != "mindspore":
        api = _table()["tensor"].get(api, api)
    level = "aten" if kind == "Aten" else "api"
    phase = "collective" if kind in ("Distributed", "MintDistributed") else "forward"
    return prefix + api, level, phase


def argument(op: str, position: str) -> str:
    """Return the name under which a native capture knows a positional argument: mostly its position.

    >>> argument("torch.nn.functional.layer_norm", "2")
    'weight'
    """
    names = _table()["functional"].get(op.removeprefix("torch.nn.functional.")) if position.isdigit() else None
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
    names: list[Any] = list(_table()["functional"].get(op.removeprefix("torch.nn.functional."), ())) if known else []
    return str(int(names[0]) + names.index(name) - 1) if name in names[1:] else name


def nodes(op: str) -> list[str] | None:
    """Return which arguments' gradients leave the autograd node that a function is, in order; None where it is not one node."""
    found = _table()["nodes"].get(op)
    return None if found is None else [str(name) for name in found]


def dtype(name: Any) -> str | None:
    """Return the name of a dtype without its framework: ``torch.float32``, ``paddle.float32`` and ``Float32`` are ``float32``."""
    if not isinstance(name, str) or not name:
        return None
    plain = name.rpartition(".")[2].lower()
    return DTYPES.get(plain, plain)[:40]


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
