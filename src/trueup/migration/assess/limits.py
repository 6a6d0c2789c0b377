"""Limits of the platform (`limits.toml`): what a run breaks, for one version of CANN."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trueup.foundation import toml
from trueup.foundation.model import UsageError

if TYPE_CHECKING:
    from trueup.migration.assess.reading import Row

NEWEST = "newest"


class Limit(toml.Table):
    """A row: what is asked of a run, and of which versions of CANN: the first that has it, the last whose documents say so, and the
    first whose documents say otherwise (``ended``). Without ``until`` it is open-ended: no source says that it ended."""

    id: str
    asks: Literal["group-size", "collective-dtype", "fixed-shapes", "dtype", "package", "dimensions"]
    says: str
    remedy: str
    source: str
    since: str | None = None
    until: str | None = None
    ended: str | None = None
    ended_source: str = ""
    allowed: tuple[int | str, ...] = ()
    forbidden: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    most: int = 0

    def holds(self, version: str) -> bool | None:
        """Return whether a version of CANN has it; None for one between the last that is known to and the first that has not."""
        if version == NEWEST:
            return self.ended is None
        if self.since is not None and _order(version) < _order(self.since):
            return False
        if self.until is None or _order(version) <= _order(self.until):
            return True
        return None if self.ended is None or _order(version) < _order(self.ended) else False

    @property
    def known(self) -> str:
        """Return where it is from, and until when it is known to hold."""
        if self.ended is not None:
            return f"{self.source}; not in CANN {self.ended} ({self.ended_source})"
        return f"{self.source}; no source says that it ended"


class _Table(toml.Table):
    limit: tuple[Limit, ...]


@dataclass(frozen=True)
class Broken:
    """A limit that a run breaks, at its lines; not ``sure`` where nobody says whether this version of CANN has it."""

    id: str
    says: str
    remedy: str
    places: tuple[str, ...]
    source: str
    sure: bool = True


@functools.cache
def limits() -> tuple[Limit, ...]:
    """Return the table."""
    return toml.checked(toml.packaged("trueup.migration.assess", "limits.toml"), _Table).limit


def check_version(version: str) -> None:
    """Raise UsageError where a text is no version of CANN, as ``5.1``, ``8.0.RC1`` and ``newest`` are."""
    if version != NEWEST and not re.fullmatch(r"\d+(\.\w+)*", version):
        raise UsageError(
            f"There is no CANN {version}.\n  expected: {NEWEST}, or a version: 5.1, 8.0.RC1\n  got:      {version}\n"
            "  next:     docs/assess.md says which versions have which limits"
        )


def broken(rows: Sequence[Row], imported: Iterable[str], version: str = NEWEST) -> tuple[Broken, ...]:
    """Return the limits of a version of CANN that a run breaks."""
    found = []
    for limit in limits():
        holds = limit.holds(version)
        if holds is False:
            continue
        if limit.asks == "package":
            hits = {name: [""] for name in imported if name in limit.names}
        else:
            hits = {}
            for row in rows:
                for value in ASKED[limit.asks](limit, row):
                    hits.setdefault(value, []).append(row.place)
        if hits:
            said = limit.says.format(found=", ".join(sorted(hits)))
            said += "" if holds else f" (whether in CANN {version}, nobody says)"
            places = dict.fromkeys(place for each in hits.values() for place in each if place)
            found.append(Broken(limit.id, said, limit.remedy, tuple(places), limit.known, holds is True))
    return tuple(found)


def _group_size(limit: Limit, row: Row) -> list[str]:
    return [str(size) for size in row.groups if size and size not in limit.allowed]


def _collective_dtype(limit: Limit, row: Row) -> list[str]:
    return [dtype for dtype in row.dtypes if dtype not in limit.allowed] if row.groups else []


def _fixed_shapes(limit: Limit, row: Row) -> list[str]:  # noqa: ARG001 - one signature for all
    return ["shape"] if row.site and row.site[0] and row.is_dynamic else []


def _dtype(limit: Limit, row: Row) -> list[str]:
    if row.operator.removeprefix("aten::").partition(".")[0] not in limit.operators:
        return []
    return [one for one in row.dtypes if (limit.allowed and one not in limit.allowed) or one in limit.forbidden]


def _dimensions(limit: Limit, row: Row) -> list[str]:
    counts = [len(re.findall(r"\d+", one)) for _, shapes in row.shapes for one in re.findall(r"\([^)]*\)", shapes)]
    return [str(count) for count in counts if count > limit.most]


ASKED: dict[str, Callable[[Limit, Row], list[str]]] = {
    "group-size": _group_size, "collective-dtype": _collective_dtype, "fixed-shapes": _fixed_shapes, "dtype": _dtype,
    "dimensions": _dimensions,
}  # fmt: skip


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
