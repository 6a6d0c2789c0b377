"""What a reader gives: a dump as parts of one rank and step, each a stream of calls with their tensors.

This is the interface between the readers, one file for each format, and `importing`, which makes a capture of what any of them
found. Names are Trueup's already; the importer numbers calls. Notes are counted, for a dump may repeat one for a million tensors.
A stack is frames ``file:line in function``, without the frameworks' own. The folders of a file say its rank and step.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError

Array = NDArray[Any]
Frames = tuple[tuple[str, ...], str | None]  # a stack: ``file:line in function``, innermost first; text of the innermost line


class UnreadableError(Exception):
    """A tensor that cannot be had; the message says why, in a few words."""


@dataclass(slots=True)
class ForeignTensor:
    """A tensor of a call as the dump tells it; what it does not tell is None or empty."""

    slot: str
    name: str  # as the tool called it
    dtype: str | None = None  # without a framework's prefix, as in a record
    shape: tuple[int, ...] | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    """The tool's numbers, as columns of a record: ``min``, ``l2`` ..."""
    told: str | None = None  # JSON: the tool's numbers where they do not mean what ours do
    checksum: str | None = None  # ``algorithm:value``
    load: Callable[[], Array] | None = None  # reads the elements; raises UnreadableError
    value: str | None = None  # JSON: of a local shard, its part in the whole
    device: str | None = None
    strides: tuple[int, ...] | None = None


@dataclass(slots=True)
class ForeignCall:
    """A call, or a piece of one: pieces of the same key are one call."""

    key: str  # what names the call in its part
    level: str
    phase: str
    scope: str
    op: str
    tensors: Sequence[ForeignTensor] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # non-tensor arguments by position or name
    parent: str | None = None  # key of the enclosing call
    forward: str | None = None  # key of the forward call of a backward call
    frames: Frames | None = None


@dataclass(slots=True)
class Part:
    """One rank and step."""

    rank: int
    step: int
    calls: Callable[[], Iterator[ForeignCall]]  # reads the calls, in order of the file, as often as it is asked for
    order: Callable[[], Iterable[str]] | None = None  # gives the keys in order of execution, where that is not the file's


@dataclass(slots=True)
class Dump:
    """What a reader found in a folder."""

    tool: str  # name and, where it is known, version: ``msprobe``, ``ptdbg 2.0``
    framework: str | None
    levels: tuple[str, ...]
    detail: str
    parts: list[Part]
    notes: Notes
    lacks: list[str] = field(default_factory=list)  # one sentence for each thing that such a dump cannot tell in a comparison


def plain(array: Array) -> Array:
    """Return an array as the kernels take it: native byte order. Raises UnreadableError if it holds no numbers."""
    if array.dtype.hasobject or array.dtype.kind in "OSUmM" or array.dtype.names is not None:
        raise UnreadableError(f"dtype {array.dtype} holds no numbers")
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return np.asarray(array)


MAX_KINDS = 200  # different sentences that are kept; what a hostile dump says beyond them is counted together
MAX_LENGTH = 160


@dataclass(slots=True)
class Notes:
    """Sentences with the number of times they apply and the first thing that they apply to."""

    _said: dict[str, list[int | str]] = field(default_factory=dict)
    _lost: dict[str, list[int | str]] = field(default_factory=dict)

    def say(self, sentence: str, example: str = "") -> None:
        """Note what a reader of the capture must know."""
        _count(self._said, sentence, example)

    def lose(self, sentence: str, example: str = "") -> None:
        """Note what the dump should hold and does not: such a capture is not whole."""
        _count(self._lost, sentence, example)

    @property
    def said(self) -> list[str]:
        """What was noted."""
        return [_line(sentence, *entry) for sentence, entry in self._said.items()]

    @property
    def lost(self) -> list[str]:
        """What was lost."""
        return [_line(sentence, *entry) for sentence, entry in self._lost.items()]


def _count(kept: dict[str, list[int | str]], sentence: str, example: str) -> None:
    sentence = _short(sentence)
    if sentence not in kept and len(kept) >= MAX_KINDS:
        sentence = "and more of other kinds"
    entry = kept.setdefault(sentence, [0, _short(example)])
    entry[0] = int(entry[0]) + 1


