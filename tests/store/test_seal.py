"""A damaged footer never passes for a sound one, and one from elsewhere is read without a seal."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from trueup.foundation.store import open_capture, parts
from trueup.foundation.store.writer import encode_records

from .captures import small


def test_every_byte_after_the_seal_counts(tmp_path: Path) -> None:
    path = small(tmp_path / "run", steps=1, parts=1) / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes()
    parts.check_seal(path)
    magic = whole.index(parts.MAGIC)
    told = magic - int.from_bytes(whole[magic + 8 : magic + 12], "little")
    assert parts.check_seal(path)[1]["rows"] == 12
    for place in (*range(told, magic), *range(magic + 8, len(whole))):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        if len(whole) - 8 <= place < len(whole) - 4:
            continue  # another footer length: Parquet itself finds no footer there
        with pytest.raises(ValueError, match=r"does not match its checksum|does not end as a Parquet file"):
            parts.check_seal(path)


@pytest.mark.parametrize("claim", [
    {"rows": 10**12}, {"rows": -1}, {"rows": 11}, {"names": None}, {"names": ["seq", "no such"]}, {"step": 1}, {"rank": "x"},
    {"levels": 3},
])  # fmt: skip
def test_a_seal_is_not_believed_against_the_rows(tmp_path: Path, claim: dict[str, Any]) -> None:
    """A seal is easily forged: what it says is checked, when the capture is opened or when the rows are read."""
    run = small(tmp_path / "run", steps=1, parts=1)
    path = run / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes()
    told = parts.check_seal(path)[1]
    at = whole.index(parts.MAGIC) - len(json.dumps(told, separators=(",", ":")))
    parquet = whole[:at] + whole[whole.index(parts.MAGIC) + 20 :]
    path.write_bytes(b"".join(bytes(chunk) for chunk in parts.sealed(pa.py_buffer(parquet), told | claim)))
    capture = open_capture(run)
    assert capture.records().num_rows == 0
    assert any("records-0000.parquet" in text for text in capture.lost)


def test_a_seal_that_tells_no_json_or_of_before(tmp_path: Path) -> None:
    run = small(tmp_path / "run", steps=1, parts=1)
    path = run / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes()
    footer = whole[whole.index(parts.MAGIC) + 20 :]
    page = whole[: whole.index(b'{"rank"')]
    deep = b"[" * 100_000
    sealed = xxhash.xxh3_64(deep + footer).intdigest().to_bytes(8, "little")
    path.write_bytes(page + deep + parts.MAGIC + len(deep).to_bytes(4, "little") + sealed + footer)
    assert any("no JSON" in text for text in open_capture(run).lost)
    path.write_bytes(page + b"TRUEUP01" + xxhash.xxh3_64(footer).intdigest().to_bytes(8, "little") + footer)
    assert open_capture(run).records().num_rows == 12
    path.write_bytes(page + b"TRUEUP01" + bytes(8) + footer)
    assert any("does not match its checksum" in text for text in open_capture(run).lost)


def test_unsealed_files_are_read_and_their_damage_survived(tmp_path: Path) -> None:
    run = small(tmp_path / "run", steps=1, parts=1)
    path = run / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes().replace(parts.MAGIC, b"\0" * 8)
    path.write_bytes(whole)
    assert open_capture(run).problems == []
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    chance = random.Random(4)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[-chance.randrange(1, footer + 1)] = chance.randrange(256)
        path.write_bytes(damaged)
        capture = open_capture(run)
        assert capture.records(["seq", "op"]).num_rows in (0, 12)


def test_pages_have_checksums() -> None:
    """One byte of a page that LZ4 unpacks to other numbers without a word."""
    file, _ = encode_records(pa.table({"l2": np.random.default_rng(0).standard_normal(100)}))
    column = pq.ParquetFile(pa.BufferReader(file)).metadata.row_group(0).column(0)
    damaged = bytearray(file)
    damaged[column.data_page_offset + column.total_compressed_size - 9] ^= 1
    assert pq.read_table(pa.BufferReader(file), page_checksum_verification=True).num_rows == 100
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(pa.BufferReader(pa.py_buffer(bytes(damaged))), page_checksum_verification=True)
