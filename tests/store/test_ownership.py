"""Two processes never write into one folder, and an older capture is never written over."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nursery import LIMIT
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Writer, claim, durable, open_capture

from .captures import columns, files, small, writer

PARENT = """
import sys
from pathlib import Path
from trueup.foundation.store import Writer, claim
out = Path(sys.argv[1])
Writer(out, claim(out, None, "one"), {"run": "one"}, {}).write_records(0, {"seq": [0, 1]})
"""

CHILD = """
import sys
from pathlib import Path
from trueup.foundation.store import Writer, claim
run, preferred, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
rank = claim(run, preferred, name)
out = Writer(run, rank, {"run": name}, {})
print(rank, flush=True)
sys.stdin.readline()
for step in range(3):
    out.write_records(step, {"seq": [0, 1]})
out.close()
"""


def start(run: Path, preferred: int = 0, name: str = "") -> subprocess.Popen:
    arguments = [sys.executable, "-c", CHILD, str(run), str(preferred), name]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("name", ["", "run-1"])
def test_siblings_share_a_directory(tmp_path: Path, name: str) -> None:
    """Three at the same time, all asking for rank 0: three folders, nothing mixed, and the two that gave way say so."""
    children = [start(tmp_path / "run", 0, name) for _ in range(3)]
    ranks = [int(child.stdout.readline()) for child in children]
    for child in children:
        child.communicate("go\n", timeout=LIMIT)
        assert child.returncode == 0
    assert sorted(ranks) == [0, 1, 2]
    capture = open_capture(tmp_path / "run")
    assert capture.problems == []
    assert capture.records(["rank", "step", "seq"]).num_rows == 18
    assert [len(capture.ranks[rank]["notes"]) for rank in range(3)] == [0, 1, 1]
    assert capture.ranks[1]["notes"] == ["rank 0 was taken by another process; this one is rank 1"]


def test_a_sibling_that_has_ended_is_known_by_its_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        child = start(tmp_path / "run", 0, "run-1")
        assert child.communicate("go\n", timeout=LIMIT)[0] == f"{rank}\n"
    with pytest.raises(TrueupError, match="already holds a capture"):
        claim(tmp_path / "run", 7, "run-2")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_older_capture_is_not_touched(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    child = start(run)
    child.communicate("go\n", timeout=LIMIT)
    before = files(run)
    message = f"{run} already holds a capture: nothing was recorded; choose another -o or remove it"
    with pytest.raises(TrueupError, match=re.escape(message)):
        claim(run, rank)
    assert files(run) == before


def test_ones_own_older_capture_is_not_touched(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    for name in (None, "run-1"):
        with pytest.raises(TrueupError, match="already holds a capture"):
            claim(run, 0, name)
    with pytest.raises(TrueupError, match="already holds a capture"):
        Writer(run, 0, {}, {})


def test_a_rank_held_by_another_process_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    (folder / "lock").write_text(json.dumps({"pid": os.getppid(), "host": "elsewhere"}))
    with pytest.raises(TrueupError, match="already holds a capture"):
        Writer(tmp_path, 0, {}, {})


@pytest.mark.parametrize("text", ["{}", "not json", '{"format_version": 99}'])
def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(TrueupError, match=r"nothing is recorded into .* or choose another -o"):
        claim(tmp_path, 0)
    assert files(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize("lock", ["", "[]", '{"pid": "x"}', '{"pid": 1e400}', '{"pid": 99999999999999999999}'])
def test_damaged_locks_count_as_taken(tmp_path: Path, lock: str) -> None:
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000/lock").write_text(lock)
    with pytest.raises(TrueupError, match="already holds a capture"):
        claim(tmp_path, 0)


def test_a_forked_child_cannot_write_as_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path / "run")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(TrueupError, match="a forked child must claim its own rank"):
        out.write_records(0, columns())



@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("look", range(6))
def test_a_worker_looks_while_another_moves_their_parent_aside(
    rank: int, look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks = tmp_path / "run", 0
    subprocess.run([sys.executable, "-c", PARENT, str(out)], check=True)
    read = durable.holder

    def holder(folder: Path) -> dict[str, object]:
        nonlocal looks
        looks += 1
        if looks == look + 1 and (out / "rank-00000").exists():
            (out / "rank-00000").rename(out / "unranked-1")
        return read(folder)

    monkeypatch.setattr(durable, "holder", holder)
    assert claim(out, rank, "one") == rank
    assert (out / f"rank-0000{rank}" / "lock").exists()
