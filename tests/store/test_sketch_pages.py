"""Sketches read where they lie are those of the records, and what a seal says of them is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trueup.foundation.model import LANES
from trueup.foundation.store import Capture, open_capture, parts
from trueup.foundation.store.schema import sketch_matrix

from .captures import writer

ROWS = 300


def recorded(directory: Path, *, steps: int = 1, parts: int = 1, absent: float = 0.2, **changed: Any) -> Capture:
    """Record calls of which some slots have no statistics."""
    random = np.random.default_rng(5)
    run = writer(directory)
    seq = 0
    for step in range(steps):
        for _ in range(parts):
            mask = random.random(ROWS) < absent
            sketch = np.ma.MaskedArray(random.standard_normal((ROWS, LANES)), np.broadcast_to(mask[:, None], (ROWS, LANES)))
            columns = {
                "seq": np.arange(seq, seq + ROWS) // 2, "op": ["aten::mm"] * ROWS, "slot": ["input.0", "output.0"] * (ROWS // 2),
                "n_nan": np.ma.MaskedArray(np.zeros(ROWS, np.int64), mask), "sketch": sketch,
            }  # fmt: skip
            run.write_records(step, columns | changed)
            seq += ROWS
    run.close()
    return open_capture(directory)


def forged(capture: Capture, **claims: Any) -> Capture:
    """Let the seal of the first part claim something else."""
    path = capture.path / "rank-00000/step-000000/records-0000.parquet"
    whole, told = path.read_bytes(), parts.check_seal(path)[1]
    at = whole.index(parts.MAGIC) - len(json.dumps(told, separators=(",", ":")))
    parquet = whole[:at] + whole[whole.index(parts.MAGIC) + 20 :]
    told |= {name: told[name] | claim if isinstance(claim, dict) else claim for name, claim in claims.items()}
    path.write_bytes(b"".join(bytes(chunk) for chunk in parts.sealed(pa.py_buffer(parquet), told)))
    return open_capture(capture.path)


@pytest.mark.parametrize("absent", [0.0, 0.2, 1.0])
def test_they_are_the_sketches_of_the_records(tmp_path: Path, absent: float) -> None:
    capture = recorded(tmp_path / "run", steps=2, parts=3, absent=absent)
    pieces = capture.pieces(0, [1, 0])
    assert pieces is not None
    assert [piece.rows for piece in pieces] == [ROWS] * 6
    rows = sketch_matrix(capture.records(["sketch"])["sketch"])
    there = capture.records(["n_nan"])["n_nan"].is_valid().to_numpy()
    memory = np.empty((ROWS, LANES))
    found = [piece.read(memory if n % 2 else None) for n, piece in enumerate(pieces)]
    assert all(lanes is not None for lanes in found)
    again = np.concatenate([piece.read(None) for piece in pieces])  # the memory holds the last part
    np.testing.assert_array_equal(again, rows[there])
    mapped = [piece.mapped() for piece in pieces]
    np.testing.assert_array_equal(np.concatenate([lanes.view("<f8") for lanes in mapped if lanes is not None and lanes.size]
                                                 or [np.empty((0, LANES))]), again)  # fmt: skip
    np.testing.assert_array_equal(memory[: pieces[-1].count], again[len(again) - pieces[-1].count :])


@pytest.mark.parametrize("changed", [
    {"n_nan": np.zeros(ROWS, np.int64)}, {"seq": np.arange(ROWS)[::-1]}, {"seq": [None, *range(1, ROWS)]},
], ids=["other rows have statistics", "out of order", "no seq"])  # fmt: skip
def test_what_cannot_be_said_in_short_is_not_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert recorded(tmp_path / "run", **changed).pieces(0, [0]) is None


def test_parts_that_overlap_are_read_as_a_whole(tmp_path: Path) -> None:
    assert recorded(tmp_path / "run", parts=2, seq=np.arange(ROWS)).pieces(0, [0]) is None


@pytest.mark.parametrize("claims", [
    {"sketches": {"at": -1}}, {"sketches": {"at": 10**18}}, {"sketches": {"count": 10**15}}, {"sketches": {"count": 7}},
    {"sketches": {"xxh3": "0" * 16}}, {"sketches": {"count": "x"}}, {"sketches": 3}, {"seqs": [1]}, {"seqs": "ab"},
], ids=str)  # fmt: skip
def test_a_seal_is_not_believed(tmp_path: Path, claims: dict[str, Any]) -> None:
    """The part is lost, when the capture is opened or when its sketches are read."""
    capture = forged(recorded(tmp_path / "run"), **claims)
    pieces = capture.pieces(0, [0]) or ()
    assert [piece.read(None) for piece in pieces] == [piece.mapped() for piece in pieces] == [None] * len(pieces)
    assert capture.lost


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    capture = recorded(tmp_path / "run")
    path = capture.path / "rank-00000/step-000000/records-0000.parquet"
    whole, told = bytearray(path.read_bytes()), parts.check_seal(path)[1]["sketches"]
    whole[told["at"] + 512 * told["count"] - 1] ^= 1
    path.write_bytes(whole)
    (piece,) = open_capture(capture.path).pieces(0, [0]) or ()
    assert piece.read(None) is None
    assert piece.mapped() is None
