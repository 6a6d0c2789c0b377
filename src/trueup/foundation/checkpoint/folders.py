"""Checkpoints in several files: shards that an index names, DCP's folders, Megatron's ranks joined."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.checkpoint.inert import Foreign, Inert
from trueup.foundation.checkpoint.reading import Array, Checkpoint, Held, from_stream, open_checkpoint
from trueup.foundation.store.segment import numpy_dtype

ROWS = ("dense.weight", "linear_proj.weight", "dense_4h_to_h.weight", "linear_fc2.weight", "o_proj.weight", "down_proj.weight")
"""Ends of names of weights that Megatron splits along their second dimension (row-parallel layers); others along their first."""
WHOLE = re.compile(r"norm|router|position_embeddings|(?:dense|linear_proj|dense_4h_to_h|linear_fc2)\.bias")
"""Names of what every rank of tensor parallelism holds whole."""
GATED = re.compile(r"(?:dense_h_to_4h|linear_fc1)\.(?:weight|bias)$")
LAYER = re.compile(r"(?<=layers\.)(\d+)(?=\.)")


def indexed(folder: Path, kind: str) -> Checkpoint:
    """Join the shards that an index names."""
    file = next(iter(sorted(folder.glob("*.index.json"))))
    names: dict[str, str] = json.loads(file.read_text("utf-8"))["weight_map"]
    found = Checkpoint(str(folder), kind)
    part = found.parts.setdefault("", {})
    opened: dict[str, dict[str, Held]] = {}
    for name, shard in names.items():
        if Path(shard).name != shard:
            raise ValueError(f"its index names a file outside the folder: {shard!r}")
        if not (folder / shard).is_file():
            raise ValueError(f"the shard {shard} of its index is missing")
        if shard not in opened:
            one = open_checkpoint(folder / shard)
            opened[shard] = one.part(None)
        if name not in opened[shard]:
            raise ValueError(f"{shard} lacks {name}, which the index says it holds")
        part[name] = opened[shard][name]
    return found


def distributed(folder: Path, kind: str) -> Checkpoint:
    """Join the pieces of torch.distributed.checkpoint; its metadata is a pickle, read without running anything."""
    with (folder / ".metadata").open("rb") as stream:
        held = Inert(stream).load()
    pieces: dict[str, list[tuple[tuple[int, ...], Path, int, int]]] = {}
    for index, info in held.field("storage_data").items():
        place = folder / Path(info.field("relative_path")).name
        offset = tuple(index.field("offset") or ())
        if not place.is_file():
            raise ValueError(f"{place.name} is missing")
        pieces.setdefault(index.field("fqn"), []).append((offset, place, int(info.field("offset")), int(info.field("length"))))
    found = Checkpoint(str(folder), kind)
    for name, meta in held.field("state_dict_metadata").items():
        size = meta.field("size") if isinstance(meta, Foreign) else None
        if size is None:
            found.values[name] = "bytes"
            continue
        dtype = next((str(one) for one in _flat(meta.field("properties")) if str(one) in _DTYPES), None)
        if dtype is None:
            raise ValueError(f"{name} has a dtype that is not known")
        top = "optimizer" if name.startswith("optim") else "model" if name.startswith("model.") else ""
        plain = name.partition(".")[2] if top else name
        shape = tuple(map(int, size))
        found.parts.setdefault(top, {})[plain] = Held(shape, dtype, lambda n=name, s=shape, d=dtype: _joined(pieces[n], s, d))  # type: ignore[misc]
    return found


_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Foreign):
        value = value.state
    if isinstance(value, dict):
        value = list(value.values())
    return [inner for one in value for inner in _flat(one)] if isinstance(value, (list, tuple)) else [value]


def _joined(pieces: list[tuple[tuple[int, ...], Path, int, int]], shape: tuple[int, ...], dtype: str) -> Array:
    whole = np.empty(shape, numpy_dtype(dtype))
    covered = 0
    for offset, file, start, length in pieces:
        one = from_tensor(file, start, length)
        whole[tuple(slice(at, at + size) for at, size in zip(offset or (0,) * one.ndim, one.shape, strict=True))] = one
        covered += one.size
    if covered != whole.size:
        raise ValueError(f"{covered:,} of {whole.size:,} elements are there")
    return whole


def from_tensor(file: Path, start: int, length: int) -> Array:
    """Read the one tensor that torch.save wrote at a place in a file."""
    held = from_stream(file, "torch.save", length, start)
    return next(iter(held.parts[""].values())).read()


def megatron(folder: Path, kind: str) -> Checkpoint:
    """Join ranks of tensor and pipeline parallelism: ``mp_rank_<tensor>[_<pipeline>[_<expert>]]/*.pt``."""
    ranks: dict[tuple[int, int], Checkpoint] = {}
    for one in sorted(folder.glob("mp_rank_*")):
        numbers = [int(number) for number in re.findall(r"\d+", one.name)]
        files = sorted(one.glob("*.pt")) if one.is_dir() else [one]
        if len(numbers) > 2:
            raise ValueError("ranks of expert parallelism, which are not joined")
        weights = next((file for file in files if "optim" not in file.name or file.name == "model_optim_rng.pt"), None)
        if weights is None:
            raise ValueError(f"{one.name} holds no file of weights")
        ranks[numbers[1] if len(numbers) > 1 else 0, numbers[0]] = open_checkpoint(weights)
    stages, width = {stage for stage, _ in ranks}, {rank for _, rank in ranks}
    missing = [(stage, rank) for stage in range(max(stages) + 1) for rank in range(max(width) + 1) if (stage, rank) not in ranks]
    if missing:
        raise ValueError(f"rank {missing[0][1]} of tensor parallelism in stage {missing[0][0]} is missing")
    found = Checkpoint(str(folder), f"{kind}, tensor parallel {len(width)}, pipeline parallel {len(stages)}")
    part, before = found.parts.setdefault("", {}), 0
    for stage in sorted(stages):
        sides = [ranks[stage, rank].part(None) for rank in sorted(width)]
        layers = {int(number[1]) for name in sides[0] if (number := LAYER.search(name))}
        shift = before if layers and min(layers) < before else 0
        for name in sides[0]:
            shards = [side[name] for side in sides]
            whole = _shifted(name, shift)
            if whole not in part:  # the first stage's embedding stands again in the last
                part[whole] = _parallel(name, shards)
        before += len(layers)
    if len(width) > 1 and any(GATED.search(name) for name in part):
        found.notes.append(
            "layers fc1 are joined as they lie: where they hold gate and up halves (SwiGLU), the halves of ranks alternate"
        )
    return found


def _shifted(name: str, by: int) -> str:
    """Return a name with the number of its layer counted from the first stage on."""
    number = LAYER.search(name)
    return name if number is None else f"{name[: number.start()]}{int(number[1]) + by}{name[number.end() :]}"


def _parallel(name: str, shards: list[Held]) -> Held:
    first = shards[0]
    if len(shards) == 1 or not first.shape or WHOLE.search(name):
        return first
    dim = 1 if name.endswith(ROWS) and len(first.shape) > 1 else 0
    shape = list(first.shape)
    shape[dim] = sum(one.shape[dim] for one in shards)
    return Held(tuple(shape), first.dtype, lambda: np.concatenate([one.read() for one in shards], dim))
