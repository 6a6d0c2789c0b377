"""The table of a shadow run: `rank-00000/shadow-0000.parquet`, a row per output that was judged and one per kind that was not.

See docs/shadow.md for the columns. Written at the end of a step, whole or not at all; read like everything in a capture, without
trust: a part that is damaged is left out and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trueup.foundation.model import TrueupError
from trueup.foundation.store import layout
from trueup.foundation.store.durable import write_file
from trueup.foundation.store.parts import BROKEN, ROWS_PER_BYTE

NAME = re.compile(r"shadow-([0-9]{4,9})\.parquet")
NOT_JUDGED = "not judged"

SCHEMA = pa.schema(
    [
        ("step", pa.int32()), ("rank", pa.int32()), ("seq", pa.int64()), ("phase", pa.string()), ("scope", pa.string()),
        ("op", pa.string()), ("ordinal", pa.int64()), ("api", pa.string()), ("slot", pa.string()), ("dtype", pa.string()),
        ("shape", pa.string()), ("state", pa.string()), ("error", pa.float64()), ("explained", pa.float64()),
        ("excess", pa.float64()), ("rule", pa.string()), ("reason", pa.string()), ("source", pa.string()),
        ("milliseconds", pa.float64()), ("calls", pa.int64()),
    ]
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Return rows as a table; columns that a row lacks are null."""
    return pa.Table.from_pylist(list(rows), SCHEMA)


def write(folder: Path, number: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write a part into a rank's folder.

    Raises:
        OSError: it cannot be written.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows), sink, compression="zstd", write_page_checksum=True)
    write_file(folder / f"shadow-{number:04d}.parquet", [memoryview(sink.getvalue())])


def read(root: Path, ranks: Iterable[int]) -> tuple[pa.Table, list[str]]:
    """Read the table of a capture, all ranks, in the order of execution; return it and what could not be read."""
    tables, problems = [], []
    for rank in sorted(ranks):
        folder = root / layout.rank_name(rank)
        for name in sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name)):
            try:
                tables.append(_part(root, folder / name))
            except (*BROKEN, TrueupError) as error:
                said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                problems.append(f"rank {rank}: {name} is truncated or damaged ({said}); its calls are missing")
    found = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    return found.sort_by([("step", "ascending"), ("rank", "ascending"), ("seq", "ascending")]), problems


def _part(root: Path, path: Path) -> pa.Table:
    size = layout.real_file(root, path).stat().st_size
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        rows = file.metadata.num_rows
        if rows > ROWS_PER_BYTE * size:
            raise ValueError(f"claims {rows} rows in a file of {size} bytes")
        found = file.read(columns=SCHEMA.names, use_threads=False)
    found.validate(full=True)
    return found.select(SCHEMA.names).cast(SCHEMA)
