from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest

from trueup.doors.report import progress
from trueup.foundation.progress import (
    TALLIES,
    Progress,
    advance,
    how_to_go_on,
    leaving,
    listening,
    read_written,
    tell_written,
)
from trueup.recording.recorder import following
from verdict.captures import Recording


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.delenv("TRUEUP_QUIET")
    with progress.shown():
        advance("executing", "calls", 1200)
        said = ""
        while not said:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said.startswith("trueup: executing: 1,200 calls in ")
    capsys.readouterr()
    monkeypatch.setenv("TRUEUP_QUIET", "1")
    with progress.shown():
        advance("executing", "calls", 1)
        time.sleep(0.05)
    advance("executing", "calls", 2)  # nobody listens
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_goes_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "SOON", 0.0)
    monkeypatch.delenv("TRUEUP_QUIET")
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown():
        while "3 steps" not in screen.getvalue():
            advance("comparing", "steps", 3, 40)
            time.sleep(0.01)
    assert "%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is taken away


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (Progress("comparing", "steps", 0, 40), "comparing: 0 of 40 steps in 10 s"),
        (Progress("comparing", "steps", 10, 40), "comparing: 10 of 40 steps in 10 s, about 30 s left"),
        (Progress("executing", "calls", 12000), "executing: 12,000 calls in 10 s"),
        (Progress("capturing", "rows", 12000, detail="2 steps"), "capturing: 12,000 rows in 10 s; 2 steps"),
    ],
)
def test_what_is_said(one: Progress, said: str) -> None:
    assert progress.sentence(one, 10.0) == said


def test_a_capture_that_others_write_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Recording(), Recording()]
    for step in range(3):
        runs[0].call("aten::neg", [np.ones(4)], [-np.ones(4)], step=step)
    runs[1].call("aten::neg", [np.ones(4)], [-np.ones(4)])
    monkeypatch.setattr(following, "EVERY", 0.01)
    heard: list[Progress] = []
    with following.following() as variables:  # nobody listens, nobody looks
        assert variables == {}
    with listening(heard.append), following.following("healing, run-2") as variables:
        folder = Path(variables[TALLIES])
        (folder / "1").write_bytes(b"cut off")  # while it is written
        for process, run in enumerate(runs, 4711):
            with monkeypatch.context() as patch:
                patch.setenv(TALLIES, str(folder))
                patch.setattr("os.getpid", lambda process=process: process)
                run.write(tmp_path / f"run-{process}")
        while not heard or heard[-1].done < 8:
            time.sleep(0.01)
        files = [path for path in tmp_path.glob("run-*/rank-*/step-*/records-*") if path.is_file()]
        assert read_written(folder)[:2] == (3, 8)
        assert 0 < read_written(folder)[2] <= sum(path.stat().st_size for path in files)
    assert (heard[-1].doing, heard[-1].kind, heard[-1].done) == ("healing, run-2", "rows", 8)
    assert heard[-1].detail.startswith("3 steps, 0.0 MB written")
    assert not folder.exists()


def test_a_process_on_another_machine_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TALLIES, str(tmp_path / "not/here"))
    tell_written(1, 2, 3)
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_is_said_once() -> None:
    with pytest.raises(KeyboardInterrupt), leaving("outer"), leaving("inner"):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no"), leaving("not interrupted"):
        raise ValueError("no")
    assert (how_to_go_on(), how_to_go_on()) == (["inner", "outer"], [])
