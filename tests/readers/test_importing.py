"""What holds for every format: what is detected, what is refused and how, what the command says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from readers import writers
from readers.captures import imported
from trueup import TrueupError
from trueup.doors.cli import main
from trueup.exchange.readers import importing
from trueup.exchange.readers.dump import MAX_KINDS, Notes, Tree, numbered
from trueup.exchange.readers.importing import READERS

WRITERS: dict[str, Callable[[Path], Any]] = {
    "ptdbg": writers.ptdbg,
    "padiff": writers.padiff,
    "hdf5": lambda folder: (folder.mkdir(), writers.hdf5(folder / "any.name")),
    "tensorflow": writers.tensorflow,
    "arrays": writers.arrays,
}


@pytest.mark.parametrize("name", WRITERS)
def test_formats_are_told_by_content(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "dump")
    notes = Notes()
    tree = Tree(tmp_path / "dump", notes)
    assert next(known for known, find in READERS.items() if find(tree, notes)) == name
    result, rows, _ = imported(tmp_path / "dump", tmp_path)
    assert result.rows == len(rows)
    _, forced, _ = imported(tmp_path / "dump", tmp_path / "forced", format=name)
    assert forced == rows


def test_files_are_told_whatever_they_are_called(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump", kind="statistics")
    path = next(root.rglob("dump.pkl"))
    path.rename(path.with_name("something.txt"))
    assert imported(root, tmp_path)[0].tool == "ptdbg 2.3"


def test_a_format_may_be_forced(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    assert imported(root, tmp_path, format="arrays")[0].tool == "a folder of arrays"
    with pytest.raises(TrueupError, match=r"is no dump that can be read: expected hdf5, got 15 files \(ptdbg_dump_v2.3/rank0/"):
        trueup.import_dump(root, tmp_path / "other", format="hdf5")
    with pytest.raises(TrueupError, match="format 'h5' is unknown: expected msprobe, ptdbg, padiff, hdf5, tfdbg2, tfdbg, tensor"):
        trueup.import_dump(root, tmp_path / "other", format="h5")


def test_importing_twice_gives_the_same(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    assert imported(root, tmp_path / "a")[1] == imported(root, tmp_path / "b")[1]


def test_rows_come_in_parts_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    expected = imported(root, tmp_path / "a")[1]
    monkeypatch.setattr("trueup.exchange.readers.importing.ROWS", 2)
    _, rows, capture = imported(root, tmp_path / "b")
    assert capture.ranks[0]["written"]["parts"] >= len(rows) // 3
    same = ("seq", "slot", "op", "l2", "digest", "foreign_name")
    assert [[row[name] for name in same] for row in rows] == [[row[name] for name in same] for row in expected]


def test_the_capture_says_where_it_is_from(tmp_path: Path) -> None:
    result, _, capture = imported(writers.ptdbg(tmp_path / "dump"), tmp_path)
    assert capture.root["imported"] == {"tool": "ptdbg 2.3", "from": str(tmp_path / "dump")}
    told = capture.ranks[0]["imported"]
    assert (told["tool"], told["lacks"], told["lost"]) == ("ptdbg 2.3", list(result.lacks), [])
    assert capture.ranks[0]["notes"] == [f"imported from ptdbg 2.3: {sentence}" for sentence in (*result.lacks, *result.notes)]
    assert capture.ranks[0]["framework"] == "torch"
    assert capture.ranks[0]["status"] == "complete"


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda _: None, "is not there: expected a folder with a dump; check the path"),
        (lambda path: path.mkdir(), "holds no files: expected a dump; check the path"),
        (lambda path: (path.mkdir(), (path / "a.txt").write_text("hello")), "is no dump that can be read: expected a dump of"),
        (lambda path: (path.mkdir(), (path / "a.npy").write_text("hello")), "holds nothing that can be read, though"),
    ],
)
def test_where_nothing_can_be_read_one_message_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Callable[[Path], Any], message: str
) -> None:
    prepare(tmp_path / "dump")
    if message.startswith("holds nothing"):  # a row of what could not be read is a row
        result, rows, _ = imported(tmp_path / "dump", tmp_path)
        assert (result.tensors, rows[0]["digest"], len(result.lost)) == (0, None, 1)
        return
    assert main(["import", str(tmp_path / "dump"), "-o", str(tmp_path / "capture")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trueup: {tmp_path / 'dump'} {message}")
    assert "Traceback" not in error
    assert not (tmp_path / "capture").exists()


def test_a_capture_is_not_written_over(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    imported(root, tmp_path)
    with pytest.raises(TrueupError, match="already holds a capture: nothing was imported; choose another -o or remove it"):
        trueup.import_dump(root, tmp_path / "capture")


def test_a_capture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrueupError, match="cannot be written: Not a directory; it is not complete"):
        trueup.import_dump(root, tmp_path / "file" / "capture")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.exchange.readers.dump.MAX_FILES", 10)
    root = writers.ptdbg(tmp_path / "dump")
    with pytest.raises(TrueupError, match="holds more than 10 files: import a part of it, such as one step"):
        trueup.import_dump(root, tmp_path / "capture")


def test_a_step_of_too_many_calls_is_cut_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.exchange.readers.importing.MAX_CALLS", 3)
    result, rows, _ = imported(writers.ptdbg(tmp_path / "dump"), tmp_path)
    assert (result.calls, len({row["seq"] for row in rows})) == (3, 3)
    assert result.lost == ["a step holds more than 3 calls, and what follows was left out: Functional.relu.0.backward"]


def test_folders_of_any_depth_end(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    for _ in range(40):
        folder = folder / "a"
    folder.mkdir(parents=True)
    np.save(folder / "a.npy", np.ones(2))
    np.save(tmp_path / "dump" / "b.npy", np.ones(2))
    result, rows, _ = imported(tmp_path / "dump", tmp_path)
    assert len(rows) == 1
    assert result.lost[0].startswith("folders deeper than 24 levels are not read: ")


# ---------------------------------------------------------------- the command
def test_the_command_prints_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = writers.ptdbg(tmp_path / "dump", "6.0", "md5")
    document = tmp_path / "document.json"
    assert main(["import", str(root), "-o", str(tmp_path / "capture"), "--json", str(document)]) == 0
    *lines, _, last, end = capsys.readouterr().out.split("\n")
    told = json.loads(document.read_text())
    assert (told["schema"], told["directory"], told["tool"]) == ("trueup-import", str(tmp_path / "capture"), "ptdbg 6.0")
    assert (told["ranks"], told["steps"], told["calls"], told["tensors"], told["lost"]) == (1, 1, 5, 0, [])
    assert [f"  lacks: {text}" for text in told["lacks"]] == lines[1:]
    assert last.endswith(f"{document}")
    assert [*lines, end] == [
        f"{tmp_path / 'capture'}: 5 calls of 1 rank, 1 step, from ptdbg 6.0; 0 tensors with their bytes",
        "  lacks: integers, booleans and scalars are not in the dump where filter_switch was ON",
        "  lacks: the scopes are unknown: ptdbg does not say which module made a call",
        "  lacks: the checksums are the tool's own: they compare with those of a dump of the same tool, not with our digests",
        "",
    ]


def test_the_command_needs_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path)]) == 64
    said = capsys.readouterr().err.splitlines()
    assert said == ["trueup: Missing option '--output' / '-o'.", "  next:     trueup import dump_npu/ -o runs/dumped"]


def test_names_of_a_dump_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    np.save(folder / "good.npy", np.ones(2))
    (folder / "bad\x1b[2J[red].npy").write_bytes(b"\x93NUMPY")
    assert main(["import", str(folder), "-o", str(tmp_path / "capture")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "[red]" in printed


def test_importing_trueup_loads_no_reader() -> None:
    code = "import sys, trueup; sys.exit(any(name.startswith(('trueup.exchange.readers', 'numpy')) for name in sys.modules))"
    assert subprocess.call([sys.executable, "-c", code]) == 0


# ---------------------------------------------------------------- small parts
def test_places_are_told_by_folders() -> None:
    paths = ["d/step10/rank2/a", "d/step9/rank10/a", "d/step9/proc77/a"]
    assert numbered(paths, Notes()) == {"d/step9/proc77/a": (0, 9), "d/step9/rank10/a": (10, 9), "d/step10/rank2/a": (2, 10)}
    notes = Notes()
    assert numbered(["proc9/a", "proc10/a"], notes) == {"proc9/a": (0, 0), "proc10/a": (1, 0)}
    assert notes.said == ["2 processes had no rank; they were numbered in the order of their process ids"]


def test_notes_are_counted_and_bounded() -> None:
    notes = Notes()
    for k in range(3):
        notes.lose("files are missing", f"file{k}")
    for k in range(1000):
        notes.say(f"kind {k}\x1b")
    assert notes.lost == ["files are missing (3 times, first: file0)"]
    assert len(notes.said) == MAX_KINDS + 1
    assert notes.said[-1] == "and more of other kinds"
    assert "\x1b" not in "".join(notes.said)


def test_every_reader_has_a_name_that_the_command_lists() -> None:
    from trueup.doors.cli.one_run import FORMATS

    assert ", ".join(importing.READERS) == FORMATS
