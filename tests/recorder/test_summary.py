"""What the end of `trueup capture` says, and what it leaves on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.captures import columns, writer
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.summary import tell


def test_what_was_recorded_stays_where_it_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture"
    out = writer(path)
    out.write_records(0, columns())
    out.close()
    (path / "manifest.json").write_text("{ half of it")
    assert tell(path, CaptureOptions(), code=0) == 2
    said = capsys.readouterr().err
    assert "cannot be opened; nothing of it was removed" in said
    assert f"trueup show {path}" in said
    assert list(path.glob("rank-00000/step-*/records-*.parquet"))


def test_what_holds_nothing_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "capture"
    writer(path).close()
    assert tell(path, CaptureOptions(), code=0) == 2
    assert "nothing was captured into" in capsys.readouterr().err
    assert not path.exists()
