"""Disks that are full, slow, gone, read-only or hang: the training goes on, or stops, as asked; what is on disk stays readable."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.running import cli
from nursery import Child, Nursery

from .readable import check, steps_trained

LOUD = "trueup: capture stopped at step "
GOES_ON = "The training goes on without it."
STOPS = "RunStopped: capture stopped, and the run with it, as asked: "


def ended_as_asked(child: Child, on_error: str, why: str, losses: list[str]) -> None:
    """Look at how a training ended whose capture failed half-way."""
    code = child.wait()
    spoken = [line for line in child.said.splitlines() if line.startswith("trueup:")]
    assert len(spoken) == 1, (code, child.said)
    (loud,) = spoken
    assert loud.startswith(LOUD)
    assert any(one in loud for one in why.split(" or "))
    steps = steps_trained(child.said)
    assert steps == losses[: len(steps)], "the capture changed the training"
    if on_error == "continue":
        assert (code, loud.endswith(GOES_ON), "trained\n" in child.said) == (0, True, True), child.said
    else:
        assert (code, loud.endswith("Stopping, as asked."), "trained\n" in child.said) == (1, True, False), child.said
        assert STOPS in child.said


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_full_disk(
    on_error: str, nursery: Nursery, complete: Path, losses: list[str], small_disk: Path, tmp_path: Path, capsys
) -> None:
    out = small_disk / "capture"
    arguments = {"steps": 40, "flush": 0.1, "pause": 0.02, "level": "api", "on_error": on_error}
    child = nursery.start("train", tmp_path / "log", out=out, **arguments)
    ended_as_asked(child, on_error, "[Errno 28] No space left on device", losses)
    capture = check(out, complete, capsys)
    assert len(steps_trained(child.said)) >= len(capture.steps) > 1


@pytest.mark.parametrize("on_error", ["continue", "stop"])
@pytest.mark.parametrize("detail", ["stats", "tensor"])
def test_a_file_that_cannot_grow(
    on_error: str, detail: str, nursery: Nursery, complete: Path, losses: list[str], tmp_path: Path, capsys
) -> None:
    """RLIMIT_FSIZE: a write that ends in its middle, without root."""
    out = tmp_path / "capture"
    arguments = {"size": 20_000, "steps": 40, "on_error": on_error, "detail": detail, "level": "module"}
    child = nursery.start("limited", tmp_path / "log", out=out, **arguments)
    ended_as_asked(child, on_error, "[Errno 27] File too large", losses)
    assert not list(out.rglob("*.tmp"))
    assert check(out, complete, capsys).rows


def removed(out: Path) -> None:
    shutil.rmtree(out.rename(out.with_name("trash")))  # at once: rm -rf takes its time, and the capture goes on meanwhile


def replaced(out: Path) -> None:
    out.rename(out.with_name("moved"))
    out.write_text("a file of somebody else")


@pytest.mark.parametrize(
    ("happens", "why", "on_error"),
    [
        (removed, "[Errno 2] No such file or directory", "continue"),
        (removed, "[Errno 2] No such file or directory", "stop"),
        # the capture may write between the two
        (replaced, "[Errno 20] Not a directory or [Errno 2] No such file or directory", "continue"),
    ],
)
def test_a_directory_that_goes_away(
    happens: Callable[[Path], None], why: str, on_error: str, nursery: Nursery, complete: Path, losses: list[str],
    tmp_path: Path, capsys,
) -> None:  # fmt: skip
    out, end = tmp_path / "capture", tmp_path / "end"
    child = nursery.start("train_until", tmp_path / "log", out=out, end=end, after=20, on_error=on_error, level="module")
    child.see("step 10 ")
    happens(out)
    end.touch()
    ended_as_asked(child, on_error, why, losses)
    if happens is removed:
        assert not out.exists(), "what was removed is not half resurrected"
    else:
        assert out.read_text() == "a file of somebody else"
        check(tmp_path / "moved", complete, capsys)
    code, _, err = cli(capsys, "show", out)
    assert (code, err.count("trueup: ")) == (2, 1)


def test_a_disk_that_becomes_read_only(
    nursery: Nursery, complete: Path, losses: list[str], small_disk: Path, tmp_path: Path, capsys
) -> None:
    """As a file system does after an I/O error; a directory without write permission would not stop root."""
    out, end = small_disk / "capture", tmp_path / "end"
    child = nursery.start("train_until", tmp_path / "log", out=out, end=end, after=20, on_error="continue", level="module")
    child.see("step 10 ")
    for _ in range(100):  # refused while a file is open for writing
        if not subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False).returncode:
            break
    end.touch()
    ended_as_asked(child, "continue", "[Errno 30] Read-only file system", losses)
    check(out, complete, capsys)


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_disk_that_hangs(
    on_error: str, nursery: Nursery, complete: Path, losses: list[str], tmp_path: Path, capsys
) -> None:
    """It is given up after `PATIENCE`, here a second; the thread that hangs in it holds up nobody, nor the end."""
    out = tmp_path / "capture"
    child = nursery.start("hanging_disk", tmp_path / "log", out=out, steps=300, patience=1.0, on_error=on_error)
    code = child.wait()
    waits, stopped = [line for line in child.said.splitlines() if line.startswith("trueup:")]
    assert waits.startswith(f"trueup: the run waits for the disk of {out}: ")
    assert "the disk took nothing for 1 seconds" in stopped
    steps = steps_trained(child.said)
    assert steps == losses[: len(steps)]
    assert (code, "trained\n" in child.said, STOPS in child.said) == (
        (0, True, False) if on_error == "continue" else (1, False, True)
    )
    check(out, complete, capsys)


def test_a_slow_disk_bounds_memory_and_drops_nothing(nursery: Nursery, tmp_path: Path) -> None:
    """24 tensors of 4 MB and more a step, at 60 MB a second: the training waits, and holds at most 256 MB more."""
    out, steps = tmp_path / "capture", 5
    arguments = {"steps": steps, "megabytes_per_second": 150, "wide": 1024, "detail": "tensor", "level": "aten"}
    child = nursery.start("slow_disk", tmp_path / "log", out=out, **arguments)
    assert child.wait() == 0, child.said
    said = dict(zip(*[iter(child.said.split())] * 2, strict=True))
    stored = sum(file.stat().st_size for file in out.rglob("*.safetensors")) / 2**20
    print(child.said, stored)
    assert stored > 300, "less than fits into memory: this tested nothing"
    assert float(said["more"]) < 256
    from trueup.foundation.store import open_capture

    capture = open_capture(out)
    assert (capture.problems, capture.lost, len(capture.steps)) == ([], [], steps)


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_writer_that_dies(on_error: str, nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    child = nursery.start("dying_writer", tmp_path / "log", out=tmp_path / "capture", steps=40, on_error=on_error)
    ended_as_asked(child, on_error, "SystemExit: 7", losses)
