"""A packed capture reads as it did before, and whatever ends `compact`, nothing of it is lost."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture, durable, open_capture, parts, sketch_matrix
from trueup.foundation.store import writer as writing
from trueup.foundation.store.writer import compact

from .captures import columns, files, writer

PACKED = "rank-00000/packed-0000.parquet"


def run_of(run: Path) -> Path:
    """Four steps of two parts; the last has a column that the others lack."""
    out = writer(run)
    out.add_sites([(0, ["train.py:7 in step"], "loss.backward()")])
    for step in range(4):
        for part in range(2):
            content = columns(first_seq=100 * part, seed=part)
            content["l2"] = np.where(np.arange(12) == 4, np.nan, np.ma.getdata(content["l2"]))
            out.write_records(step, content | ({"invocation": ["{}"] * 12} if step == 3 else {}))
    out.close("complete")
    return run


def read(capture: Capture) -> list[object]:
    """All that a capture tells, NaN as text, sketches as bytes."""
    table = capture.records(sorted(capture.names))
    sketches = sketch_matrix(table["sketch"]).tobytes()
    told = capture.names, capture.sizes, capture.levels, capture.steps, capture.sites(0), capture.problems, capture.lost
    some = capture.records(["slot", "l2"], step=3, slot="input.0")
    return [*told, sketches, str(table.drop_columns(["sketch"]).to_pylist()), str(some.to_pylist())]


def test_a_packed_capture_reads_as_before(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    expected = read(open_capture(run))
    done = compact(open_capture(run))
    assert (done.parts, done.rows, done.files) == (8, 96, 1)
    assert done.after < done.before / 2
    assert read(open_capture(run)) == expected
    assert expected[5:7] == [[], []]
    assert files(run) == ["manifest.json", "rank-00000/lock", "rank-00000/manifest.json", PACKED, "rank-00000/sites-0000.parquet"]
    assert open_capture(run).root["format_version"] == 2
    assert compact(open_capture(run)).parts == 0


def test_many_parts_are_cut_into_groups_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "GROUP", 30)
    monkeypatch.setattr(writing, "FILE", 60)
    run = run_of(tmp_path / "run")
    expected = read(open_capture(run))
    assert compact(open_capture(run)).files == 2
    assert read(open_capture(run)) == expected
    assert {part.group for part in open_capture(run).parts} == {0, 1, 2}


def test_steps_that_are_read_in_turn_open_their_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run")
    compact(open_capture(run))
    expected = [open_capture(run).records(["seq", "l2"], step=step) for step in range(3)]
    opened: list[int] = []
    from_disk = parts._read
    monkeypatch.setattr(parts, "_read", lambda part, needed: opened.append(part.step) or from_disk(part, needed))
    capture = open_capture(run)
    assert [str(capture.records(["seq", "l2"], step=step)) for step in range(3)] == [str(one) for one in expected]
    assert opened == [0]
    capture.records(["seq", "l2"], step=3)
    assert not capture._kept  # its last step was read: nothing is held any more


@pytest.mark.parametrize("left", range(9))
def test_one_that_is_killed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Before any part is removed, after one, ...; the next one goes on."""
    run = run_of(tmp_path / "run")
    expected = read(open_capture(run))
    remove = Path.unlink

    def killed(path: Path, *, missing_ok: bool = False) -> None:
        if len([*run.glob("rank-*/step-*/*")]) == left:
            raise KeyboardInterrupt
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    if left:
        with pytest.raises(KeyboardInterrupt):
            compact(open_capture(run))
    else:
        compact(open_capture(run))
    monkeypatch.undo()
    assert read(open_capture(run)) == expected
    assert len([*run.glob("rank-*/step-*/*")]) == left
    compact(open_capture(run))
    assert read(open_capture(run)) == expected
    assert not [*run.glob("rank-*/step-*")]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run")
    expected = read(open_capture(run))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_chunk", full)
    with pytest.raises(OSError, match="No space left"):
        compact(open_capture(run))
    monkeypatch.undo()
    (run / f"{PACKED}.tmp").write_bytes(b"half of it")  # as a killed one leaves it
    assert read(open_capture(run)) == expected


def test_what_does_not_read_back_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run")
    expected = read(open_capture(run))
    whole = writing.encoded

    def flipped(*given: object) -> list[bytes]:
        content = bytearray(b"".join(map(bytes, whole(*given))))
        content[len(content) // 3] ^= 16
        return [bytes(content)]

    monkeypatch.setattr(writing, "encoded", flipped)
    with pytest.raises(TrueupError, match="did not read back as what was packed, and was removed"):
        compact(open_capture(run))
    assert read(open_capture(run)) == expected


@pytest.mark.parametrize("place", [0, 100, -1, None])
def test_a_damaged_packed_file_is_told(tmp_path: Path, place: int | None) -> None:
    """Cut off, or gone; nothing raises, and no comparison of it is called aligned."""
    run = run_of(tmp_path / "run")
    compact(open_capture(run))
    if place is None:
        (run / PACKED).unlink()
    else:
        (run / PACKED).write_bytes((run / PACKED).read_bytes()[:place])
    capture = open_capture(run)
    assert len(capture.records()) == 0
    damaged = "rank 0: packed-0000.parquet is truncated or damaged ("
    assert [text for text in capture.lost if text.startswith(damaged)] == capture.lost[:-1]
    assert len(capture.lost) == (1 if place is None else 2)
    assert capture.lost[-1] == "rank 0 wrote 8 parts of records with 96 rows, 0 parts of records with 0 rows can be read"


def test_a_flipped_bit_in_a_page_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    compact(open_capture(run))
    content = bytearray((run / PACKED).read_bytes())
    content[len(content) // 3] ^= 16
    (run / PACKED).write_bytes(content)
    capture = open_capture(run)
    assert len(capture.records()) < 96
    assert capture.lost


def test_a_copy_of_a_packed_file_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    compact(open_capture(run))
    (run / "rank-00000/packed-0001.parquet").write_bytes((run / PACKED).read_bytes())
    capture = open_capture(run)
    assert len(capture.records()) == 96
    assert "its seal does not say that it is this file" in capture.lost[0]


def test_a_damaged_part_stays_where_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    part = run / "rank-00000/step-000001/records-0001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 16
    part.write_bytes(content)
    assert compact(open_capture(run)).parts == 7
    assert part.read_bytes() == content
    capture = open_capture(run)
    assert len(capture.records()) == 84
    assert "rank 0 step 1: records-0001.parquet is truncated or damaged" in capture.lost[0]


def test_what_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, columns())
    lock = json.loads((tmp_path / "run/rank-00000/lock").read_text())
    assert (lock["pid"], lock["host"]) == (os.getpid(), socket.gethostname())
    with pytest.raises(TrueupError, match=f"is being recorded: rank 0 by process {os.getpid()}"):
        compact(open_capture(tmp_path / "run"))


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    assert main(["compact", str(run), "--json", str(tmp_path / "said.json")]) == 0
    assert ": 8 parts are 1 file now; 0.1 MB are 0.0, " in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "said.json").read_text())["parts"] == 8
    assert main(["compact", str(run)]) == 0
    assert "is packed already" in capsys.readouterr().err
    assert main(["compact", "s3://bucket/run"]) == 64
