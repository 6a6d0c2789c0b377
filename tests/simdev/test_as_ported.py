"""What ported scripts use of the device: streams, events, memory figures, mixed precision, typed tensors, process groups."""

from __future__ import annotations

import pytest
import torch


def test_streams_and_events_are_there_and_take_time() -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
        start.record()
        x = torch.ones(64, 64, device="npu") @ torch.ones(64, 64, device="npu")
        end.record(stream)
    torch.npu.current_stream().wait_stream(stream)
    assert stream == torch.npu.default_stream()
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert x.sum().item() == 64**3
    with pytest.raises(RuntimeError, match="enable_timing"):
        torch.npu.Event().elapsed_time(end)


def test_memory_figures() -> None:
    figures = torch.npu.memory_stats()
    assert 0 < figures["allocated_bytes.all.current"] <= figures["allocated_bytes.all.peak"] * 2
    free, total = torch.npu.mem_get_info()
    assert 0 < free < total == torch.npu.get_device_properties().total_memory
    assert "allocated_bytes.all.peak" in torch.npu.memory_summary()


def test_the_accelerator_answers() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() > 0
    assert torch.accelerator.max_memory_allocated() > 0


TYPED = [("FloatTensor", torch.float32), ("LongTensor", torch.int64), ("BoolTensor", torch.bool)]


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_typed_tensors(name: str, dtype: torch.dtype) -> None:
    made = getattr(torch.npu, name)([1, 0])
    assert made.dtype is dtype
    assert made.device.type == "npu"
    assert getattr(torch.npu, name)(2, 3).shape == (2, 3)


def test_mixed_precision_of_the_module() -> None:
    x = torch.ones(2, 2, device="npu")
    with torch.npu.amp.autocast():
        assert (x @ x).dtype is torch.float16
    with torch.npu.amp.autocast(False):
        assert (x @ x).dtype is torch.float32
    assert torch.npu.amp.GradScaler(init_scale=8.0).get_scale() == 8.0


def test_hccl_is_a_backend() -> None:
    assert torch.distributed.get_default_backend_for_device("npu") == "hccl"
