"""Writes past the page cache: the same bytes and lengths, whatever the alignment, the file system and the disk's mood."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.foundation.store import durable

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
MB = 1 << 20


@pytest.fixture(autouse=True)
def _unknown_disks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    durable._devices.clear()
    yield
    durable._devices.clear()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What went past the page cache: address, size and place."""
    seen: list[tuple[int, int, int]] = []
    past = durable._past_cache

    def noted(descriptor: int, blocks: memoryview, place: int) -> int:
        written = past(descriptor, blocks, place)
        seen.append((durable.address(blocks), written, place))
        return written

    monkeypatch.setattr(durable, "_past_cache", noted)
    return seen


def memory(size: int, shift: int) -> memoryview:
    """Random bytes that begin ``shift`` bytes after a block."""
    raw = np.random.default_rng(size).integers(0, 256, size + 2 * durable.BLOCK, np.uint8)
    start = -raw.__array_interface__["data"][0] % durable.BLOCK + shift
    return memoryview(raw[start : start + size])


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return "tmpfs" not in Path("/proc/mounts").read_text() or folder.stat().st_dev != Path("/dev/shm").stat().st_dev


@pytest.mark.parametrize("shift", [0, 8, 4088])
@pytest.mark.parametrize("size", [MB - 1, MB, MB + 8, 3 * MB + 5000])
@pytest.mark.parametrize("before", ["alike", "other"])
def test_bytes_and_length_are_exact(
    tmp_path: Path, passed: list[tuple[int, int, int]], shift: int, size: int, before: str
) -> None:
    run, head = memory(size, shift), bytes(range(256)) * 32
    head = head[: durable.BLOCK + (shift if before == "alike" else shift + 1)]
    durable.write_file(tmp_path / "a", [head, run, b"tail"], sync=False)
    assert (tmp_path / "a").read_bytes() == head + bytes(run) + b"tail"
    assert all(number % durable.BLOCK == 0 for each in passed for number in each)
    assert bool(passed) == (before == "alike" and size >= durable.LARGE)
    if passed and takes_direct(tmp_path):
        assert sum(written for _, written, _ in passed) > size - 2 * durable.BLOCK


@pytest.mark.parametrize("refuses", ["fcntl", "pwrite"])
def test_a_file_system_that_refuses_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    asked: list[int] = []

    def refuse(*args: Any) -> int:
        if refuses == "fcntl" and args[1] != durable.fcntl.F_SETFL:
            return 0
        asked.append(args[0])
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(*((durable.fcntl, "fcntl") if refuses == "fcntl" else (os, "pwrite")), refuse)
    run = memory(2 * MB + 8, 0)
    for name in "ab":
        durable.write_file(tmp_path / name, [run, b"tail"], sync=False)
        assert (tmp_path / name).read_bytes() == bytes(run) + b"tail"
    assert len(asked) == 1


@pytest.mark.parametrize("given", [1, 4096, 5000, MB])
def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, place: pwrite(descriptor, bytes(view[:given]), place))
    monkeypatch.setattr(os, "O_DIRECT", 0)  # bytes() is not aligned
    run = memory(MB + 8192 if given == 4096 else 3 * MB + 16, 0)
    durable.write_file(tmp_path / "a", [run, b"tail"], sync=False)
    assert (tmp_path / "a").read_bytes() == bytes(run) + b"tail"


def test_a_slow_disk_is_left_to_the_page_cache_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: list[tuple[int, int, int]]
) -> None:
    now = [100.0]
    monkeypatch.setattr(durable.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(durable, "JUDGED", 4 * MB)
    past = durable._past_cache

    def slowly(descriptor: int, blocks: memoryview, place: int) -> int:
        written = past(descriptor, blocks, place) or blocks.nbytes
        now[0] += 0.1
        return written

    monkeypatch.setattr(durable, "_past_cache", slowly)
    run = memory(2 * MB, 0)
    for _ in range(5):
        durable.write_file(tmp_path / "a", [run], sync=False)
    assert len(passed) == 2  # enough to judge
    now[0] += durable.PAUSE
    durable.write_file(tmp_path / "a", [run], sync=False)
    assert len(passed) == 3


def test_full_disk_and_full_quota_are_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        write = full

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda *args: Full(opened(*args)))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        durable.write_file(tmp_path / "a", [memory(2 * MB, 0)], sync=False)
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import mmap, resource, sys
from pathlib import Path
from trueup.foundation.store import durable
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    durable.write_file(Path(sys.argv[1]), [mmap.mmap(-1, 4 << 20)], sync=False)
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("limit", [0, 4096, 1_500_000, 2 << 20])
def test_a_file_that_grows_too_large_is_told(tmp_path: Path, limit: int) -> None:
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a"), str(limit)], capture_output=True, text=True, check=True,
        preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )  # fmt: skip
    assert child.stdout == "File too large\n"
    assert list(tmp_path.iterdir()) == []
