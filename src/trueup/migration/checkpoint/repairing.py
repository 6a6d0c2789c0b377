"""`repair`: the tensors of one part of a checkpoint under the names of the model, written anew and read back to prove it.

The file that is written is safetensors: tensors alone, nothing that runs, one tensor in memory at a time (two for the proof).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trueup.foundation.checkpoint.folders import FLAT
from trueup.foundation.checkpoint.reading import SAFE, Array, Checkpoint, Held, open_checkpoint
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.foundation.words.wording import counted
from trueup.migration.checkpoint.naming import matched, unwrapped

CODES = {dtype: code for code, dtype in SAFE.items()}


@dataclass(frozen=True)
class Repair:
    """What was written. ``renamed`` are old and new names, ``missing`` and ``unexpected`` what a strict load would miss or refuse,
    ``shapes`` names of other shapes; ``left`` what else the checkpoint held."""

    source: str
    output: str
    part: str
    tensors: int
    nbytes: int
    renamed: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[tuple[str, str, str], ...]
    like: str
    left: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def strict(self) -> bool:
        """Return whether a strict load passes, as far as names and shapes of ``like`` say."""
        return bool(self.like) and not (self.missing or self.unexpected or self.shapes)

    @property
    def exit_code(self) -> int:
        """Return 0 where all is proved, 1 where a strict load would fail, 2 where there was nothing to prove it by."""
        return 0 if self.strict else 1 if self.like else 2

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        done = f"{counted(self.tensors, 'tensor')} written and read back bitwise, {len(self.renamed):,} under a new name"
        if self.strict:
            return f"{done}; names and shapes are those of {self.like}: a strict load passes."
        if not self.like:
            return f"{done}; whether they fit the model is not proved: --like a checkpoint of the model as it is."
        counts = (len(self.missing), "missing"), (len(self.unexpected), "unexpected"), (len(self.shapes), "of another shape")
        parts = [f"{count:,} {word}" for count, word in counts if count]
        return f"{done}; a strict load into {self.like} fails: {', '.join(parts)}."

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        head = {"schema": "trueup-checkpoint-repair", "schema_version": 1, "sentence": self.sentence, "exit_code": self.exit_code}
        return {**head, "strict": self.strict, **asdict(self)}


def repair(source: str | Path, output: str | Path, *, like: str | Path | None = None, part: str | None = None) -> Repair:
    """Write the tensors of a checkpoint under the names of the model.

    Args:
        source: the checkpoint.
        output: a new file, ``.safetensors``.
        like: a checkpoint of the model as it is (``torch.save(model.state_dict(), ...)``): its names and shapes are what a
        strict load
            wants. None: only what wrappers add is taken off, and nothing is proved.
        part: what is written; None: the weights. An optimizer's state is a part, too; it is held against that of ``like``.

    Raises:
        TrueupError: a checkpoint cannot be read, or the output exists or cannot be written.
    """
    target = Path(output)
    if target.suffix != ".safetensors" or target.exists():
        raise TrueupError(
            f"The repaired checkpoint cannot be written.\n  where:    {target}\n  expected: a new file that ends in .safetensors\n"
            f"  got:      {'a file that exists' if target.exists() else 'another ending'}\n"
            "  next:     -o fixed.safetensors; every framework reads it"
        )
    checkpoint = open_checkpoint(source)
    name = checkpoint.model if part is None else part
    held = checkpoint.part(name)
    reference = None if like is None else open_checkpoint(like)
    wanted = None if reference is None else reference.part(part if part in reference.parts else None)
    held = held if wanted is None else unflattened(held, wanted, str(source))
    names = unwrapped(held)
    if wanted is not None:
        fitting = matched(
            {one: tensor.shape for one, tensor in held.items()}, {one: tensor.shape for one, tensor in wanted.items()}
        )
        names = names | fitting
    renamed = {new: held[old] for old, new in names.items()}
    _written(renamed, target)
    _proved(renamed, target)
    want = wanted or {}
    return Repair(
        str(source), str(target), name, len(renamed), sum(one.nbytes for one in renamed.values()),
        tuple((old, new) for old, new in names.items() if old != new), tuple(one for one in want if one not in renamed),
        tuple(one for one in renamed if want and one not in want),
        tuple((one, str(list(renamed[one].shape)), str(list(want[one].shape))) for one in want if one in renamed and
        renamed[one].shape != want[one].shape),
        "" if like is None else str(like), _left(checkpoint, name), tuple(checkpoint.notes),
    )  # fmt: skip


def _left(checkpoint: Checkpoint, part: str) -> tuple[str, ...]:
    tensors = [f"{name} ({counted(len(held), 'tensor')})" for name, held in checkpoint.parts.items() if name != part]
    values = [name.split(".") for name in checkpoint.values]  # what is no tensor of the part itself is left out, too: param_groups
    said = dict.fromkeys(".".join(name[: 1 + (name[0] == part)]) for name in values)
    return (*tensors, *(name for name in said if name not in checkpoint.parts))


def _written(tensors: dict[str, Held], target: Path) -> None:
    head: dict[str, Any] = {}
    at = 0
    for name, one in tensors.items():
        if one.dtype not in CODES:
            raise TrueupError(
                f"A tensor cannot be written as safetensors.\n  where:    {name}\n  expected: {', '.join(CODES)}\n"
                f"  got:      {one.dtype}\n"
                "  next:     cast it first"
            )
        head[name] = {"dtype": CODES[one.dtype], "shape": list(one.shape), "data_offsets": [at, at + one.nbytes]}
        at += one.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = target.with_name(f"{target.name}.tmp")
    try:
        with beside.open("xb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for one in tensors.values():
                stream.write(one.read().tobytes())
        beside.replace(target)
    except (OSError, ValueError) as error:
        beside.unlink(missing_ok=True)
        raise TrueupError(
            f"The repaired checkpoint could not be written.\n  where:    {target}\n"
            "  expected: a folder that can be written, and a source that is whole\n"
            f"  got:      {error}\n  next:     correct that, and run it again"
        ) from None


def _proved(tensors: dict[str, Held], target: Path) -> None:
    """Read what was written back, and compare it with the source, tensor by tensor."""
    again = open_checkpoint(target).part("") if tensors else {}
    wrong = [
        name
        for name, one in tensors.items()
        if again[name].shape != one.shape or again[name].read().tobytes() != one.read().tobytes()
    ]
    if wrong or len(again) != len(tensors) or any(math.prod(one.shape) < 0 for one in again.values()):
        raise TrueupError(
            f"What was written is not what was read.\n  where:    {target}, {', '.join(wrong[:3])}\n"
            "  expected: the same bytes\n  got:      others\n"
            "  next:     check the disk, and run it again"
        )


# FSDP1's flat parameters, cut into what they are made of. One has all parameters of one module in one row, in the order of the
# model, and no names: names and shapes are those of a checkpoint of the model as it is. Each begins at the next element, or
# (``use_orig_params=True``) at the next multiple of 16 bytes; the sum of their sizes says which
# (``torch/distributed/fsdp/_flat_param.py``).
def unflattened(held: Mapping[str, Held], wanted: Mapping[str, Held], source: str) -> dict[str, Held]:
    """Return tensors with each flat parameter cut into those of the model; raises TrueupError where their sizes do not sum up."""
    plain = unwrapped(held)
    flats = {new.removesuffix(new.rpartition(".")[2]): held[name] for name, new in plain.items() if name.endswith(FLAT)}
    if not flats:
        return dict(held)
    own = {name: held[name] for name, new in plain.items() if new in wanted and held[name].shape == wanted[new].shape}
    found, there = dict(own), {plain[name] for name in own}
    parts: dict[str, list[str]] = {prefix: [] for prefix in flats}
    for name in wanted:
        owner = max((prefix for prefix in flats if name.startswith(prefix)), key=len, default=None)
        if owner is not None and name not in there:
            parts[owner].append(name)
    for prefix, flat in flats.items():
        begins = _begins([math.prod(wanted[name].shape) for name in parts[prefix]], flat)
        if begins is None:
            total = sum(math.prod(wanted[name].shape) for name in parts[prefix])
            raise TrueupError(
                f"A flat parameter of FSDP cannot be cut.\n  where:    {source}, {prefix or 'the outermost module'}\n"
                f"  expected: the {total:,} elements that the model has there by --like\n  got:      {math.prod(flat.shape):,}\n"
                "  next:     --like a checkpoint of the same model, saved without FSDP"
            )
        for name, begin in zip(parts[prefix], begins, strict=True):
            shape = wanted[name].shape
            found[name] = Held(shape, flat.dtype, partial(_cut, flat, begin, shape))
    return found


def _begins(sizes: list[int], flat: Held) -> list[int] | None:
    for step in (1, max(1, 16 // numpy_dtype(flat.dtype).itemsize)):
        begins, end = [], 0
        for size in sizes:
            begins.append(-(-end // step) * step)
            end = begins[-1] + size
        if 0 <= math.prod(flat.shape) - end < (1 if step == 1 else max(1, len(flat.pieces))):
            return begins
    return None


def _cut(flat: Held, begin: int, shape: tuple[int, ...]) -> Array:
    array: Array = flat.read()[begin : begin + math.prod(shape)].reshape(shape)
    return array
