"""The recorder between the calls and the disk: ordinals, flushing, waiting, and disks that fail."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.foundation.model import PACKED, TrueupError
from trueup.foundation.store import Writer, open_capture
from trueup.recording.recorder import CaptureOptions, Recorder, Statistics, Tensor, flusher
from trueup.recording.recorder import recorder as module
from trueup.recording.recorder.rows import FIELDS
from trueup.recording.recorder.sites import Sites

SCALAR = Tensor("float32", [], [], "cpu", 1)


def make(path: Path, **options: Any) -> Recorder:
    manifest = {"framework": "test", "devices": ["cpu"]}
    return Recorder(path, CaptureOptions.of(**options), lambda: (0, {"levels": []}, manifest), lambda batch: None)


def add(recorder: Recorder, op: str = "op", stats: Statistics | None = None, **where: Any) -> int:
    call = recorder.begin("aten", where.get("phase", "forward"), where.get("scope", ""), op)
    if call.recorded:
        recorder.slot(call, "output.0", SCALAR, stats)
    return call.ordinal


def stored(path: Path) -> list[dict[str, Any]]:
    return open_capture(path).records().to_pylist()


def count(path: Path) -> int:
    return len(stored(path)) if (path / "manifest.json").exists() else 0


def within(seconds: float, condition: Any) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_ordinals_count_per_scope_phase_and_step(tmp_path: Path) -> None:
    recorder = make(tmp_path / "c", exclude="left.out")
    assert [add(recorder) for _ in range(3)] == [0, 1, 2]
    assert [add(recorder, scope="a"), add(recorder, phase="backward"), add(recorder, "other"), add(recorder)] == [0, 0, 0, 3]
    assert [add(recorder, scope="left.out"), add(recorder, scope="left.out")] == [0, 1]  # counted though not kept
    recorder.end_step()
    assert add(recorder) == 0
    recorder.close()
    rows = stored(tmp_path / "c")
    assert [row["step"] for row in rows] == [0] * 7 + [1]
    assert [row["seq"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 9]


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    recorder = make(tmp_path / "c", include="nowhere")
    add(recorder)
    recorder.close()
    assert not (tmp_path / "c").exists()


def test_a_pause_is_on_disk_soon(tmp_path: Path) -> None:
    """Within the interval of a second, and what a loaded machine adds."""
    assert flusher.FLUSH_SECONDS == 1.0
    recorder = make(tmp_path / "c")
    add(recorder)
    assert within(60, lambda: list((tmp_path / "c").glob("rank-*/step-*/records-*.parquet")))
    add(recorder, "second")
    assert within(60, lambda: len(stored(tmp_path / "c")) == 2)
    recorder.close()


def test_a_flush_leaves_nothing_behind_though_rows_were_written_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(tmp_path / "c", detail="tensor")
    payloads(recorder, range(1, 4))  # their rows wait for others
    take = recorder._flusher.backlog.take

    def just_now() -> object:
        recorder._settled = time.monotonic()  # the writer's thread was there between the call and its turn
        return take()

    monkeypatch.setattr(recorder._flusher.backlog, "take", just_now)
    recorder.flush()
    assert [row["seq"] for row in stored(tmp_path / "c")] == [0, 1, 2]
    recorder.close()


def test_close_is_final(tmp_path: Path) -> None:
    recorder = make(tmp_path / "c")
    add(recorder)
    recorder.close()
    add(recorder)
    recorder.close()
    assert len(stored(tmp_path / "c")) == 1
    assert not recorder.active
    assert open_capture(tmp_path / "c").ranks[0]["status"] == "complete"


def test_closing_ends_when_the_thread_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes hears of it, and does not look after a while."""
    heard: list[bool] = []
    recorder, began = make(tmp_path / "c"), threading.Event()
    changed, settle = recorder._flusher.backlog._changed, recorder._flusher._settle
    wait = changed.wait

    def wait_long(seconds: float | None = None) -> bool:
        began.set()
        heard.append(wait(30.0))
        return heard[-1]

    def settle_late(at_once: bool) -> None:
        began.wait(30.0)
        settle(at_once)

    monkeypatch.setattr(changed, "wait", wait_long)
    monkeypatch.setattr(recorder._flusher, "_settle", settle_late)
    add(recorder)
    recorder.close()
    assert heard
    assert all(heard)
    assert len(stored(tmp_path / "c")) == 1


