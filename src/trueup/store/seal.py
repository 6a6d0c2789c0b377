"""The seal of a Parquet file: a checksum of its footer, where no Parquet reader looks.

Pages carry checksums of their own, the footer has none; a flipped bit there can move a column or, in pyarrow 26, abort
the process. The 16 bytes ``TRUEUP01`` and xxh3_64 (little-endian) of everything after them stand between the last page
and the footer. A file without them was written by somebody else, and is read unsealed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import xxhash

MAGIC = b"TRUEUP01"
_END = 8  # length of the footer (4 bytes, little-endian), then PAR1


def sealed(file: pa.Buffer) -> Iterator[memoryview | bytes]:
    """Yield the chunks of a Parquet file with its seal."""
    view = memoryview(file)
    start = len(view) - _END - int.from_bytes(view[-_END : -_END + 4], "little")
    yield view[:start]
    yield MAGIC + xxhash.xxh3_64_intdigest(view[start:]).to_bytes(8, "little")
    yield view[start:]


def check(path: Path) -> None:
    """Raise ValueError if the file is no whole Parquet file or its footer does not match its seal."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        end = file.read(_END)
        start = size - _END - int.from_bytes(end[:4], "little")
        if end[4:] != b"PAR1" or start < 4:
            raise ValueError("it does not end as a Parquet file does")
        file.seek(max(0, start - 16))
        tail = file.read()
    seal, footer = tail[: min(16, start)], tail[min(16, start) :]
    if seal[:8] == MAGIC and seal[8:] != xxhash.xxh3_64_intdigest(footer).to_bytes(8, "little"):
        raise ValueError("its footer does not match its checksum")
