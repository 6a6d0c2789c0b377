"""The sketches of a part, read where they lie in its file.

Parquet keeps them in one page, plain: 512 bytes each, one after the other, without nulls. Its reader copies them twice and checks
the page's CRC, which takes twice as long as all the rest. So the seal of a part tells their place, number and xxh3_64.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from trueup.foundation.model import LANES
from trueup.foundation.store.schema import SKETCH_BYTES

PAGE_BYTES = 1 << 29  # bytes up to which sketches of a part lie in one page


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the sketches of all rows that have statistics lie: ``count`` of them, ``at`` bytes from the beginning of the file."""

    at: int
    count: int
    checksum: str

    @classmethod
    def of(cls, told: Mapping[str, Any] | None) -> Lanes | None:
        """Take the word of a seal; raises ValueError, TypeError or KeyError if it tells no such place."""
        if told is None:
            return None
        found = cls(int(told["at"]), int(told["count"]), str(told["xxh3"]))
        if found.at < 0 or found.count < 0:
            raise ValueError(f"its sketches cannot be {found.count} at byte {found.at}")
        return found

    def told(self) -> dict[str, Any]:
        """Return what a seal tells."""
        return {"at": self.at, "count": self.count, "xxh3": self.checksum}


def locate(file: pa.Buffer, metadata: pq.FileMetaData, table: pa.Table) -> Lanes | None:
    """Find out where the sketches of a part, as Parquet with its ``metadata``, lie; None where that cannot be said in short."""
    if not {"sketch", "n_nan"} <= set(table.column_names) or metadata.num_row_groups != 1:
        return None
    sketches = table["sketch"].combine_chunks()
    count, there = len(sketches) - sketches.null_count, sketches.is_valid()
    if SKETCH_BYTES * count > PAGE_BYTES or not there.equals(table["n_nan"].combine_chunks().is_valid()):
        return None
    group = metadata.row_group(0)
    chunk = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "sketch")
    end = chunk.data_page_offset + chunk.total_compressed_size
    held = memoryview(file)[end - SKETCH_BYTES * count : end]
    first = sketches[int(np.argmax(there.to_numpy(zero_copy_only=False)))].as_buffer() if count else b""
    if held[:SKETCH_BYTES] != memoryview(first):  # they are not alone in their page
        return None
    return Lanes(end - len(held), count, xxhash.xxh3_64_hexdigest(held))


def read(path: Path, lanes: Lanes, into: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the sketches of a part, float64 ``(count, 64)``: at the beginning of ``into`` if that is large enough. Raises
    OSError if the file cannot be read, ValueError if it is too short or does not match its checksum."""
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < lanes.at + SKETCH_BYTES * lanes.count:
            raise ValueError(f"it ends before its {lanes.count} sketches do")
        found: NDArray[Any] = np.empty((lanes.count, LANES)) if into is None or len(into) < lanes.count else into[: lanes.count]
        file.seek(lanes.at)
        left = found.reshape(-1).view(np.uint8).data
        while left:
            read = file.readinto(left)
            if not read:
                raise ValueError(f"it ends before its {lanes.count} sketches do")
            left = left[read:]
    _check(found.data, lanes)
    return found


def mapped(path: Path, lanes: Lanes) -> NDArray[np.uint8]:
    """Return the sketches of a part as mapped, uint8 ``(count, 512)``, for looking at a few here and there. Raises OSError if the
    file cannot be read, ValueError if it is too short or does not match its checksum."""
    size, before = SKETCH_BYTES * lanes.count, lanes.at % mmap.ALLOCATIONGRANULARITY
    if not size:
        return np.empty((0, SKETCH_BYTES), np.uint8)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < lanes.at + size:
            raise ValueError(f"it ends before its {lanes.count} sketches do")
        held = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_READ, offset=lanes.at - before)
    found = np.frombuffer(held, np.uint8, size, before)
    _check(found.data, lanes)
    return found.reshape(lanes.count, SKETCH_BYTES)


def _check(found: memoryview, lanes: Lanes) -> None:
    if xxhash.xxh3_64_hexdigest(found) != lanes.checksum:
        raise ValueError("its sketches do not match their checksum")
