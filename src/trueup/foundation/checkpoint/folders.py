"""Checkpoints in several files: shards that an index names, DCP's folders, the ranks of Megatron and of FSDP joined."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.checkpoint.inert import DTYPES, Foreign, Inert
from trueup.foundation.checkpoint.reading import Array, Checkpoint, Held, from_stream, open_checkpoint, whole

ROWS = ("dense.weight", "linear_proj.weight", "dense_4h_to_h.weight", "linear_fc2.weight", "o_proj.weight", "down_proj.weight")
"""Ends of names of weights that Megatron splits along their second dimension (row-parallel layers); others along their first."""
WHOLE = re.compile(r"norm|router|position_embeddings|(?:dense|linear_proj|dense_4h_to_h|linear_fc2)\.bias")
"""Names of what every rank of tensor parallelism holds whole."""
GATED = re.compile(r"(?:dense_h_to_4h|linear_fc1)\.(?:weight|bias)$")
LAYER = re.compile(r"(?<=layers\.)(\d+)(?=\.)")
EXPERT = re.compile(
    r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
)
"""The number of an expert among those of its rank."""
GROUPED = (".experts.weight1", ".experts.weight2")
"""Ends of names of weights that hold all experts of a rank."""
RANK = re.compile(r"rank[_-]?(\d+)[^/]*\.(?:pt|pth|bin|ckpt)$")
FLAT = ("_flat_param", "flat_param")
"""Ends of names of FSDP's flat parameters: all parameters of a module in one."""


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
    places: dict[str, list[tuple[tuple[int, ...], Path, int, int]]] = {}
    for index, info in held.field("storage_data").items():
        file = folder / Path(info.field("relative_path")).name
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
        row = tuple(map(int, index.field("offset") or ())), file, int(info.field("offset")), int(info.field("length"))
        places.setdefault(index.field("fqn"), []).append(row)
    found = Checkpoint(str(folder), kind)
    for name, meta in held.field("state_dict_metadata").items():
        size = meta.field("size") if isinstance(meta, Foreign) else None
        if size is None:
            found.values[name] = "bytes"
            continue
        dtype = next((str(one) for one in _flat(meta.field("properties")) if str(one) in DTYPES), None)
        if dtype is None:
            raise ValueError(f"{name} has a dtype that is not known")
        top = "optimizer" if name.startswith("optim") else "model" if name.startswith("model.") else ""
        sizes = {tuple(one.field("offsets")): tuple(map(int, one.field("sizes"))) for one in meta.field("chunks")}
        pieces = tuple(
            (at, Held(sizes[at], dtype, partial(from_tensor, file, start, length))) for at, file, start, length in places[name]
        )
        plain = name.partition(".")[2] if top else name
        found.parts.setdefault(top, {})[plain] = whole(tuple(map(int, size)), dtype, pieces)
    return found


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Foreign):
        value = value.state
    if isinstance(value, dict):
        value = list(value.values())
    return [inner for one in value for inner in _flat(one)] if isinstance(value, (list, tuple)) else [value]


def from_tensor(file: Path, start: int, length: int) -> Array:
    """Read the one tensor that torch.save wrote at a place in a file."""
    held = from_stream(file, "torch.save", length, start)
    return next(iter(held.parts[""].values())).read()


def megatron(folder: Path, kind: str) -> Checkpoint:
    """Join ranks of tensor, pipeline and expert parallelism: ``mp_rank_<tensor>[_<pipeline>][_<expert>]/*.pt``."""
    files: dict[tuple[int, ...], Checkpoint] = {}
    for one in sorted(folder.glob("mp_rank_*")):
        inside = sorted(one.glob("*.pt")) if one.is_dir() else [one]
        weights = next((file for file in inside if "optim" not in file.name or file.name == "model_optim_rng.pt"), None)
        if weights is None:
            raise ValueError(f"{one.name} holds no file of weights")
        files[tuple(int(number) for number in re.findall(r"\d+", one.name))[:3]] = open_checkpoint(weights)
    said = next(iter(files.values())).arguments
    ranks = _placed(files, said)
    widths = [len({key[axis] for key in ranks}) for axis in range(3)]
    for stage, rank, expert in product(*(range(max(key[axis] for key in ranks) + 1) for axis in (1, 0, 2))):
        if (rank, stage, expert) not in ranks:
            which = f", expert rank {expert}," if widths[2] > 1 else ""
            raise ValueError(f"rank {rank} of tensor parallelism in stage {stage}{which} is missing")
    if widths[2] > 1 and said.get("expert_tensor_parallel_size") not in (None, widths[0]):
        raise ValueError("its experts are cut by another number of tensor ranks than the rest, which is not joined")
    experts = f", expert parallel {widths[2]}" if widths[2] > 1 else ""
    found = Checkpoint(str(folder), f"{kind}, tensor parallel {widths[0]}, pipeline parallel {widths[1]}{experts}")
    part, before, gated = found.parts.setdefault("", {}), 0, said.get("swiglu", said.get("gated_linear_unit"))
    for stage in range(widths[1]):
        sides = [_experts([ranks[rank, stage, one].part(None) for one in range(widths[2])]) for rank in range(widths[0])]
        layers = {int(number[1]) for name in sides[0] if (number := LAYER.search(name))}
        shift = before if layers and min(layers) < before else 0
        for name in sides[0]:
            shards = [side[name] for side in sides]
            new = _shifted(name, shift)
            if new not in part:  # the first stage's embedding stands again in the last
                part[new] = _parallel(name, shards, bool(gated))
        before += len(layers)
    if widths[0] > 1 and gated is None and any(GATED.search(name) for name in part):
        found.notes.append(
            "layers fc1 are joined as they lie: where they hold gate and up halves (SwiGLU), the halves of ranks alternate"
        )
    return found


