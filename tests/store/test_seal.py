"""A damaged footer never passes for a sound one, and one from elsewhere is read without a seal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trueup.store import open_capture, seal

from .captures import small


def test_every_byte_after_the_seal_counts(tmp_path: Path) -> None:
    path = small(tmp_path / "run", steps=1, parts=1) / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes()
    seal.check(path)
    start = whole.index(seal.MAGIC)
    for place in range(start + 8, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        if len(whole) - 8 <= place < len(whole) - 4:
            continue  # another footer length: Parquet itself finds no footer there
        with pytest.raises(ValueError, match=r"does not match its checksum|does not end as a Parquet file"):
            seal.check(path)


def test_unsealed_files_are_read_and_their_damage_survived(tmp_path: Path) -> None:
    run = small(tmp_path / "run", steps=1, parts=1)
    path = run / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes().replace(seal.MAGIC, b"\0" * 8)
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
