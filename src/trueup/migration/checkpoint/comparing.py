"""`compare`: two checkpoints, tensor by tensor, their names without what wrappers added."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.checkpoint.reading import Array, open_checkpoint
from trueup.foundation.words.wording import counted, sci
from trueup.migration.checkpoint.naming import unwrapped


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
