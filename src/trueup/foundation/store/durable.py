"""Files that are there whole or not at all: write to ``<name>.tmp``, fsync, rename, fsync the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trueup.foundation.store import direct
from trueup.foundation.store.layout import TEMPORARY

Bytes = bytes | bytearray | memoryview


def write_file(path: Path, chunks: Iterable[Any], *, replace: bool = True, sync: bool = True) -> None:
    """Write ``chunks`` (bytes-like) to ``path`` atomically; after a failure neither it nor its temporary file is left.

    Args:
        path: the folder must exist.
        chunks: written one after the other, without a copy.
        replace: False raises FileExistsError when ``path`` exists, whoever came first.
        sync: False leaves it to the caller to make the file survive a power cut.

    Raises:
        OSError: disk full, no permission, folder gone.
    """
    if replace:
        stage(path, chunks, sync=sync)
        publish(path)
    else:
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        put(temporary, chunks, sync=sync)
        with _removed_on_failure(temporary):
            os.link(temporary, path)  # unlike rename, a link never replaces
            temporary.unlink()
    if sync:
        sync_folder(path.parent)


def stage(path: Path, chunks: Iterable[Any], *, sync: bool = False) -> None:
    """Write a file that gets its name from `publish`; after a failure nothing of it is left.

    Raises:
        OSError: disk full, no permission, folder gone.
    """
    put(_staged(path), chunks, sync=sync)


def publish(path: Path) -> None:
    """Give a staged file its name.

    Raises:
        OSError: no permission, folder gone.
    """
    temporary = _staged(path)
    with _removed_on_failure(temporary):
        temporary.replace(path)


def _staged(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)


def put(temporary: Path, chunks: Iterable[Any], *, sync: bool) -> None:
    """Write a file under its temporary name, as all files here are; after a failure nothing of it is left."""
    with _removed_on_failure(temporary), temporary.open("wb") as file:
        for chunk in chunks:
            direct.write(file, chunk)
        file.flush()
        if sync:
            os.fsync(file.fileno())


@contextmanager
def _removed_on_failure(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: Path, content: dict[str, Any], *, replace: bool = True) -> None:
    """Write a JSON object atomically; what JSON cannot say (paths, dtypes) is written as its text."""
    text = json.dumps(content, indent=1, default=str)
    write_file(path, [text.encode("utf-8", "backslashreplace"), b"\n"], replace=replace)


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create ``path`` durably; without ``parents``, a capture that was removed meanwhile is not half resurrected."""
    if not path.is_dir():
        path.mkdir(parents=parents, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can (Windows cannot open folders)."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