def _placed(files: dict[tuple[int, ...], Checkpoint], said: dict[str, Any]) -> dict[tuple[int, int, int], Checkpoint]:
    """Return the files by rank of tensor, pipeline and expert parallelism. Of two numbers the second is the stage, or with one
    stage the expert rank: stages hold different tensors, expert ranks tensors of the same names."""
    width = max(map(len, files))
    alike = {tuple(one.part(None)) for one in files.values()}
    expert = width == 2 and (
        said["pipeline_model_parallel_size"] == 1
        if "pipeline_model_parallel_size" in said
        else len(alike) == 1 and any(EXPERT.search(name) for name in next(iter(alike)))
    )
    return {(key[0], 0, key[1]) if expert else ((*key, 0, 0)[:3]): one for key, one in files.items()}  # type: ignore[misc]


def _shifted(name: str, by: int) -> str:
    """Return a name with the number of its layer counted from the first stage on."""
    number = LAYER.search(name)
    return name if number is None else f"{name[: number.start()]}{int(number[1]) + by}{name[number.end() :]}"


def _experts(ranks: list[dict[str, Held]]) -> dict[str, Held]:
    """Join the experts of several ranks, numbered through. Of the rest all hold the same: reading raises ValueError if not."""
    if len(ranks) == 1:
        return ranks[0]
    found: dict[str, Held] = {}
    numbers = {name: number for name in ranks[0] if (number := EXPERT.search(name))}
    local: dict[str, set[str]] = {}
    for name, number in numbers.items():
        local.setdefault(name[: number.start()], set()).add(number[0])
    for name, held in ranks[0].items():
        sides = [rank[name] for rank in ranks]
        if (number := numbers.get(name)) is not None:
            before = name[: number.start()]
            for rank, one in enumerate(sides):
                found[f"{before}{int(number[0]) + rank * len(local[before])}{name[number.end() :]}"] = one
        elif name.endswith(GROUPED):
            rows = name.endswith("2")
            total = sum(one.shape[0 if rows else 1] for one in sides)
            shape = (total, held.shape[1]) if rows else (held.shape[0], total)  # an expert lies after the one before it, in memory
            found[name] = Held(shape, held.dtype, partial(_in_turn, sides, shape))
        else:
            found[name] = Held(held.shape, held.dtype, partial(_same, name, sides))
    return found


def _in_turn(sides: list[Held], shape: tuple[int, ...]) -> Array:
    return np.concatenate([one.read().ravel() for one in sides]).reshape(shape)


def _same(name: str, sides: list[Held]) -> Array:
    first = sides[0].read()
    if any(one.read().tobytes() != first.tobytes() for one in sides[1:]):
        raise ValueError(f"ranks of expert parallelism should hold the same {name}, and do not")
    return first


def _parallel(name: str, shards: list[Held], gated: bool) -> Held:
    """Join what ranks of tensor parallelism hold of a weight; ``gated``: fc1 has gate and up halves, in each rank."""
    first, plain = shards[0], name.rstrip("0123456789")
    if len(shards) == 1 or not first.shape or WHOLE.search(plain):
        return first
    if name.endswith(GROUPED):
        raise ValueError(f"{name} has all experts in one tensor, cut by ranks of tensor parallelism too, which is not joined")
    dim = 1 if plain.endswith(ROWS) and len(first.shape) > 1 else 0
    shape = list(first.shape)
    shape[dim] = sum(one.shape[dim] for one in shards)

    def read() -> Array:
        read = [one.read() for one in shards]
        halves = [np.split(one, 2) for one in read] if gated and GATED.search(plain) else []
        return np.concatenate([half[side] for side in (0, 1) for half in halves] or read, dim)

    return Held(tuple(shape), first.dtype, read)


def ranks(folder: Path, kind: str) -> Checkpoint:
    """Join files that ranks wrote with torch.save (``model_world_size_2_rank_0.pt``): pieces of FSDP's tensors; of what each rank
    holds whole (buffers), the first rank's. Each kind of file is a part."""
    groups: dict[str, dict[int, Path]] = {}
    for file in sorted(folder.iterdir()):
        if (number := RANK.search(file.name)) is not None:
            start = re.split(r"[._-]*(?:world|rank)", file.name)[0]
            if groups.setdefault(start, {}).setdefault(int(number[1]), file) is not file:
                raise ValueError(f"two files of rank {number[1]}")
    found = Checkpoint(str(folder), kind)
    for start, files in groups.items():
        said = re.search(r"world_size[_-]?(\d+)", files[min(files)].name)
        missing = sorted(set(range(int(said[1]) if said else max(files) + 1)) - set(files))
        if missing:
            raise ValueError(f"the file of rank {missing[0]} is missing ({start})")
        opened = [open_checkpoint(files[rank]) for rank in sorted(files)]
        found.values |= opened[0].values
        for name in opened[0].parts:
            title = name if len(groups) == 1 else f"{start}.{name}" if name else start
            found.parts[title] = _pieces([one.part(name) for one in opened])
    return found


def _pieces(sides: list[dict[str, Held]]) -> dict[str, Held]:
    flat = any(name.endswith(FLAT) for name in sides[0])
    found = {}
    for name, first in sides[0].items():
        held = [side[name] for side in sides if name in side]
        if first.pieces:
            pieces = tuple(piece for one in held for piece in one.pieces)
            if all(
                at is not None and not any(at) and piece.shape == first.shape for at, piece in pieces
            ):  # each rank has all of it
                pieces = pieces[:1]
            found[name] = whole(first.shape, first.dtype, pieces, first.dim)
        elif not flat or len({one.shape for one in held}) == 1:  # else a rank's part of the flat parameter, which has it too
            found[name] = first
    return found
