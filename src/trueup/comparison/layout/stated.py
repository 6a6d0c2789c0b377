"""How weights lie along the axis that cuts the model, as the parameters say themselves (Megatron; `recording.engine.placements`).

Where one parameter of a run says that it is cut, one that does not is a replica. Of several axes nobody says which is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trueup.comparison.layout.calls import Key, plain
from trueup.comparison.layout.pieces import REPLICATED, Way
from trueup.foundation.frameworks.trees import LIES, path
from trueup.foundation.settings import modules_of


def stated_in(manifest: Mapping[str, Any]) -> dict[str, Way]:
    """Return the way of each weight, by name; nothing where no weight says that it is cut."""
    modules = modules_of(manifest)
    root = next(iter(modules), "")
    prefix = f"{root}." if root and all(name == root or name.startswith(f"{root}.") for name in modules) else ""
    found = {plain(name.removeprefix(prefix)): way for name, told in _told(manifest) if (way := _way(told)) is not None}
    return found if any(way.kind == "sharded" for way in found.values()) else {}


def flat_order(manifests: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the weights in the order in which flat buffers hold them (DeepSpeed, ZeRO 1 and 2), where each says where."""
    begins: dict[str, tuple[int, int]] = {}
    for rank, manifest in sorted(manifests.items()):
        for name, told in _told(manifest):
            flat, weight = (told.get(one, "").partition(":")[0] for one in ("zero_flat", "zero_weight"))
            if weight == "0" and flat.isdigit():
                begins.setdefault(plain(name), (rank, int(flat)))
    return sorted(begins, key=lambda name: begins[name])


def _told(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the weights that say how they lie, by path, and what they say."""
    for scope, module in modules_of(manifest).items():
        for name, said in module.items():
            if name.endswith(LIES) and isinstance(said, str):
                yield path(scope, name.removesuffix(LIES)), dict(word.partition("=")[::2] for word in said.split())


def _way(told: Mapping[str, str]) -> Way | None:
    dim, stride = told.get("partition_dim", ""), told.get("partition_stride", "1")
    if told.get("tensor_model_parallel") == "False" or told.get("sequence_parallel") == "":
        return REPLICATED
    if told.get("tensor_model_parallel") != "" or not dim.isdigit():
        return None
    packs = int(stride) if stride.isdigit() and len(stride) < 4 else 1
    return Way("sharded", int(dim), "interleaved", parts=(1,) * packs) if packs > 1 else Way("sharded", int(dim))


def stated_of(name: str, stated: Mapping[str, Way], dims: int) -> Way | None:
    """Return the way of a weight of so many dimensions, None where nobody says it. A vector beside a weight that is cut along its
    rows, and that says nothing, is cut as they are: it is their bias."""
    if name in stated or dims != 1:
        return stated.get(name)
    beside = stated.get(f"{name.rpartition('.')[0]}.weight")
    return beside if beside is not None and beside.kind == "sharded" and beside.dim == 0 else None


def weight_of(key: Key, slot: str, updated: Mapping[Key, str]) -> str:
    """Return the weight that a slot holds, or the gradient or state of; empty where it is none."""
    if slot.startswith("param."):
        return path(key[2], slot.removeprefix("param."))
    if key[0] == "optimizer" and slot.startswith("input.") and slot.endswith(".grad"):
        return slot.removeprefix("input.").removesuffix(".grad")
    return updated.get(key, "")
