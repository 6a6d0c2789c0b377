"""No part of the records goes missing, is copied or comes from elsewhere without a sentence that says which."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from trueup.foundation.store import durable, open_capture

from .captures import columns, small, writer

COLUMNS = ["step", "seq", "slot", "l2", "digest", "sketch", "value"]
PACKED = ["packed-0000.parquet", "packed-0001.parquet"]
PARTS = [f"step-{step:06d}/records-{part:04d}.parquet" for step in range(3) for part in range(2)]


def _held(run: Path, **fields: Any) -> None:
    """Change fields of the rank's manifest."""
    path = run / "rank-00000/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_whole_capture_lacks_nothing(tmp_path: Path) -> None:
    capture = open_capture(small(tmp_path / "run"))
    assert (capture.problems, capture.lost, capture.unfinished) == ([], [], [])


@pytest.mark.parametrize("status", ["complete", "recording"])
@pytest.mark.parametrize("part", range(6))
def test_each_part_that_is_removed_is_missed(tmp_path: Path, part: int, status: str) -> None:
    """Of a run that was killed nobody knows how much it had written: of its last part nothing tells."""
    run = small(tmp_path / "run")
    _held(run, status=status)
    (run / "rank-00000" / PARTS[part]).unlink()
    place = f"after {PARTS[part - 1]}" if part else "at the beginning"
    said = f"rank 0: 1 part of records with 12 rows is missing {place}"
    assert (said in open_capture(run).lost) == (part < 5 or status == "complete")


@pytest.mark.parametrize("other", range(1, 6))
def test_a_part_overwritten_by_another_is_told(tmp_path: Path, other: int) -> None:
    run = small(tmp_path / "run")
    folder = run / "rank-00000"
    shutil.copy(folder / PARTS[0], folder / PARTS[other])
    step = other // 2
    reason = "it is a copy of records-0000.parquet" if step == 0 else f"rows are not of step {step}, as the folder is"
    lost = open_capture(run).lost
    assert lost[0].startswith(f"rank 0 step {step}: {Path(PARTS[other]).name} is truncated or damaged ({reason})")
    assert lost[1] == f"rank 0: 1 part of records with 12 rows is missing after {PARTS[other - 1]}"


def test_a_part_of_another_run_is_told(tmp_path: Path) -> None:
    run, other = small(tmp_path / "run"), small(tmp_path / "other")
    shutil.copy(other / "rank-00000" / PARTS[3], run / "rank-00000" / PARTS[3])
    assert open_capture(run).lost == [f"rank 0: {PARTS[3]} is of another run than the rank's manifest"]
    (run / "rank-00000/manifest.json").unlink()
    assert open_capture(run).lost == [f"rank 0: {PARTS[3]} is of another run than the parts before it"]


