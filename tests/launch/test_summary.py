"""What the end of `trueup capture` says, and what it leaves on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.captures import columns, writer
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.launch import tell, tell_watched


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


def test_two_hits_of_one_step_are_named_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [{"step": 4, "rank": 0, "said": f"hit {k}", "path": f"step-4-{k}", "tensors": ""} for k in range(2)]
    first.insert(0, {**first[0], "step": 5, "said": "late"})
    watch = {"steps": 6, "hits": 3, "transients": 0, "first": first, "loss_scale": {"said": ""}}
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "1.json").write_text(json.dumps({"pid": 1, "calls": 9, "watch": watch}))
    assert tell_watched(tmp_path, CaptureOptions(), 0) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "trueup: watched 6 steps: 3 hits"
    assert [line.split()[1:3] for line in said[1:]] == [["hit", "0"], ["hit", "1"], ["late", "(step-4-0)"]]