def test_training_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "PORTION_BYTES", 8 * module.ROW_BYTES)
    monkeypatch.setattr(flusher, "HELD_BYTES", 32 * module.ROW_BYTES)
    original, most = Writer.write_parts, 0

    def slow(self: Writer, parts: Any) -> None:
        time.sleep(0.02)
        original(self, parts)

    monkeypatch.setattr(Writer, "write_parts", slow)
    recorder = make(tmp_path / "c")
    for _ in range(300):
        add(recorder)
        most = max(most, recorder._flusher.backlog.held + len(recorder._rows) // FIELDS * module.ROW_BYTES)
    recorder.close()
    assert 32 * module.ROW_BYTES < most <= (32 + 2 * 9) * module.ROW_BYTES
    assert len(stored(tmp_path / "c")) == 300  # nothing is dropped


def payloads(recorder: Recorder, numbers: range) -> None:
    for k in numbers:
        stats = Statistics(np.zeros(PACKED), k, np.full(1000, float(k)))
        recorder.keep(stats)
        recorder.slot(recorder.begin("aten", "forward", "", "op"), "output.0", Tensor("float64", [1000], [1], "cpu", 1000), stats)


def test_payload_is_written_at_once_and_rows_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "PORTION_BYTES", 64_000)
    monkeypatch.setattr("trueup.recording.recorder.flusher.FLUSH_SECONDS", 3600.0)
    recorder = make(tmp_path / "c", detail="tensor")
    rank = tmp_path / "c/rank-00000"
    payloads(recorder, range(1, 31))
    assert within(20, lambda: sum(file.stat().st_size for file in rank.glob("tensors-*.safetensors")) > 3 * 64_000)
    assert list(rank.glob("step-*")) == []
    monkeypatch.setattr("trueup.recording.recorder.flusher.FLUSH_SECONDS", 0.1)
    payloads(recorder, range(31, 39))
    assert within(20, lambda: count(tmp_path / "c") >= 30)
    recorder.close()
    assert len(list(rank.glob("step-*/records-*.parquet"))) <= 3
    rows, capture = stored(tmp_path / "c"), open_capture(tmp_path / "c")
    assert [row["seq"] for row in rows] == list(range(38))
    for k, row in enumerate(rows, 1):
        assert capture.payload(0, row["payload_segment"], row["payload_key"]).tolist() == [float(k)] * 1000


def test_rows_whose_payload_is_written_outlive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "PORTION_BYTES", 64_000)
    monkeypatch.setattr("trueup.recording.recorder.flusher.FLUSH_SECONDS", 3600.0)
    recorder = make(tmp_path / "c", detail="tensor")
    payloads(recorder, range(1, 9))
    assert within(20, lambda: recorder._unwritten[0])
    monkeypatch.setattr(Writer, "flush", full)
    payloads(recorder, range(9, 17))
    assert within(20, lambda: recorder.failure is not None)
    recorder.close()
    rows, capture = stored(tmp_path / "c"), open_capture(tmp_path / "c")
    assert [row["seq"] for row in rows] == list(range(8))
    assert all(capture.payload(0, row["payload_segment"], row["payload_key"]).size == 1000 for row in rows)


