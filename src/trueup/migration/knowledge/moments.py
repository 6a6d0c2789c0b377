"""When a line was written, and by which rank: what stands in the line, else before it, else in the name of its file.

    [rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607]       rank 0, 21 March, of a year that another line must say
    [ERROR] RUNTIME(12731,python3.7):2021-02-02-22:23:56.475.679     2 February 2021
    E0000 00:00:1736163964.084812 3415088 cuda_dnn.cc:8310]          seconds since 1970, as absl writes them

Times are the machine's own clock without a zone. What says no year is of the year that the other lines of the same log say; where
none does, all are of the same year.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

NEAR = 1024  # bytes in which a last time is looked for first
YEARLESS = 2000  # stands for a year that is not known; a leap year

_TIME = rb"(?P<H>[0-2]\d):(?P<M>[0-5]\d):(?P<S>[0-6]\d)(?:[.,](?P<f>\d{1,9}(?:\.\d{3})?))?"
_FORMS = re.compile(
    rb"(?:(?P<Y>(?:19|20)\d\d)[-/](?P<m>[01]\d)[-/](?P<d>[0-3]\d)[-T _]" + _TIME + rb")"
    rb"|(?:\b[EWIF](?P<gm>0?[1-9]|1[0-2])(?P<gd>[0-3]\d) " + _TIME.replace(b"?P<", b"?P<g") + rb")"
    rb"|(?:\b(?P<sm>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<sd>\d{1,2}) " + _TIME.replace(b"?P<", b"?P<s") + rb")"
    rb"|(?:\b(?P<um>[01]\d)/(?P<ud>[0-3]\d)/(?P<uY>(?:19|20)\d\d) " + _TIME.replace(b"?P<", b"?P<u") + rb")"
    rb"|(?:\b(?P<vm>[01]\d)-(?P<vd>[0-3]\d) " + _TIME.replace(b"?P<", b"?P<v") + rb")"
    rb"|(?:\b[EWIF]0000 00:00:(?P<epoch>1\d{9}(?:\.\d+)?))"
)
_MONTHS = (b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec")

_RANK = re.compile(
    rb"\[rank ?(\d+)\]|\[PG .{0,60}?Rank (\d+)\]|\[Rank (\d+)\]|RankID:(\d+)|\brank[=: ]+(\d+)\b|Rank (\d+):", re.IGNORECASE
)
_FILE_RANK = re.compile(r"(?:rank|worker|npu|gpu|device|proc|process|card)[-_]?(\d+)(?:\D|$)", re.IGNORECASE)
_FOLDER_RANK = re.compile(r"(?:^|/)(?:attempt_\d+/)?(\d+)/(?:stdout|stderr)\.log$")
_PEERS = re.compile(rb"remote rank \[?(\d+)|remoteRank\[(\d+)\]|dst_rank\[(\d+)\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happened: seconds of the machine's clock, the text that said so, and whether it said the year."""

    seconds: float
    text: str
    dated: bool


def moment(text: bytes) -> Moment | None:
    """Return the first time that a line says."""
    found = _FORMS.search(text)
    return None if found is None else _read(found)


def last_moment(text: bytes) -> Moment | None:
    """Return the last time that some lines say."""
    for some in (text[-NEAR:], text):
        found = list(_FORMS.finditer(some))
        if found:
            return _read(found[-1])
    return None


def _read(found: re.Match[bytes]) -> Moment | None:
    held = found.groupdict()
    said = found[0].decode("ascii", "replace")
    if held["epoch"]:
        return Moment(float(held["epoch"]), said, True)
    lead = next(one for one in ("", "g", "s", "u", "v") if held[f"{one}H"])
    month = held[f"{lead}m"]
    number = _MONTHS.index(month) + 1 if month in _MONTHS else int(month)
    year = int(held["Y"] or held["uY"] or YEARLESS)
    part = (held[f"{lead}f"] or b"0").replace(b".", b"")
    try:
        day = datetime.datetime(
            year, number, int(held[f"{lead}d"]), int(held[f"{lead}H"]), int(held[f"{lead}M"]), min(int(held[f"{lead}S"]), 59),
            tzinfo=datetime.timezone.utc,
        )  # fmt: skip
    except ValueError:
        return None
    return Moment(day.timestamp() + int(part) / 10 ** len(part), said, year != YEARLESS)


def in_year(seconds: float, year: int) -> float:
    """Return a time without a year as one of a year."""
    day = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    try:
        return day.replace(year=year).timestamp()
    except ValueError:  # 29 February
        return day.replace(year=year, day=28).timestamp()


def year_of(seconds: float) -> int:
    """Return the year of a time."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).year


def rank_in(text: bytes) -> int | None:
    """Return the rank that a line says it is of."""
    found = _RANK.search(text)
    return None if found is None else _rank(next(one for one in found.groups() if one is not None))


def rank_of_file(name: str) -> int | None:
    """Return the rank that the name of a file says: ``rank_3.log``, ``attempt_0/3/stderr.log``."""
    found = _FOLDER_RANK.search(name) or _FILE_RANK.search(name.rpartition("/")[2]) or _FILE_RANK.search(name)
    return None if found is None else _rank(found[1])


def peers_in(text: bytes) -> set[int]:
    """Return the ranks that a line waits for."""
    told = (_rank(one) for found in _PEERS.finditer(text) for one in found.groups() if one)
    return {rank for rank in told if rank is not None}


def _rank(digits: str | bytes) -> int | None:
    """Return a rank; 4294967295 is -1 in 32 bits, as libraries print where they know none."""
    return int(digits) if len(digits) < 10 else None
