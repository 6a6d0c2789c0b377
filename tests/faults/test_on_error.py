"""`trueup capture --on-error`: what the command does, and its exit code, when its capture cannot be written."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launch.running import TRUEUP, environment, said, script, trueup_run
from nursery import LIMIT
from trueup.foundation.store import open_capture


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begin a command under capture, and wait until it has flushed twice."""
    process = subprocess.Popen(
        [*TRUEUP, "capture", "-o", str(out), *arguments],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + LIMIT
    while not ((out / "manifest.json").exists() and len(open_capture(out).steps) >= 30):
        assert time.monotonic() < until, process.poll()
        time.sleep(0.02)
    return process


@pytest.mark.usefixtures("warm")
def test_stop_ends_a_run_in_words(tmp_path: Path) -> None:
    """An endless training whose rank folder disappears: exit code 2, one message, no traceback."""
    out = tmp_path / "capture"
    process = start(out, "--on-error", "stop", "--", *script("train.py", "forever"))
    (out / "rank-00000").rename(tmp_path / "gone")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    assert err.count("trueup: capture stopped at step ") == 1
    assert "Stopping, as asked." in err
    assert err.count("trueup: capture stopped, and the run with it, as asked: [Errno 2] No such file or directory") == 1


@pytest.mark.usefixtures("warm")
def test_continue_passes_the_exit_code_of_the_training_on(tmp_path: Path) -> None:
    """As any code of its own, here that of a handler of SIGTERM."""
    out = tmp_path / "capture"
    process = start(out, "--", *script("train.py", "patiently"))
    while out.exists():
        shutil.rmtree(out, ignore_errors=True)
    time.sleep(2.5)
    assert process.poll() is None, "the training goes on"
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 5, err
    assert err.count("The training goes on without it.") == 1
    assert f"nothing was captured into {out}; the command ended with exit code 5: the directory was removed" in err
    assert not out.exists()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_disk_without_room_for_the_first_flush(on_error: str, tmp_path: Path) -> None:
    """No file beyond 8 KB: nothing is captured, so the exit code is 2 either way, and the reason is said."""
    out = tmp_path / "capture"
    command = [*TRUEUP, "capture", "-o", str(out), "--on-error", on_error, "--", *script("train.py", "no room")]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ran.returncode == 2
    # To stop is asked for at the first flush, which a slow machine reaches before the last step.
    assert "step 2" in ran.stdout or (on_error == "stop" and "and the run with it, as asked" in ran.stderr)
    (failed,) = [line for line in said(ran) if line.startswith("trueup: nothing was captured")]
    assert failed.endswith("failed: [Errno 27] File too large")


def test_words_are_checked(tmp_path: Path) -> None:
    ran = trueup_run("capture", "-o", tmp_path / "c", "--on-error", "ignore", "--", *script("train.py"))
    assert (ran.returncode, ran.stdout) == (64, "")
    assert "on_error 'ignore' is unknown: expected continue or stop" in ran.stderr

