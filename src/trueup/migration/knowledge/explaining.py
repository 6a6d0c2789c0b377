"""`explain`: which error of some logs came first, across ranks and files, what it means, and which lines only follow from it.

Lines that a row takes are sightings, one for each row, log and rank, with its first line and how often it came. The first error is
the earliest that is a cause. What ranks print because another one ended (echoes), errors whose reason stands elsewhere (generic)
and what may follow from any error (a killed process) count only where no cause is there, in order of time. A sighting without a
time of its own has the last one before it in its log.

When a line was written, and by which rank: what stands in the line, else before it, else in the name of its file.

    [rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607]       rank 0, 21 March, of a year that another line must say
    [ERROR] RUNTIME(12731,python3.7):2021-02-02-22:23:56.475.679     2 February 2021
    E0000 00:00:1736163964.084812 3415088 cuda_dnn.cc:8310]          seconds since 1970, as absl writes them

Times are the machine's own clock without a zone. What says no year is of the year that the other lines of the same log say; where
none does, all are of the same year.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trueup.foundation.redaction import redacted
from trueup.foundation.words.wording import clean, counted
from trueup.migration.knowledge.logs import BEFORE, Line, Reader, Row, codes, lines, named_in, nearest, readers, row_of, whole

WINDOW = 60.0  # seconds within which the order of lines of two ranks says nothing: outputs are buffered
MOST = 20_000  # sightings that are kept
MEMO = 1 << 14  # kinds of lines of which the row is remembered
ALIKE = 20  # lines of a kind that are asked about
OFTEN = 2_000  # lines of a row in a log after which, from the next pass on, no more are looked for; their number is a least one
SHOWN = 300  # characters of a line in a report

EXCEPTION = (
    r"^(?:\[rank ?\d+\]: ?)?(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Failure)|StopIteration)(?:: |$)"
    r"|^\s*what\(\): |Fatal Python error|Check failed: |core dumped|^Aborted\b"
    r"|^F\d{4} \d\d:\d\d|: F tensorflow/|Assertion .{1,300} failed"
)
"""Errors that stop a process, whether a row knows them or not."""
STOPS = (
    r"(?:Error|Exception|Failure|StopIteration)(?:: |$)|what\(\): |Fatal Python error|Check failed: |core dumped|^Aborted"
    r"|^F\d{4} \d\d:\d\d|: F tensorflow/|Assertion .*failed"
)
"""What each of those lines holds."""
CLAIMED = r"\[ERROR\]|\bERROR\b|\bFATAL\b|\bCRITICAL\b"
"""Lines that call themselves errors; many stop nothing."""
PROGRESS = re.compile(rb"\d(?:it/s|s/it)\b")
"""Progress bars, which some services log as errors because they come from stderr."""

Verdict = Literal["FOUND", "COULD NOT TELL", "NOTHING"]
_DIGITS = bytes(range(48, 58))
_NUMBER = re.compile(rb"\d+")
_STOPS = re.compile(EXCEPTION.encode())
_CLAIMED = re.compile(CLAIMED.encode())
_FRAME = re.compile(rb'File "([^"\n]{1,300})", line (\d+)')
TRACEBACK = 16 << 10  # bytes before an exception in which its traceback is looked for


@dataclass(frozen=True, slots=True)
class Sighting:
    """A row (None: an error that no row knows) in a log, of a rank: its first line, when, and how many lines there are of it."""

    row: Row | None
    log: str
    line: int
    text: str
    rank: int | None
    seconds: float | None
    time: str
    count: int
    names: dict[str, str]
    peers: frozenset[int]
    source: str  # last line of the user's own in the traceback before it
    order: tuple[int, int]  # number of the log, number of the line

    @property
    def place(self) -> str:
        """Return rank, log, line and time as text."""
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        return ", ".join([*parts, f"{self.log}:{self.line}", *([self.time] if self.time else [])])

    def document(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        held = dataclasses.asdict(dataclasses.replace(self, row=None, peers=frozenset()))
        del held["row"], held["order"]
        return {"row": self.row.id if self.row else None, **held, "peers": sorted(self.peers)}


@dataclass(frozen=True)
class Explanation:
    """What some logs say. ``first`` is the first error; ``before`` are earlier lines that do not count as it, with ``echoes``
    (ranks that lost their peer), ``others`` (later errors), ``notes`` (lines to ignore) and ``unknown`` (errors that no row
    knows)."""

    first: Sighting | None
    echoes: tuple[Sighting, ...]
    others: tuple[Sighting, ...]
    notes: tuple[Sighting, ...]
    unknown: tuple[Sighting, ...]
    near: tuple[Row, ...]
    claimed: int
    suspects: tuple[str, ...]
    remarks: tuple[str, ...]
    logs: tuple[str, ...]
    size: int

    @property
    def verdict(self) -> Verdict:
        """Return what is known of the first error."""
        if self.first is not None and self.first.row is not None and self.first.row.role != "echo":
            return "FOUND"
        return "COULD NOT TELL" if self.first is not None or self.claimed else "NOTHING"

    @property
    def exit_code(self) -> int:
        """Return 0 where nothing stopped the run, 1 where an error is known, 2 where it is not."""
        return {"NOTHING": 0, "FOUND": 1, "COULD NOT TELL": 2}[self.verdict]

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        lines = f"{counted(len(self.logs), 'log')}, {self.size / 1e6:,.1f} MB"
        if self.first is None:
            if self.claimed:
                return f"{counted(self.claimed, 'line')} of {lines} call themselves errors, and no row knows one of them."
            return f"No line of {lines} is known to stop a training."
        if self.first.row is None:
            near = f"; near it: {', '.join(row.id for row in self.near)}" if self.near else ""
            return f"{self.first.place}: no row knows this error{near}."
        if self.first.row.role == "echo":
            if not self.suspects:
                return "What these lines say follows from something else, which these logs do not hold."
            return f"These ranks only lost another one, which stopped first: look at {', '.join(self.suspects)}."
        return f"{self.first.place}: {self.first.row.cause}"

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        row = self.first.row if self.first else None
        told = ("id", "role", "cause", "probe", "remedy", "check", "late", "versions", "origin", "corrects")
        return {
            "schema": "trueup-explain-log", "schema_version": 1, "verdict": self.verdict, "sentence": self.sentence,
            "exit_code": self.exit_code, "first": self.first.document() if self.first else None,
            "row": {name: getattr(row, name) for name in told} if row else None, "near": [one.id for one in self.near],
            "suspects": list(self.suspects), "remarks": list(self.remarks), "logs": list(self.logs), "bytes": self.size,
            "claimed": self.claimed,
            **{name: [one.document() for one in getattr(self, name)] for name in ("echoes", "others", "notes", "unknown")},
        }  # fmt: skip


def explain(logs: Sequence[str]) -> Explanation:
    """Explain logs of one run: files, folders, ``-`` for standard input; packed by gzip or not.

    Raises:
        TrueupError: a log is not there or cannot be read.
    """
    some = readers(logs)
    got = Collected()
    of_files = [rank_of_file(reader.name) for reader in some]
    for line in lines(some, got.wanted):
        got.take(line, of_files[line.log])
    return concluded(got, some)


def concluded(got: Collected, some: Sequence[Reader]) -> Explanation:
    """Return what was collected from some logs as an explanation."""
    sightings = list(_finished(got, some))
    remarks = [reader.broken for reader in some if reader.broken]
    if got.full:
        remarks.append(f"More than {MOST:,} kinds of lines in logs and ranks: the rest was not looked at.")
    known = [one for one in sightings if one.row is not None]
    unknown = sorted((one for one in sightings if one.row is None), key=_when)
    notes = [one for one in known if one.row and one.row.role == "note"]
    errors = sorted((one for one in known if one.row and one.row.role != "note"), key=_when)
    first = _first(errors) or (unknown[0] if unknown else None)
    echoes = [one for one in errors if one.row and one.row.role == "echo" and one is not first]
    others = [one for one in errors if one is not first and one not in echoes]
    near = nearest(first.text) if first is not None and first.row is None else []
    if first is not None and first.seconds is None and len({one.log for one in errors}) > 1:
        remarks.append("Not all logs say times: which of them came first is by their order alone.")
    return Explanation(
        first, tuple(echoes), tuple(others), tuple(notes), tuple(unknown), tuple(near), got.claimed,
        _suspects([one for one in errors if one.row and one.row.role == "echo"]), tuple(remarks),
        tuple(one.name for one in some), sum(one.size for one in some),
    )  # fmt: skip


def _first(errors: Sequence[Sighting]) -> Sighting | None:
    """Return the first error of some in order: a firm cause, else what came first by more than the window, else by what it says."""
    firm = next((one for one in errors if one.row and one.row.role == "cause" and not one.row.after), None)
    if firm is not None or not errors:
        return firm
    start = errors[0].seconds
    together = [one for one in errors if start is None or one.seconds is None or one.seconds - start <= WINDOW]
    return min(together, key=_tells_little)


def _tells_little(one: Sighting) -> int:
    """Return how little a row says of the first error: a killed process least little, then a lost peer, a wrapper, an end."""
    role = one.row.role if one.row else "cause"
    return 3 if role == "echo" and one.row and one.row.after else ("cause", "echo", "generic").index(role or "cause")


def _when(one: Sighting) -> tuple[float, tuple[int, int]]:
    return (float("inf") if one.seconds is None else one.seconds, one.order)


def _suspects(echoes: Sequence[Sighting]) -> tuple[str, ...]:
    """Return whom ranks that lost another one point at: the rank that they name, that is behind, or that says nothing."""
    named = sorted({peer for one in echoes for peer in one.peers} - {one.rank for one in echoes})
    if named:
        return tuple(f"rank {peer}, which others waited for" for peer in named)
    at = {one.rank: int(one.names["sequence"]) for one in echoes if one.rank is not None and "sequence" in one.names}
    behind = [rank for rank, number in at.items() if number == min(at.values())]
    if len(set(at.values())) > 1:
        return tuple(f"rank {rank}, which was behind at collective {at[rank]}" for rank in sorted(behind))
    ranks = {one.rank for one in echoes if one.rank is not None}
    silent = sorted(set(range(max(ranks))) - ranks) if len(ranks) > 1 else []
    return tuple(f"rank {rank}, which says nothing here" for rank in silent[:8])


class Collected:
    """Sightings as they come."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, int | None], list[Any]] = {}
        self.log = -1
        self.counts: Counter[str] = Counter()  # lines of this log by row; ? of errors that no row knows, ! of other lines
        self.alike: dict[tuple[bytes, tuple[bytes, ...]], tuple[Row | None, int]] = {}
        self.clock = _Clock()
        self.claimed = 0
        self.full = False

    def wanted(self, log: int = -1) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what is looked for, and which lines are left out nevertheless: what was seen so often in this log that more of it
        says no more."""
        often = frozenset(name for name, count in self.counts.items() if count >= OFTEN and log == self.log)
        more = tuple(text for name, text in (("?", STOPS), ("!", CLAIMED)) if name not in often)
        return (*whole(), *more), whole(often)

    def _row(self, text: bytes) -> Row | None:
        """Return the row of a line. Of lines that differ in numbers alone, and not in those that rows name, some are asked about;
        where all have the same row, the rest have it, too."""
        key = (text.translate(None, _DIGITS), tuple(number for number in _NUMBER.findall(text) if number in codes()))
        row, count = self.alike.get(key, (None, 0))
        if count < ALIKE:
            found = row_of(text)
            if len(self.alike) >= MEMO:
                self.alike.clear()
            self.alike[key] = (found, count + 1 if not count or found is row else -MEMO)
            return found
        return row

    def take(self, line: Line, of_file: int | None) -> None:
        """Keep what a line says, or count it."""
        if line.log != self.log:
            self.log, self.counts = line.log, Counter()
        row = self._row(line.text)
        if row is None and not _STOPS.search(line.text):
            self.counts["!"] += 1
            self.claimed += _CLAIMED.search(line.text) is not None and not PROGRESS.search(line.text)
            return
        if row is None and self.counts["?"] >= OFTEN:
            return
        rank = rank_in(line.text)
        name = row.id if row else f"?{line.text.translate(None, _DIGITS)[:80]!r}"
        self.counts[row.id if row else "?"] += 1
        self.add(name, row, line, of_file if rank is None else rank)

    def add(self, name: str, row: Row | None, line: Line, rank: int | None) -> None:
        """Keep a line, or count it where its row has one of this log and rank."""
        key = (name, line.log, rank)
        held = self.found.get(key)
        if held is not None:
            held[-1] += 1
        elif len(self.found) < MOST:
            when = moment(line.text) or self.clock.before(line)
            self.found[key] = [row, line.number, line.text, when, _source(line), 1]
        else:
            self.full = True


class _Clock:
    """The last time that the lines before a line say. What was looked through for one line is not for those after it."""

    def __init__(self) -> None:
        self.within = b""
        self.looked = 0  # up to where in it
        self.last: Moment | None = None
        self.at = 0  # the line before which `last` stands

    def before(self, line: Line) -> Moment | None:
        """Return it for a line; lines come in order."""
        if self.within is not line.within or self.looked < line.since:
            self.within, self.looked, self.last = line.within, line.since, None
        begin = max(self.looked, line.start - BEFORE)
        found = last_moment(line.within[begin : line.start])
        if found is not None:
            self.last, self.at = found, line.start
        self.looked = line.start
        return self.last if line.start - self.at <= BEFORE else None


def _finished(got: Collected, some: Sequence[Reader]) -> Iterable[Sighting]:
    held = [(key, *value) for key, value in got.found.items()]
    years: dict[int, int] = {}
    for (_, log, _), _, _, _, when, _, _ in held:
        if when is not None and when.dated:
            years.setdefault(log, year_of(when.seconds))
    any_year = max(years.values(), default=None)
    for (_, log, rank), row, number, text, when, source, count in held:
        seconds = None if when is None else when.seconds
        year = years.get(log, any_year)
        if when is not None and not when.dated and year is not None:
            seconds = in_year(when.seconds, year)
        shown = redacted(clean(text[: SHOWN * 2].decode("utf-8", "replace")))[:SHOWN]
        names = named_in(row, text) if row is not None else {}
        time = when.text if when is not None else ""
        yield Sighting(
            row,
            some[log].name,
            number,
            shown,
            rank,
            seconds,
            time,
            count,
            names,
            frozenset(peers_in(text)),
            source,
            (log, number),
        )


def _source(line: Line) -> str:
    """Return the innermost line of the user's own in the traceback that a line ends: `train.py:57`."""
    if not _STOPS.search(line.text):
        return ""
    frames = _FRAME.findall(line.before[-TRACEBACK:].rpartition(b"Traceback (most recent call last)")[2])
    own = [
        frame
        for frame in frames
        if b"site-packages" not in frame[0] and b"dist-packages" not in frame[0] and b"/lib/python" not in frame[0]
    ]
    return redacted(clean(b":".join((own or frames)[-1]).decode("utf-8", "replace"))) if frames else ""


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
