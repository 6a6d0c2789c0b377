"""Copies of payload: right whatever the strides, in memory that is used again once it is released."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from trueup.recording.recorder import rows as module
from trueup.recording.recorder.rows import Payload, Slabs


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_BYTES", 4096)


def test_a_copy_is_flat_and_in_logical_order() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    payload = Slabs().copy(array)
    expected = array.reshape(-1).copy()
    array[:] = 0
    np.testing.assert_array_equal(payload.array, expected)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5000,)])
def test_every_size(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 7.0)
    assert Slabs().copy(array).array.tolist() == array.reshape(-1).tolist()


def test_memory_is_used_again_only_when_all_in_it_is_released() -> None:
    slabs = Slabs()
    copies = [slabs.copy(np.full(100, k, np.float64)) for k in range(12)]  # 5 to a slab
    memories = {payload._slab.memory.ctypes.data for payload in copies}
    assert len(memories) == 3
    for payload in copies[:4]:
        payload.release()
    later = [slabs.copy(np.full(100, 50.0)) for _ in range(5)]
    assert copies[4].array.tolist() == [4.0] * 100
    for payload in (*copies[4:10], *later[:3]):
        payload.release()
    again = [slabs.copy(np.full(100, 60.0)) for _ in range(10)]
    assert {payload._slab.memory.ctypes.data for payload in again} & memories
    assert copies[10].array.tolist() == [10.0] * 100
    assert copies[11].array.tolist() == [11.0] * 100


def address(payload: Payload) -> int:
    return int(payload.array.__array_interface__["data"][0])


def test_payloads_are_neighbours_and_aligned() -> None:
    slabs = Slabs()
    first, second, odd, last = (slabs.copy(np.zeros(size, np.uint8)) for size in (16, 40, 3, 8))
    assert (address(second), address(odd), address(last)) == (address(first) + 16, address(first) + 56, address(first) + 64)


@pytest.mark.parametrize(("size", "turns"), [(2000, False), (2100, True)])
def test_a_cut_begins_a_slab_unless_there_is_much_room(size: int, turns: bool) -> None:
    slabs = Slabs()
    first = slabs.copy(np.ones(size, np.uint8))
    slabs.cut()
    second = slabs.copy(np.zeros(8, np.uint8))
    assert (second._slab is not first._slab) == turns
    first.release()
    slabs.cut()
    third = slabs.copy(np.zeros(4090, np.uint8))
    assert (third._slab is first._slab) == turns  # used again
    assert not second.array.any()


@pytest.mark.parametrize("size", [module.HUGE_PAGE - 8, module.HUGE_PAGE, 3 * module.HUGE_PAGE + 8])
def test_large_memory_begins_with_a_huge_page(size: int) -> None:
    payload = Slabs().copy(np.ones(size, np.uint8))
    assert payload.array.all()
    assert size < module.HUGE_PAGE or address(payload) % module.HUGE_PAGE == 0


def test_threads_share_slabs() -> None:
    slabs, wrong = Slabs(), []

    def work(number: int) -> None:
        for k in range(300):
            payload = slabs.copy(np.full(60, 1000 * number + k, np.int64))
            if set(payload.array.tolist()) != {1000 * number + k}:
                wrong.append((number, k))
            payload.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
