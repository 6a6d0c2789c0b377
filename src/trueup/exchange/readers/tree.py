"""The files of a dump, listed once: nothing outside the folder is ever opened, whatever its files say.

A name that a dump's own files give is looked up among the listed ones, so a path that leads out, or through a link, is a missing
file and no more.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trueup.exchange.readers.notes import Notes
from trueup.foundation.model import TrueupError

MAX_FILES = 1_000_000
MAX_DEPTH = 24
SNIFFED = 16
"""Bytes that tell the kinds of files apart."""

_PLACE = re.compile(r"(step|rank|proc)[-_]?(\d{1,9})", re.IGNORECASE)


class Tree:
    """The regular files below a folder, or one file alone.

    Paths are relative to the folder and have ``/`` between their parts.
    """

    def __init__(self, source: Path, notes: Notes) -> None:
        """List the files.

        Raises:
            TrueupError: there is nothing there, it cannot be read, or it holds more files than a dump does.
        """
        self.source = source
        self.files: dict[str, int] = {}
        """Path -> bytes."""
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
        """Open a listed file.

        Raises:
            OSError: it cannot be read, or is no regular file any more.
            KeyError: it is none of the listed.
        """
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
