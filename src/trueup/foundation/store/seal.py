"""The seal of a Parquet file: what its writer says that it holds, and a checksum of that and of the footer.

Pages carry checksums of their own, the footer has none; a flipped bit there can move a column or, in pyarrow 26, abort
the process. Between the last page and the footer, where no Parquet reader looks, stand::

    what is told (JSON, may be empty) | TRUEUP02 | its length (4 bytes) | xxh3_64 of it and of everything after (8 bytes)

integers little-endian. With it a capture of 10,000 parts is opened without parsing as many footers. A file without a seal was
written by somebody else, and is read unsealed; one of ``TRUEUP01`` is checked, and tells nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

MAGIC = b"TRUEUP02"
_BEFORE = b"TRUEUP01"
_END = 8  # length of the footer (4 bytes, little-endian), then PAR1
_SEAL = 20
_TAIL = 1 << 14  # bytes read at once: the footer of a part, its seal and what that tells take 6,000


def sealed(file: pa.Buffer, told: Mapping[str, Any] | None = None) -> Iterator[memoryview | bytes]:
    """Yield the chunks of a Parquet file with its seal, which tells ``told``."""
    view = memoryview(file)
    start = len(view) - _END - int.from_bytes(view[-_END : -_END + 4], "little")
    said = b"" if told is None else json.dumps(told, separators=(",", ":")).encode()
    yield view[:start]
    yield said + MAGIC + len(said).to_bytes(4, "little") + _checksum(said, view[start:])
    yield view[start:]


def check(path: Path) -> tuple[int, Any]:
    """Read the end of a Parquet file: return the size of the file in bytes, and what its seal tells, None if nothing.

    Raises:
        ValueError: it is no whole Parquet file, or its footer does not match its seal.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        at = max(0, size - _TAIL)
        file.seek(at)
        tail = file.read()
        start = size - _END - int.from_bytes(tail[-_END:-4], "little")
        if tail[-4:] != b"PAR1" or start < 4:
            raise ValueError("it does not end as a Parquet file does")

        def since(first: int) -> bytes:
            if first >= at:
                return tail[first - at :]
            file.seek(first)
            return file.read()

        begin = max(0, start - _SEAL)
        seal, footer = since(begin)[: start - begin], since(start)
        if seal[-16:-8] == _BEFORE and seal[-8:] != _checksum(b"", footer):
            raise ValueError("its footer does not match its checksum")
        if seal[:8] != MAGIC:
            return size, None
        told = min(int.from_bytes(seal[8:12], "little"), begin)
        said = since(begin - told)[:told]
        if seal[12:] != _checksum(said, footer):
            raise ValueError("its footer does not match its checksum")
    try:
        return size, json.loads(said) if said else None
    except (ValueError, RecursionError):
        raise ValueError("what its seal tells is no JSON") from None


def _checksum(said: bytes, footer: bytes | memoryview) -> bytes:
    found = xxhash.xxh3_64(said)
    found.update(footer)
    return found.intdigest().to_bytes(8, "little")
