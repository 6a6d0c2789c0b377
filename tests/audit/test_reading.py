"""Rows as objects are what Arrow makes of them."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from trueup.analysis.audit import reading


def test_rows_are_those_of_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", 3)
    names = pa.chunked_array([pa.array(["a", None, "b"]).dictionary_encode(), pa.array(["b", "c"]).dictionary_encode()])
    table = pa.table({
        "op": names, "empty": pa.nulls(5, pa.dictionary(pa.int32(), pa.string())), "seq": [1, 2, None, 2**62 + 1, 5],
        "step": pa.array([0, 0, 0, 1, 1], pa.int32()), "l2": [1.5, None, float("inf"), 0.0, -2.0],
        "shape": [[1, 2], None, [], [3], [4]], "value": ["{}", None, "", "x", "y"],
    })  # fmt: skip
    found = list(reading._rows(table))
    assert found == table.to_pylist()
    assert [type(value) for row in found for value in row.values()] == [type(v) for row in table.to_pylist() for v in row.values()]
    assert math.isnan(next(reading._rows(pa.table({"l2": [math.nan]})))["l2"])
    assert list(reading._rows(table.slice(0, 0))) == []