def test_threads_share_one_numbering(tmp_path: Path) -> None:
    recorder = make(tmp_path / "c")
    threads = [threading.Thread(target=lambda: [add(recorder) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    rows = stored(tmp_path / "c")
    assert sorted(row["seq"] for row in rows) == list(range(800))
    assert sorted(row["ordinal"] for row in rows) == list(range(800))


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def unexpected(*args: Any) -> None:
    raise RuntimeError("not foreseen")


@pytest.mark.parametrize(
    ("fault", "said"), [(full, "[Errno 28] No space left on device"), (unexpected, "RuntimeError: not foreseen")]
)
def test_a_failing_disk_does_not_stop_the_run(fault: Any, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    recorder = make(tmp_path / "c")
    add(recorder)
    assert within(20, lambda: count(tmp_path / "c") == 1)
    with monkeypatch.context() as broken:
        broken.setattr(Writer, "write_parts", fault)
        add(recorder)
        assert within(20, lambda: recorder.failure is not None)
    assert not recorder.active
    for _ in range(10):
        add(recorder)
    recorder.close()
    assert capsys.readouterr().err == (
        f"trueup: capture stopped at step 0: cannot write {tmp_path / 'c'}: {said}. The training goes on without it.\n"
    )
    manifest = open_capture(tmp_path / "c").ranks[0]
    assert manifest["status"] == "stopped"  # the disk came back, the capture is not whole all the same
    assert manifest["notes"] == [f"the capture stopped at step 0: {said}; what ran later is missing"]


def test_a_failing_disk_stops_the_run_when_asked(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Writer, "write_parts", full)
    recorder = make(tmp_path / "c", on_error="stop")
    add(recorder)
    assert within(20, lambda: recorder.failure is not None)
    with pytest.raises(TrueupError, match=r"capture stopped, and the run with it, as asked: .*No space left on device"):
        add(recorder)
    recorder.close()
    assert capsys.readouterr().err.endswith("No space left on device. Stopping, as asked.\n")


def test_a_directory_that_cannot_be_made(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    recorder = make(tmp_path / "file" / "c")
    add(recorder)
    recorder.close()
    assert "capture stopped at step 0: cannot write " in capsys.readouterr().err
    assert recorder.failure is not None


def test_a_directory_that_disappears(tmp_path: Path, capsys) -> None:
    recorder = make(tmp_path / "c")
    add(recorder)
    assert within(20, lambda: count(tmp_path / "c") == 1)
    shutil.rmtree(tmp_path / "c")
    add(recorder)
    recorder.close()
    assert capsys.readouterr().err.count("trueup: capture stopped") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory(tmp_path: Path, capsys) -> None:
    (tmp_path / "c").mkdir(mode=0o500)
    recorder = make(tmp_path / "c")
    add(recorder)
    recorder.close()
    assert "Permission denied" in capsys.readouterr().err


def test_notes_are_kept_once(tmp_path: Path) -> None:
    recorder = make(tmp_path / "c")
    recorder.note("early")
    add(recorder)
    for _ in range(3):
        recorder.note("late")
    recorder.close()
    assert open_capture(tmp_path / "c").ranks[0]["notes"] == ["early", "late"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"])
def test_payload_of_every_dtype(dtype: str, tmp_path: Path) -> None:
    import ml_dtypes

    array = np.ones((2, 3), getattr(ml_dtypes, dtype, dtype))
    recorder = make(tmp_path / "c", detail="tensor")
    first, second = (Statistics(np.zeros(PACKED), 5, array) for _ in range(2))
    recorder.keep(first)
    recorder.keep(second)
    assert first.data is not None
    assert second.data is None  # equal bytes are kept once
    call = recorder.begin("aten", "forward", "", "op")
    described = Tensor(dtype, [2, 3], [3, 1], "cpu", 6)
    recorder.slot(call, "output.0", described, first)
    recorder.slot(call, "output.1", described, second)
    array[:] = 0  # what was kept is a copy
    recorder.close()
    rows = stored(tmp_path / "c")
    assert rows[0]["payload_key"] == rows[1]["payload_key"] is not None
    capture = open_capture(tmp_path / "c")
    assert capture.payload(0, rows[0]["payload_segment"], rows[0]["payload_key"]).tobytes() == np.ones_like(array).tobytes()


def here(sites: Sites) -> int | None:
    return sites.here()


def test_sites_are_numbered_once() -> None:
    sites = Sites()
    first = [here(sites) for _ in range(3)]
    second = here(sites)
    assert first == [first[0]] * 3
    assert second != first[0]
    new = sites.take_new()
    assert [number for number, _, _ in new] == [first[0], second]
    assert new[0][1][0].startswith(f"{__file__}:")
    assert new[0][1][0].endswith(" in here")
    assert new[0][2] == "return sites.here()"
    assert sites.take_new() == []


def test_sites_leave_internal_frames_out() -> None:
    folder = str(Path(__file__).parent)
    everything = (folder, str(Path(os.__file__).parent), str(Path(pytest.__file__).parents[1]))
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(here(Sites(everything))))  # below it only the standard library
    thread.start()
    thread.join()
    assert found == [None]
    assert here(Sites((folder[:-2],))) is not None  # a folder whose name merely starts alike is the user's


def test_sites_are_numbered_alike_by_all_threads() -> None:
    sites = Sites()
    found: list[set[int | None]] = []

    def look() -> None:
        found.append({here(sites) for _ in range(200)})

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [number for number, _, _ in sites.take_new()]
    assert sorted(numbers) == list(range(len(numbers)))
    assert {next(iter(one)) for one in found} <= set(numbers)


def test_memory_of_payloads_is_bounded_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_PAYLOADS", 4)
    monkeypatch.setattr("trueup.foundation.store.writer.KNOWN_KEYS", 4)
    recorder = make(tmp_path / "c", detail="tensor")
    constant = Statistics(np.zeros(PACKED), 7, np.full(3, 7.0))
    recorder.keep(constant)
    call = recorder.begin("aten", "forward", "", "op")
    described = Tensor("float64", [3], [1], "cpu", 3)
    for k in range(100, 160):
        stats = Statistics(np.zeros(PACKED), k, np.full(3, float(k)))
        recorder.keep(stats)
        recorder.slot(call, f"output.{k}", described, stats)
        recorder.slot(call, f"constant.{k}", described, constant)
    recorder.close()
    assert (len(recorder._payloads), len(recorder._places)) == (4, 32)
    capture = open_capture(tmp_path / "c")
    for row in stored(tmp_path / "c"):
        expected = 7.0 if row["slot"].startswith("constant") else float(row["slot"].rpartition(".")[2])
        assert capture.payload(0, row["payload_segment"], row["payload_key"], row["payload_view"]).tolist() == [expected] * 3
