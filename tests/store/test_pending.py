"""Segments that are being filled: neighbours in memory become one write, and anybody's safetensors reads the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from trueup.foundation.kernels import digest, hexadecimal
from trueup.foundation.store import durable, open_capture
from trueup.foundation.store.segment import PendingSegment
from trueup.recording.recorder.rows import Payload, Slabs

from .captures import writer

MB = 1 << 20


def kept(slabs: Slabs, shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[Payload]:
    generator = np.random.default_rng(len(shapes))
    return [slabs.copy(generator.integers(0, 100, shape).astype(dtype)) for shape in shapes]


def fill(payloads: list[Payload]) -> PendingSegment:
    pending = PendingSegment("tensors-0000.safetensors")
    for k, payload in enumerate(payloads):
        raw = memoryview(payload.array.view(np.uint8))
        pending.add(f"k{k}", payload.array.dtype.name, payload.array.shape, raw, durable.address(raw))
    return pending


def read(path: Path, pending: PendingSegment) -> dict[str, np.ndarray]:
    path.write_bytes(b"".join(bytes(chunk) for chunk in pending.chunks()))
    with safe_open(path, "numpy") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (it is no dict)


@pytest.mark.parametrize("lead", [0, 8, 4000])
def test_neighbours_are_one_write_at_a_place_like_their_own(tmp_path: Path, lead: int) -> None:
    slabs = Slabs()
    kept(slabs, [(lead // 4,)])
    payloads = kept(slabs, [(300, 1000), (2,), (70, 4), (2, 1)])
    pending = fill(payloads)
    header, run = (memoryview(chunk) for chunk in pending.chunks())
    assert run.nbytes == sum(payload.array.nbytes for payload in payloads)
    assert (durable.address(run) - header.nbytes) % durable.BLOCK == 0
    got = read(tmp_path / "a", pending)
    assert len(got) == 4
    for k, payload in enumerate(payloads):
        np.testing.assert_array_equal(got[f"k{k}"], payload.array)


def test_what_cannot_lie_in_a_run_follows_it_aligned(tmp_path: Path) -> None:
    slabs = Slabs()
    large = kept(slabs, [(400, 1000)])
    odd = kept(slabs, [(3,), (0,), ()], "bool") + kept(slabs, [(), (7,)], "float32") + kept(slabs, [(5,)], "float16")
    pending = fill([odd[0], *large, *odd[1:]])
    got = read(tmp_path / "a", pending)
    for k, payload in enumerate([odd[0], *large, *odd[1:]]):
        np.testing.assert_array_equal(got[f"k{k}"], payload.array)
    offsets = 0
    for _, dtype, _, raw in pending.tensors:
        assert offsets % np.dtype(dtype).itemsize == 0
        offsets += raw.nbytes
    assert pending.tensors[0][0] == "k1"


def test_a_run_that_ends_small_is_no_write_of_its_own() -> None:
    slabs = Slabs()
    payloads = kept(slabs, [(100,), (100,), (100,)])
    pending = fill([payloads[0], payloads[2]])
    assert not pending.full(durable.address(memoryview(payloads[1].array.view(np.uint8))), 400)
    assert len(list(pending.chunks())) == 3  # the header, and each by itself


def test_a_large_run_ends_its_segment(tmp_path: Path) -> None:
    slabs = Slabs()
    first, _, second = kept(slabs, [(300, 1000), (300, 1000), (350, 1000)])
    out = writer(tmp_path / "run")
    refs = []
    for payload in (first, second, *kept(Slabs(), [(3,)], "int8")):
        raw = payload.array.view(np.uint8)
        refs.append(out.add_payload(hexadecimal(digest(payload.array)), payload.array.dtype.name, payload.array.shape, raw))
    out.close()
    assert [segment[8:12] for segment, _ in refs] == ["0000", "0001", "0001"]
    capture = open_capture(tmp_path / "run")
    np.testing.assert_array_equal(capture.payload(0, *refs[0]), first.array)
    np.testing.assert_array_equal(capture.payload(0, *refs[1]), second.array)
    for k, payload in enumerate((first, second)):
        size = (out.folder / f"tensors-{k:04d}.safetensors").stat().st_size
        assert 0 < size - payload.array.nbytes < 2 * durable.BLOCK

