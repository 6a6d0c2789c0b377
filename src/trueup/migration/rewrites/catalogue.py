"""The catalogue of rewrites (`catalogue.toml`), and the proof of a row: both forms executed in a process of their own
(`trueup.simdev.equivalence`)."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.words.wording import counted

Kind = Literal["name", "number", "condition", "plain", "size", "scalar", "device"]


class Rewrite(toml.Table):
    """A row; see the head of the file. ``reference`` is what ``before`` computes, where that needs a package that PyTorch lacks."""

    id: str
    title: str
    why: str
    before: str
    after: str
    inputs: tuple[dict[str, Any], ...]
    exact: bool
    source: str
    where: dict[str, Kind] = {}  # noqa: RUF012 - a struct copies its defaults
    unlike: tuple[str, ...] = ()
    reference: str | None = None
    names: tuple[str, ...] = ()
    """Functions that stand for ``{name}``: the row is one row for each."""


class _Catalogue(toml.Table):
    rewrite: tuple[Rewrite, ...]


@functools.cache
def catalogue() -> tuple[Rewrite, ...]:
    """Return all rows."""
    rows = toml.checked(toml.packaged("trueup.migration.rewrites", "catalogue.toml"), _Catalogue).rewrite
    return tuple(one for row in rows for one in (_named(row) if row.names else [row]))


def _named(row: Rewrite) -> list[Rewrite]:
    """Return a row for each function that stands for ``{name}`` in it."""
    return [
        msgspec.structs.replace(
            row,
            id=f"{row.id}-{name}",
            before=row.before.replace("{name}", name),
            after=row.after.replace("{name}", name),
            inputs=tuple(one for one in row.inputs if one.get("for", name) == name),
            names=(),
        )
        for name in row.names
    ]


SECONDS = 300


class Proof(msgspec.Struct, frozen=True):
    """What executing both forms gave; ``differs`` names the inputs for which they are not the same, ``gain`` is on the CPU."""

    cases: int
    bitwise: int
    differs: str | None
    gain: float | None
    gradients: bool = True

    @property
    def holds(self) -> bool:
        """Return whether they are the same, within rounding, for all inputs."""
        return self.cases > 0 and self.differs is None

    @property
    def sentence(self) -> str:
        """Return what was proved."""
        if not self.cases:
            return "not proved: PyTorch did not run"
        if self.differs is not None:
            return f"not the same for {self.differs}"
        how = "bit for bit" if self.bitwise == self.cases else "within rounding"
        faster = "" if self.gain is None else f"; {self.gain:.2g} times as fast on this CPU"
        gradients = ", gradients included" if self.gradients else ""
        return f"the same {how} in {counted(self.cases, 'case')}{gradients}{faster}"


def prove(rows: Sequence[Rewrite]) -> list[Proof]:
    """Execute both forms of rows; a row that could not be executed is not proved."""
    if not rows:
        return []
    asked = msgspec.json.encode([msgspec.to_builtins(row) for row in rows])
    command: list[Any] = [sys.executable, "-m", "trueup.simdev.equivalence"]
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, timeout=SECONDS, check=True)
        return msgspec.json.decode(ran.stdout, type=list[Proof])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return [Proof(0, 0, None, None) for _ in rows]
