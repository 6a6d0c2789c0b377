"""What the user says of how tensors lie on ranks: ``shards.toml``.

    [[slot]]
    scope = "layers.*.attention"
    op = "torch.nn.functional.scaled_dot_product_attention"
    slot = "output.0"
    dims = "b h[tp] s d"

``dims`` names the dimensions of the whole; the axis that cuts one follows in brackets: ``s[cp:zigzag] b h[tp]``. Of
``[tp:interleaved]``, a weight of two halves (gate and up), each rank holds a piece of both. Axes of several runs that cut the same
dimension stand side by side: ``h[tp,ranks]``. ``partial = ["tp"]`` names the axes along which ranks hold terms of a sum. The first
rule that matches a slot holds; along axes that it does not name the slot lies as if there were no rule.

    f[tp:interleaved3]         queries, keys and values in one weight
    f[tp:interleaved(4,1,1)]   four queries to a key and a value (grouped queries)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path

from trueup.comparison.layout.calls import Key
from trueup.comparison.layout.pieces import Way
from trueup.foundation import toml
from trueup.foundation.model import TrueupError

SEE = "see docs/layouts.md"

EXPECTED = "name, name[axis] or name[axis:zigzag|interleaved|interleaved3|interleaved(4,1,1)]"

_DIM = re.compile(
    r"[A-Za-z_*0-9]+(?:\[(?P<axes>[\w,-]+)(?::(?P<order>zigzag|interleaved"
    r"(?:(?P<packs>[2-9]|[1-5]\d|6[0-4])|\((?P<parts>[1-9]\d{0,3}(?:,[1-9]\d{0,3}){1,63})\))?))?\])?"
)


class Rule(toml.Table):
    """How slots lie."""

    slot: str
    scope: str = "*"
    op: str = "*"
    dims: str = ""
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.dims and not self.partial:
            raise ValueError(f"slot {self.slot!r}: dims and partial are missing")
        _ways(self.dims)

    def matches(self, key: Key, slot: str) -> bool:
        """Tell whether a rule is for a slot."""
        wanted = ((key[2], self.scope), (key[3], self.op), (slot, self.slot))
        return all(fnmatch.fnmatchcase(name, pattern) for name, pattern in wanted)


class Shards(toml.Table):
    """What ``shards.toml`` holds."""

    slot: tuple[Rule, ...] = ()


def load(path: str | Path) -> Callable[[Key, str, str], Way | None]:
    """Read declarations; return what tells of a call, a slot and an axis how it lies, None where nobody said it.

    Raises:
        TrueupError: there is no such file, or it is none.
    """
    file = Path(path)
    content = toml.read(file, "shards file", SEE)
    try:
        rules = [
            (rule, _ways(rule.dims) | {axis: Way("partial") for axis in rule.partial})
            for rule in toml.checked(content, Shards).slot
        ]
    except ValueError as error:
        raise TrueupError(f"shards file {file}: {error}; {SEE}") from None

    def declared(key: Key, slot: str, axis: str) -> Way | None:
        for rule, ways in rules:
            if rule.matches(key, slot):
                return ways.get(axis)
        return None

    return declared


def _ways(dims: str) -> dict[str, Way]:
    found: dict[str, Way] = {}
    for n, word in enumerate(dims.split()):
        if (read := _DIM.fullmatch(word)) is None:
            raise ValueError(f"dims {dims!r}: {word!r} is no dimension: expected {EXPECTED}")
        order = (read["order"] or "natural").rstrip("0123456789,()")
        parts = tuple(map(int, read["parts"].split(","))) if read["parts"] else (1,) * int(read["packs"] or 2)
        for axis in filter(None, (read["axes"] or "").split(",")):
            if axis in found:
                raise ValueError(f"dims {dims!r}: axis {axis!r} cuts two dimensions")
            found[axis] = Way("sharded", n, order, parts=parts if order == "interleaved" else ())
    return found
