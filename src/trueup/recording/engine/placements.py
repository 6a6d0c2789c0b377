"""How a parameter lies on the ranks, as Megatron and DeepSpeed write on the parameter itself.

    tensor_model_parallel partition_dim=0 partition_stride=3    Megatron: rows, of three packed weights a piece each
    sequence_parallel                                           Megatron: a replica whose gradient is a term of a sum
    ds_shape=41x16 ds_part=328                                  DeepSpeed, ZeRO 3: flat, 328 elements on this rank
    zero_group=0 zero_flat=128:656 zero_weight=0:656            DeepSpeed, ZeRO 1 and 2: 656 elements, from the first on, lie in the
                                                                flat buffer of the group from 128 on

Only attributes are read that the object holds itself; nothing is computed.
"""

from __future__ import annotations

from typing import Any

FLAGS = ("tensor_model_parallel", "sequence_parallel", "expert_tp", "allreduce")
NUMBERS = ("partition_dim", "partition_stride")


def placement(parameter: Any) -> str:
    """Return what a parameter says of how it lies; empty where neither library has written anything on it."""
    held = getattr(parameter, "__dict__", None)
    if not held:
        return ""
    told = [f"{name}={value}" if not value else name for name in FLAGS if type(value := held.get(name)) is bool]
    told += [f"{name}={value}" for name in NUMBERS if type(value := held.get(name)) is int]
    shape, part = held.get("ds_shape"), held.get("ds_tensor")
    if isinstance(shape, tuple) and all(type(size) is int for size in shape):
        told += [f"ds_shape={'x'.join(map(str, shape))}"]
        told += [f"ds_part={part.numel()}"] if part is not None and hasattr(part, "numel") else []
    mapping = held.get("_hp_mapping")
    for name, address in (("zero_flat", "hp_fragment_address"), ("zero_weight", "lp_fragment_address")):
        at = getattr(mapping, address, None)
        start, length = getattr(at, "start", None), getattr(at, "numel", None)
        if type(start) is int and type(length) is int:
            told.append(f"{name}={start}:{length}")
    group = getattr(mapping, "param_group_index", None)
    return " ".join([*told, *([f"zero_group={group}"] if type(group) is int else [])])
