"""docs/format.md says what the code does: its columns, its constants, its queries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from trueup.foundation.kernels import sketch
from trueup.foundation.store.layout import FORMAT_VERSION
from trueup.foundation.store.schema import COLUMNS

from .captures import columns, small, writer

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def kind_name(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "string"
    if pa.types.is_fixed_size_list(kind):
        return "double[64]"
    return "list<int64>" if pa.types.is_list(kind) else str(kind)


def test_every_column_is_described() -> None:
    rows = [f"| `{name}` | {kind_name(kind)} | {meaning} |" for name, kind, meaning in COLUMNS]
    assert re.findall(r"^\| `.*$", PAGE, re.MULTILINE) == rows


def test_version_and_constants() -> None:
    assert PAGE.startswith(f"# The capture directory, format {FORMAT_VERSION}\n")
    for constant in (sketch.GOLDEN, *sketch.MIX):
        assert f"0x{constant:X}" in PAGE


@pytest.mark.parametrize("query", re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL))
def test_queries_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    small(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert duckdb.sql(query).fetchall() == []  # nothing is wrong there


def test_sketches_tell_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "run")
    out = writer(tmp_path / "other")
    out.write_records(0, columns(seed=5))  # other numbers than in ``run``
    out.close()
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    rows = found["moved"].fetchall()
    assert rows
    assert all(0.5 < row[3] < 3 for row in rows)
