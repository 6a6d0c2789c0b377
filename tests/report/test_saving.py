from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from trueup.doors.report import saving
from trueup.doors.report.saving import save
from trueup.foundation.model import TrueupError

from .results import result


def test_a_report_is_three_files(tmp_path: Path) -> None:
    shown = result()
    assert shown.save(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    saved = tmp_path / "a" / "b"
    assert sorted(path.name for path in saved.iterdir()) == ["calls.parquet", "index.html", "verdict.json"]
    assert parquet.read_table(saved / "calls.parquet").equals(shown.calls)
    assert json.loads((saved / "verdict.json").read_text())["verdict"] == "deviates"
    assert (saved / "index.html").read_text().startswith("<!doctype html>")


def test_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    save(result(), tmp_path)
    save(result("aligned"), tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "aligned"


def test_nothing_is_written_when_a_format_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no page")

    monkeypatch.setattr(saving, "render_page", fail)
    with pytest.raises(RuntimeError, match="no page"):
        save(result(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(result(), tmp_path)
    before = (tmp_path / "verdict.json").read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.os, "fsync", fail)
    with pytest.raises(TrueupError, match="No space left on device"):
        save(result("aligned"), tmp_path)
    assert (tmp_path / "verdict.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrueupError) as error:
        save(result(), tmp_path / "file" / "report")
    assert str(error.value).splitlines() == [
        "The report could not be written: Not a directory.",
        f"  where:    {tmp_path / 'file' / 'report'}",
        "  expected: a directory that can be made and written, for verdict.json, calls.parquet, index.html",
        f"  got:      {tmp_path / 'file'} is a file",
        "  next:     name another directory with -o, or make this one writable",
    ]
