"""Full disks, forbidden folders and vanished ones: one OSError, and nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trueup.foundation.store import durable, open_capture

from .captures import columns, files, writer


class FullDisk:
    """Lets ``room`` bytes through, then the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        opened = Path.open

        def full_open(path: Path, *args: Any, **kwargs: Any) -> Any:
            file = opened(path, *args, **kwargs)
            if path.name.endswith(".tmp"):
                write = file.raw.write if hasattr(file, "raw") else file.write
                return _Limited(file, write, self)
            return file

        monkeypatch.setattr(Path, "open", full_open)


class _Limited:
    def __init__(self, file: Any, write: Any, disk: FullDisk) -> None:
        self.file, self.disk = file, disk

    def __enter__(self) -> _Limited:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, chunk: Any) -> int:
        size = memoryview(chunk).nbytes
        self.file.write(bytes(chunk)[: max(0, self.disk.room)])
        self.disk.room -= size
        if self.disk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return size


@pytest.mark.parametrize("room", [0, 5, 300, 5000])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, columns())
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        FullDisk(patch, room)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                out.write_records(0, columns(count=100))
        assert files(tmp_path) == before
        out.add_payload("0" * 16, "uint8", (9000,), bytes(9000))
        with pytest.raises(OSError, match="No space left"):
            out.flush()
        assert files(tmp_path) == before
    out.write_records(0, columns())  # room again
    out.close()
    capture = open_capture(tmp_path / "run")
    assert capture.rows == 24
    assert capture.ranks[0]["notes"] == ["1 tensors (9000 bytes) were lost: No space left on device"]
    assert [problem for problem in capture.problems if "call stacks" not in problem] == []


def test_folder_vanished(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, columns())
    shutil.rmtree(tmp_path / "run")
    out.note("x")
    with pytest.raises(FileNotFoundError):
        out.flush()
    with pytest.raises(FileNotFoundError):
        out.write_records(1, columns())
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        writer(tmp_path / "run")


def test_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="run"):
        writer(tmp_path / "run")


def test_first_comer_wins(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", [b"1"], replace=False)
    with pytest.raises(FileExistsError):
        durable.write_file(tmp_path / "a", [b"2"], replace=False)
    assert files(tmp_path) == ["a"]
    durable.write_file(tmp_path / "a", [b"2", bytearray(b"3"), memoryview(b"4")])
    assert (tmp_path / "a").read_bytes() == b"234"


def test_what_json_cannot_say_is_text(tmp_path: Path) -> None:
    durable.write_json(tmp_path / "a", {"path": tmp_path, "lone": "\ud800", "nan": float("nan")})
    assert str(tmp_path) in (tmp_path / "a").read_text()


def test_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(files(tmp_path)))
    durable.write_file(tmp_path / "a", [b"1"])
    assert seen == [["a.tmp"], ["a"]]  # the file, then the folder that now names it