def _short(text: str) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text[: MAX_LENGTH + 1])
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH] + "…"


def _line(sentence: str, count: int | str, example: int | str) -> str:
    times = f" ({count:,} times, first: {example})" if example and int(count) > 1 else f": {example}" if example else ""
    return f"{sentence}{times}"


MAX_FRAMES = 48
FRAME_LENGTH = 400

INTERNAL = (
    "/site-packages/torch/", "/site-packages/msprobe/", "/ptdbg_ascend/", "/site-packages/torch_npu/", "/site-packages/paddle/",
    "/site-packages/tensorflow/", "/site-packages/keras/",
)  # fmt: skip

_MSPROBE = re.compile(r"File (?P<file>.*?), line (?P<line>\d+), in (?P<function>.*?), *\n?(?P<text>.*)", re.DOTALL)
_TRACEBACK = re.compile(r'File "(?P<file>.*?)", line (?P<line>\d+), in (?P<function>[^\n]*)\n?(?P<text>.*)', re.DOTALL)

_REPEATING = re.compile(
    r"torch/(utils/checkpoint|autograd/__init__|autograd/graph|_tensor)\.py:\d+ in (\w*backward|unpack_hook|recompute_fn)"
)
"""Frames below which a forward call repeats one that was made before: activation checkpointing inside the backward pass."""


def frames_of(frames: Any) -> tuple[Frames | None, bool]:
    """Read a list of texts, or of ``[file, line, function, code]``; also tell whether a backward pass made the call."""
    if not isinstance(frames, (list, tuple)):
        return None, False
    found: list[tuple[str, str | None]] = []
    for frame in frames[:400]:
        if (one := _frame(frame)) is not None:
            found.append(one)
    repeats = any(_REPEATING.search(place) for place, _ in found)
    users = [one for one in found if not any(part in one[0] for part in INTERNAL)] or found
    if not users:
        return None, repeats
    return (tuple(place for place, _ in users[:MAX_FRAMES]), users[0][1]), repeats


def _frame(frame: Any) -> tuple[str, str | None] | None:
    if isinstance(frame, (list, tuple)) and len(frame) >= 3:
        file, line, function = frame[:3]
        text = frame[3] if len(frame) > 3 else None
    elif isinstance(frame, str) and (match := _MSPROBE.match(frame) or _TRACEBACK.match(frame.strip())):
        file, line, function, text = match.groups()
    else:
        return None
    place = f"{file}:{line} in {function}"[:FRAME_LENGTH]
    return place, str(text).strip()[:FRAME_LENGTH] or None if text else None


MAX_FILES = 1_000_000
MAX_DEPTH = 24
SNIFFED = 16  # bytes that tell the kinds of files apart

_PLACE = re.compile(r"(step|rank|proc)[-_]?(\d{1,9})", re.IGNORECASE)


