"""Checkpoints as files: what they hold, how two differ (`compare`), and names brought back to those of the model (`repair`).

Nothing in a file is ever run. The file that `repair` writes is safetensors: tensors alone, one in memory at a time (two for the
proof, when it is read back). Names lose what wrappers put before or between them, where it stands and nowhere else.

    module.conv1.weight                         DataParallel, DistributedDataParallel
    _orig_mod.conv1.weight                      torch.compile
    a._fsdp_wrapped_module.b.weight             FullyShardedDataParallel
    a._checkpoint_wrapped_module.b.weight       activation checkpointing
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.checkpoint.folders import FLAT
from trueup.foundation.checkpoint.reading import SAFE, Array, Checkpoint, Held, open_checkpoint
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.foundation.words.wording import counted, sci

__all__ = ["Checkpoint", "Comparison", "Held", "Repair", "compare", "open_checkpoint", "repair"]
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of both checkpoints that differs: ‖b − a‖ / ‖a‖ and the largest difference of two elements (NaN where shapes
    differ)."""

    name: str
    first: str  # dtype and shape
    second: str
    relative: float
    largest: float
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints. ``equal`` counts tensors that are bitwise alike, ``only`` are names that one of them has."""

    first: str
    second: str
    equal: int
    differences: tuple[Difference, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    renamed: int

    @property
    def exit_code(self) -> int:
        """Return 0 where all tensors are alike, 1 where one differs or is missing, 2 where there is nothing to compare."""
        if self.differences or any(self.only):
            return 1
        return 0 if self.equal else 2

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        parts = [f"{counted(self.equal, 'tensor')} bitwise equal"]
        if self.differences:
            worst = max(self.differences, key=lambda one: math.inf if math.isnan(one.relative) else one.relative)
            parts.append(f"{len(self.differences):,} not ({worst.name}: {worst.reason or f'rel. L2 {sci(worst.relative)}'})")
        parts += [
            f"{len(names):,} only in {side}" for names, side in zip(self.only, (self.first, self.second), strict=True) if names
        ]
        return ", ".join(parts) + (f"; {counted(self.renamed, 'name')} compared without a wrapper." if self.renamed else ".")

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        head = {"schema": "trueup-checkpoint-compare", "schema_version": 1, "sentence": self.sentence, "exit_code": self.exit_code}
        rows = [{name: None if value != value else value for name, value in asdict(one).items()} for one in self.differences]
        return {
            **head,
            "first": self.first,
            "second": self.second,
            "equal": self.equal,
            "differences": rows,
            "only": list(map(list, self.only)),
        }


def compare(first: str | Path, second: str | Path, part: str | None = None) -> Comparison:
    """Compare two checkpoints of one model. ``part`` names what is compared, None: the weights. Two tensors are in memory at a
    time.
    Raises TrueupError if one cannot be read, or has no such part."""
    held = [open_checkpoint(one).part(part) for one in (first, second)]
    names = [unwrapped(one) for one in held]
    sides = [{new: one[name] for name, new in pairs.items()} for one, pairs in zip(held, names, strict=True)]
    both = [name for name in sides[0] if name in sides[1]]
    only = tuple(name for name in sides[0] if name not in sides[1]), tuple(name for name in sides[1] if name not in sides[0])
    found = []
    for name in both:
        a, b = sides[0][name], sides[1][name]
        here, there = (f"{one.dtype} {list(one.shape)}" for one in (a, b))
        if a.shape != b.shape:
            found.append(Difference(name, here, there, math.nan, math.nan, "another shape"))
            continue
        x, y = a.read(), b.read()
        if a.dtype == b.dtype and x.tobytes() == y.tobytes():
            continue
        relative, largest = _distance(x, y)
        found.append(
            Difference(name, here, there, relative, largest, "another dtype" if not relative and a.dtype != b.dtype else "")
        )
    renamed = sum(name != new for pairs in names for name, new in pairs.items())
    return Comparison(str(first), str(second), len(both) - len(found), tuple(found), only, renamed)


def _distance(x: Array, y: Array) -> tuple[float, float]:
    """Return ‖y − x‖ / ‖x‖ and the largest difference, in float64 (complex128)."""
    kind = np.complex128 if x.dtype.kind == "c" or y.dtype.kind == "c" else np.float64
    a, b = x.astype(kind).ravel(), y.astype(kind).ravel()
    difference = np.abs(b - a)
    norm = float(np.linalg.norm(a))
    size = float(np.linalg.norm(difference))
    return (size / norm if norm else math.inf if size else 0.0), float(difference.max(initial=0.0))


ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module", "_forward_module")
"""Names of modules that wrappers alone have."""
BEFORE = ("module",)
"""Names that wrappers have and that models may have, too: taken off at the front alone."""
_WRAPPER = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(ANYWHERE)})\.")


def unwrapped(names: Collection[str]) -> dict[str, str]:
    """Return each name without what wrappers added; a name keeps it where two would become one."""
    found = {name: _without(name) for name in names}
    counts = Counter(found.values())
    return {name: new if counts[new] == 1 else name for name, new in found.items()}


def _without(name: str) -> str:
    new = _WRAPPER.sub("", name)
    while any(new.startswith(f"{word}.") for word in BEFORE) and "." in new:
        new = new.partition(".")[2]
    return new


def matched(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return saved names with the names of a model that they are: alike without wrappers, or after one prefix and one suffix that
    most names share. Shapes must be alike; a name that fits several, or none, is left out."""
    plain = unwrapped(saved)
    pairs = {name: new for name, new in plain.items() if new in wanted}
    rest = {name: (new, _WRAPPER.sub("", name)) for name, new in plain.items() if name not in pairs}  # "module" may be the model's
    taken = set(pairs.values())
    affixes: Counter[tuple[str, str, str, str]] = Counter()
    open_ = [name for name in wanted if name not in taken]
    for name, forms in rest.items():
        for want in open_:
            if saved[name] == wanted[want]:
                affixes.update({affix for form in forms if (affix := _affix(form, want)) is not None})
    for (drop, add, cut, tail), _ in sorted(affixes.items(), key=lambda one: (-one[1], sum(map(len, one[0])))):
        for name, form in [(name, form) for name, forms in rest.items() for form in forms]:
            if name in rest and form.startswith(drop) and form.endswith(cut):
                want = add + form[len(drop) : len(form) - len(cut)] + tail
                if want in wanted and want not in taken and wanted[want] == saved[name]:
                    pairs[name] = want
                    taken.add(want)
                    del rest[name]
    return pairs


def _affix(name: str, want: str) -> tuple[str, str, str, str] | None:
    """Return what to take off the front and to put there, and the same for the end, to make one name of another: whole parts
    between points at the front, and a last part that begins or ends alike."""
    if name == want:
        return "", "", "", ""
    if name.endswith(f".{want}"):
        return name[: -len(want)], "", "", ""
    if want.endswith(f".{name}"):
        return "", want[: -len(name)], "", ""
    if name.startswith(want) and not name[len(want)].isalnum():
        return "", "", name[len(want) :], ""
    if want.startswith(name) and not want[len(name)].isalnum():
        return "", "", "", want[len(name) :]
    middle = re.search(rf"(?:^|\.){re.escape(want)}(?=[._])", name)
    if middle is not None:
        start = middle.end() - len(want)
        return name[:start], "", name[middle.end() :], ""
    return None
