"""However a training ends, what was recorded until then can be read and compared, and says how it ended."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.layout import holds_records

from .running import SCRIPTS, TRUEUP, cli, environment, said, script, trueup_run

INTERRUPTED = "rank 0 was interrupted or is still recording (status 'recording'): readable up to the last flush"
ENDED_BY_AN_ERROR = "rank 0 was ended by an error (status 'interrupted'): what would have run later is missing"
TRAIN = SCRIPTS / "train.py"
pytestmark = pytest.mark.usefixtures("warm")


def notes(capture: Capture) -> list[str]:
    return list(capture.ranks[0]["notes"])


@pytest.mark.parametrize(
    ("how", "code", "note", "problems", "compared"),
    [
        ("raise", 1, ["the run ended with ValueError: the last batch is broken"], [ENDED_BY_AN_ERROR], (2, "COULD NOT TELL")),
        ("exit", 3, [], [], (0, "ALIGNED")),
        ("_exit", 0, [], [], (0, "ALIGNED")),
    ],
)
def test_an_end_of_its_own_loses_nothing(
    tmp_path: Path, complete: Path, capsys: pytest.CaptureFixture[str], how: str, code: int, note: list[str],
    problems: list[str], compared: tuple[int, str],
) -> None:  # fmt: skip
    out = tmp_path / "capture"
    document = tmp_path / "document.json"
    run = trueup_run("capture", "-o", out, "--detail", "tensor", "--json", document, "--", *script("train.py", how))
    assert run.returncode == code
    capture = open_capture(out)
    assert capture.rows == open_capture(complete).rows
    assert (capture.problems, notes(capture)) == (problems, note)
    ended = f"; the command ended with exit code {code}" if code else ""
    assert f"trueup: captured {capture.rows:,} slots over 3 steps into {out}{ended}" in said(run)
    told = json.loads(document.read_text())
    assert (told["schema"], told["directory"], told["captured"], told["ranks"]) == ("trueup-capture", str(out), True, 1)
    assert (told["exit_code"], told["command_exit_code"], told["steps"], told["rows"]) == (code, code, 3, capture.rows)
    assert told["bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert told["notes"] == problems
    got, stdout, _ = cli(capsys, "compare", complete, out)
    assert (got, stdout[: len(compared[1])]) == compared


def test_killed_before_the_first_flush(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("train.py", "kill"))
    assert run.returncode == 137
    (message,) = said(run)
    assert message.startswith(
        f"trueup: nothing was captured into {out}; the command ended with exit code 137: process "
    )
    assert message.endswith(f" ({TRAIN} kill) was killed before its first flush, or could not write its report")


def start(out: Path, how: str) -> tuple[subprocess.Popen[str], int]:
    """Start an endless training under capture; return the process of `trueup` and the pid of the training."""
    process = subprocess.Popen(
        [*TRUEUP, "capture", "-o", str(out), "--", *script("train.py", how)],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "step 0\n"
    (report,) = (out / "processes").glob("*.json")
    return process, int(report.stem)


def test_killed_mid_step(tmp_path: Path, complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kills at random moments; what was flushed before, while the training went on, is there."""
    for attempt in range(2):
        out = tmp_path / f"capture-{attempt}"
        process, pid = start(out, "forever")
        assert process.stdout is not None
        while not holds_records(out):  # until a flush came by itself
            process.stdout.readline()
        for _ in range(random.randrange(50)):  # up to a second more
            process.stdout.readline()
        kept = open_capture(out).steps[-1]
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 137, err
        capture = open_capture(out)
        assert INTERRUPTED in capture.problems
        assert f"trueup: note: {INTERRUPTED}" in err
        assert capture.lost == []
        assert capture.steps == list(range(capture.steps[-1] + 1))
        assert capture.steps[-1] >= kept
        code, stdout, stderr = cli(capsys, "compare", complete, out)
        assert stderr == ""
        assert f"because the candidate is a fragment that ends in step {capture.steps[-1]}" in " ".join(stdout.split())
        assert (code, stdout[:14]) == (2, "COULD NOT TELL")


def test_terminated(tmp_path: Path) -> None:
    """SIGTERM to `trueup capture` reaches the training, whose own handler ends it."""
    out = tmp_path / "capture"
    process, _ = start(out, "patiently")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 5, err
    assert open_capture(out).problems == []
    assert err.splitlines()[-1].endswith(f"into {out}; the command ended with exit code 5")