class Tree:
    """The regular files below a folder, or one file alone. Paths are relative to the folder, with ``/`` between their parts.

    They are listed once, and nothing outside the folder is ever opened: a name that the dump's files give is looked up among the
    listed ones, so a path that leads out, or through a link, is just a missing file."""

    def __init__(self, source: Path, notes: Notes) -> None:
        """List the files; raises TrueupError if there is none, it cannot be read, or there are more than a dump holds."""
        self.source = source
        self.files: dict[str, int] = {}  # path -> bytes
        self._opened: set[str] = set()
        try:
            status = source.stat()
            if stat.S_ISREG(status.st_mode):
                self.root = source.parent
                self.files[source.name] = status.st_size
            else:
                self.root = source
                self._walk(notes)
        except FileNotFoundError:
            raise TrueupError(f"{source} is not there: expected a folder with a dump; check the path") from None
        except OSError as error:
            raise TrueupError(f"{source} cannot be read: {error.strerror}; check its permissions") from None
        if not self.files:
            raise TrueupError(f"{source} holds no files: expected a dump; check the path")

    def _walk(self, notes: Notes) -> None:
        pending = [("", 0)]
        while pending:
            folder, depth = pending.pop()
            try:
                entries = sorted(os.scandir(self.root / folder), key=lambda entry: entry.name)
            except PermissionError:
                notes.lose("a folder cannot be read", folder or ".")
                continue
            for entry in entries:
                path = f"{folder}{entry.name}"
                if entry.is_symlink():
                    notes.say("links are not followed", path)
                elif entry.is_dir(follow_symlinks=False):
                    if depth >= MAX_DEPTH:
                        notes.lose(f"folders deeper than {MAX_DEPTH} levels are not read", path)
                    else:
                        pending.append((f"{path}/", depth + 1))
                elif entry.is_file(follow_symlinks=False):
                    self.files[path] = entry.stat(follow_symlinks=False).st_size
                else:
                    notes.say("pipes and devices are not read", path)
            if len(self.files) > MAX_FILES:
                raise TrueupError(f"{self.source} holds more than {MAX_FILES:,} files: import a part of it, such as one step")

    def unopened(self) -> Iterator[str]:
        """Yield the files that nobody has read."""
        return (path for path in sorted(self.files) if path not in self._opened)

    def open(self, path: str) -> BinaryIO:
        """Open a listed file; raises OSError if it is unreadable, or no regular file any more, KeyError if it is not listed."""
        self._opened.add(path)
        return self._open(path)

    def _open(self, path: str) -> BinaryIO:
        self.files[path]
        descriptor = os.open(self.root / path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        file = os.fdopen(descriptor, "rb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise OSError("no regular file")
        return file

    def head(self, path: str, size: int = SNIFFED) -> bytes:
        """Return the first bytes of a listed file, none where it cannot be read."""
        try:
            with self._open(path) as file:
                return file.read(size)
        except OSError:
            return b""

    def within(self, folder: str, name: str) -> str | None:
        """Return the path of the file that a dump calls ``name`` in a folder, None where no such file is listed."""
        path = f"{folder}{name}"
        return path if path in self.files else None

    def ending(self, *suffixes: str) -> Iterator[str]:
        """Yield the files of such names, in order."""
        return (path for path in sorted(self.files) if path.lower().endswith(suffixes))


def folder_of(path: str) -> str:
    """Return the folder of a path, with its ``/``; empty at the top."""
    return path[: path.rfind("/") + 1]


def places(path: str) -> dict[str, int]:
    """Return the step, rank or process number that the folders of a path name."""
    found = {}
    for part in path.split("/")[:-1]:
        if match := _PLACE.fullmatch(part):
            found[match[1].lower()] = int(match[2])
    return found


def base(path: str) -> str:
    """Return the folder above those of steps and ranks: what one dump has in common."""
    parts = path.split("/")[:-1]
    while parts and (_PLACE.fullmatch(parts[-1]) or parts[-1].lower() == "rank"):
        parts.pop()
    return "/".join(parts)


def numbered(paths: Iterable[str], notes: Notes) -> dict[str, tuple[int, int]]:
    """Return ``(rank, step)`` of each file, in order of step and rank: its folders ``stepN`` and ``rankN``, else rank 0, step 0.

    Processes that had no rank (``proc4711``) get the lowest free numbers in the order of their ids. Raises TrueupError if the
    files are of several dumps, or two claim the same rank and step.
    """
    paths = sorted(paths)
    above = sorted({base(path) for path in paths})
    if len(above) > 1:
        some = ", ".join(repr(folder or ".") for folder in above[:5])
        raise TrueupError(f"there are {len(above)} dumps, in {some}{', …' if len(above) > 5 else ''}: import one of them at a time")
    found = {path: places(path) for path in paths}
    taken = {place["rank"] for place in found.values() if "rank" in place}
    processes = sorted({place["proc"] for place in found.values() if "proc" in place and "rank" not in place})
    free = (rank for rank in range(len(taken) + len(processes)) if rank not in taken)
    ranks = dict(zip(processes, free, strict=False))
    if len(processes) > 1:
        notes.say(f"{len(processes)} processes had no rank; they were numbered in the order of their process ids")
    placed = {path: (place.get("rank", ranks.get(place.get("proc", -1), 0)), place.get("step", 0)) for path, place in found.items()}
    seen: dict[tuple[int, int], str] = {}
    for path, at in placed.items():
        if at in seen:
            raise TrueupError(f"{seen[at]} and {path} are both of rank {at[0]}, step {at[1]}: import one of them by its own path")
        seen[at] = path
    return dict(sorted(placed.items(), key=lambda item: (item[1][1], item[1][0])))