def test_a_part_rewritten_with_fewer_rows_is_told(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    path = run / "rank-00000" / PARTS[2]
    pq.write_table(pq.read_table(path, partitioning=None).slice(0, 7), path)
    missing = f"1 part of records with 12 rows is missing after {PARTS[1]}"
    assert open_capture(run).lost == [f"rank 0: {missing}; not written by the capture: {PARTS[2]} (7 rows)"]


def test_a_part_rewritten_by_another_tool_is_read_all_the_same(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    path = run / "rank-00000" / PARTS[2]
    pq.write_table(pq.read_table(path, partitioning=None), path)
    assert open_capture(run).problems == []


def test_a_capture_whose_seals_do_not_count_is_held_against_its_manifest(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    for part in PARTS:
        path = run / "rank-00000" / part
        pq.write_table(pq.read_table(path, partitioning=None), path)
    assert open_capture(run).problems == []
    path = run / "rank-00000" / PARTS[4]
    shutil.copy(run / "rank-00000" / PARTS[5], path)
    pq.write_table(pq.read_table(path, partitioning=None).slice(0, 5), path)
    said = "rank 0 wrote 6 parts of records with 72 rows, 6 parts of records with 65 rows can be read"
    assert open_capture(run).lost == [said]
    _held(run, written=None)
    assert open_capture(run).problems == []


@pytest.mark.parametrize("written", [{}, {"parts": "6", "rows": []}, {"parts": None, "rows": 72}])
def test_counts_that_cannot_be_read_are_told(tmp_path: Path, written: dict[str, Any]) -> None:
    run = small(tmp_path / "run")
    _held(run, written=written)
    assert open_capture(run).lost == ["rank 0: its manifest has no counts of parts and rows that can be read"]


def test_parts_that_were_added_are_told(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    _held(run, written={"parts": 4, "rows": 48})
    (said,) = open_capture(run).lost
    place = f"after {PARTS[5]}"
    assert said == f"rank 0: what comes {place} was counted as -2 parts and -24 rows away from there: it is not in its place"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("recording", "rank 0 was interrupted or is still recording (status 'recording'): readable up to the last flush"),
        ("interrupted", "rank 0 was ended by an error (status 'interrupted'): what would have run later is missing"),
        ("stopped", "rank 0 stopped recording before the run ended (status 'stopped'): what ran later is missing"),
    ],
)
def test_a_run_that_did_not_end_is_unfinished(tmp_path: Path, status: str, said: str) -> None:
    run = small(tmp_path / "run")
    _held(run, status=status)
    capture = open_capture(run)
    assert (capture.unfinished, capture.lost) == ([said], [])
    _held(run, steps_over=True)
    assert open_capture(run).problems == []
    (run / "rank-00000" / PARTS[5]).unlink()
    assert open_capture(run).lost == [f"rank 0: 1 part of records with 12 rows is missing after {PARTS[4]}"]


def _of_two(path: Path, ranks: Any = None) -> Path:
    out = writer(path, config={"ranks": ranks})
    out.write_records(0, columns())
    out.update(world_size=2)
    out.close()
    return path


def test_a_rank_that_left_nothing_is_missing(tmp_path: Path) -> None:
    run = _of_two(tmp_path / "run")
    said = "rank 1 is missing: it left no folder, and no report that it had nothing to record"
    assert open_capture(run).unfinished == [said]
    report = run / "processes/7.json"
    report.parent.mkdir()
    report.write_text(json.dumps({"state": "running", "process_rank": 1}))
    assert open_capture(run).unfinished == [said]
    report.write_text(json.dumps({"state": "ended", "process_rank": 1, "calls": 0, "failure": None}))
    assert open_capture(run).unfinished == []


def test_a_rank_that_was_not_wanted_is_not_missing(tmp_path: Path) -> None:
    assert open_capture(_of_two(tmp_path / "run", [[0, 1]])).unfinished == []


@pytest.mark.parametrize("world", [10**9, -1, True, "2"])
def test_a_world_size_that_nobody_believes_costs_nothing(tmp_path: Path, world: Any) -> None:
    run = _of_two(tmp_path / "run")
    _held(run, world_size=world)
    assert open_capture(run).unfinished == []


def test_the_parts_of_many_steps_are_packed_as_they_are_written(tmp_path: Path) -> None:
    """And read as those that were written one by one; a portion of fewer steps is in folders of steps."""
    run, apart = tmp_path / "run", tmp_path / "apart"
    out, other = writer(run), writer(apart)
    for steps in (range(40), range(40, 45), range(45, 90)):
        out.write_parts({step: columns(seed=step) for step in steps})
        for step in steps:
            other.write_records(step, columns(seed=step))
    out.close()
    other.close()
    assert sorted(path.name for path in (run / "rank-00000").iterdir() if path.suffix == ".parquet") == PACKED
    assert len([*run.glob("rank-00000/step-*")]) == 5
    first, second = open_capture(run), open_capture(apart)
    assert (first.problems, first.lost, first.steps) == (second.problems, [], list(range(90)))
    held, expected = (sorted(map(str, one.records(COLUMNS).to_pylist())) for one in (first, second))
    assert held == expected


def test_a_portion_that_could_not_be_written_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, stage = tmp_path / "run", durable.stage
    out = writer(run)

    def full(path: Path, chunks: Iterable[Any], *, sync: bool = False) -> None:
        if path.name == PACKED[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        stage(path, chunks, sync=sync)

    monkeypatch.setattr(durable, "stage", full)
    with pytest.raises(OSError, match="No space left"):
        out.write_parts({step: columns() for step in range(40)})
    out.write_parts({step: columns() for step in range(40, 44)})
    assert open_capture(run).lost == ["rank 0: 40 parts of records with 480 rows are missing at the beginning"]
    assert open_capture(run).steps == [40, 41, 42, 43]
