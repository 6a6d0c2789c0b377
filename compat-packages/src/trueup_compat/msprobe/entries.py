"""One entry of ``dump.json``, made of the rows of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trueup_compat.files import Row, numbers_of
from trueup_compat.names import tool_slot

SIDES = {"input": "input_args", "output": "output"}
SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}
NAMES = ("Max", "Min", "Mean", "Norm")

Keep = Callable[[str, Row], str | None]
"""Keeps a tensor under a name; returns its file's name, None where there are no bytes."""


def entry_of(call: Sequence[Row], name: str, sides: Sequence[str], summary: str, keep: Keep) -> dict[str, Any]:
    """Return the entry of a call; empty where nothing of it was asked for.

    Args:
        call: its rows.
        name: of the entry.
        sides: of all, forward, backward, input, output: what was asked for.
        summary: ``statistics``, ``md5`` or ``xor``; the last two have the digest.
        keep: keeps tensors.
    """
    backward = call[0]["phase"] == "backward"
    trees: dict[str, dict[str, Any]] = {}
    requires = _requiring(call)
    for row in call:
        if row["slot"] == "arguments" or row["dtype"] is None:
            continue
        group, path = _place(row, backward)
        if group is None or not asked(sides, "backward" if backward else "forward", group):
            continue
        side = "input" if group in ("input_args", "input_kwargs", "input") else group
        leaf = _tensor(row, summary, requires=row["slot"] in requires)
        if (file := keep(".".join((name, side, *path)), row)) is not None:
            leaf["data_name"] = file
        _put(trees.setdefault(group, {}), path, leaf)
    if not backward and asked(sides, "forward", "input"):
        for group, path, leaf in _scalars(call):
            _put(trees.setdefault(group, {}), path, leaf)
    if not any(group in trees for group in ("input_args", "input_kwargs", "input", "output")):
        return {}
    groups = ("input", "output") if backward else ("input_args", "input_kwargs", "output", "parameters")
    return {group: _shaped(trees.get(group, {}), group) for group in groups if group in trees or group != "parameters"}


def require_gradients(entries: Mapping[str, dict[str, Any]]) -> None:
    """Mark what a backward gives a gradient, or gets one of, in the entry of its forward: ``requires_grad``.

    The capture says of inputs alone what requires a gradient, and only at detail tensor.
    """
    for name, backward in entries.items():
        forward = entries.get(re.sub(r"\.backward(?=$|\.\d+$)", ".forward", name), backward)
        if forward is backward:
            continue
        for gradients, held in (("output", "input_args"), ("input", "output")):
            for gradient, leaf in zip(backward.get(gradients, ()), forward.get(held, ()), strict=False):
                if isinstance(gradient, dict) and isinstance(leaf, dict) and "requires_grad" in leaf:
                    leaf["requires_grad"] = True


def asked(sides: Sequence[str], direction: str, group: str) -> bool:
    """Tell whether ``data_mode`` asks for a side (``output``, else an input) of a direction's calls."""
    if "all" in sides:
        return True
    end = "output" if group == "output" else "input"
    directions = [side for side in sides if side in ("forward", "backward")]
    ends = [side for side in sides if side in ("input", "output")]
    return (not directions or direction in directions) and (not ends or end in ends)


def _place(row: Row, backward: bool) -> tuple[str | None, list[str]]:
    """Return the group and the path in it."""
    if row["slot"].startswith("param."):
        return ("parameters", [row["slot"].removeprefix("param.")]) if not backward else (None, [])
    slot = tool_slot(row["op"], row["slot"])
    if slot is None:
        return None, []
    side, *path = slot.split(".")
    if backward:
        return side, path
    if side == "input" and not path[0].isdigit():
        return "input_kwargs", path
    return SIDES[side], path


def _tensor(row: Row, summary: str, *, requires: bool) -> dict[str, Any]:
    numbers = numbers_of(row, norm=True)
    leaf: dict[str, Any] = {"type": "torch.Tensor", "dtype": f"torch.{row['dtype']}", "shape": row["shape"]}
    leaf |= dict(zip(NAMES, numbers, strict=True)) if numbers else dict.fromkeys(NAMES)
    leaf["requires_grad"] = requires
    if summary != "statistics" and row["digest"]:
        leaf["md5"] = row["digest"]
    return leaf


def _requiring(call: Sequence[Row]) -> set[str]:
    """Return the slots whose tensors require gradients, as far as the capture tells: at detail tensor it knows of inputs."""
    found: set[str] = set()
    for row in call:
        if row["slot"] == "arguments" and row.get("invocation"):
            pending: list[Any] = [json.loads(row["invocation"])]
            while pending:
                one = pending.pop()
                if isinstance(one, dict) and isinstance(one.get("tensor"), str):
                    found |= {one["tensor"]} if one.get("grad") else set()
                elif isinstance(one, (dict, list)):
                    pending += one.values() if isinstance(one, dict) else one
    return found


def _scalars(call: Sequence[Row]) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield what the call was given beside tensors."""
    for row in call:
        if row["slot"] != "arguments" or not row["value"]:
            continue
        given = json.loads(row["value"])
        for key, value in given.items() if isinstance(given, dict) else ():
            place = (tool_slot(row["op"], f"input.{key}") or "").partition(".")[2]
            values = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for k, one in values:
                if type(one) in SCALARS and place:
                    group = "input_args" if place.isdigit() else "input_kwargs"
                    yield group, [place] if k is None else [place, str(k)], {"type": SCALARS[type(one)], "value": one}


def _put(tree: dict[str, Any], path: Sequence[str], leaf: dict[str, Any]) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = leaf


def _shaped(tree: Mapping[str, Any], group: str) -> Any:
    """Return lists where the members are numbered, null where a number is missing; a leaf stays what it is."""
    if group not in ("input_kwargs", "parameters") and not tree:
        return []
    return _inner(tree) if group not in ("input_kwargs", "parameters") else {key: _inner(value) for key, value in tree.items()}


def _inner(tree: Any) -> Any:
    if not isinstance(tree, dict) or "type" in tree:
        return tree
    if not all(key.isdigit() for key in tree):
        return {key: _inner(value) for key, value in tree.items()}
    return [_inner(tree[str(k)]) if str(k) in tree else None for k in range(1 + max(map(int, tree)))]
