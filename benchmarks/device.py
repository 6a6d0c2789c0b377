"""How fast a device measures its own tensors: GB/s of the Triton kernel and of PyTorch operators, and what a call costs the host.

Each way, dtype and size is timed with the device's own events over calls enqueued together, beside a plain copy of the tensor on
the device. Without a GPU there is nothing to measure, and it says so.

    float32      16.777 MB  PyTorch operators, sums in float64       .. GB/s       .. us of the host   copy       .. GB/s
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from trueup.recording.adapters.torch import device_statistics
from trueup.recording.adapters.torch.device_statistics import Way

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
"""Bytes."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def sample(dtype: torch.dtype, size: int, device: torch.device) -> torch.Tensor:
    count = size // dtype.itemsize
    return torch.randn(count, device=device).to(dtype) if dtype.is_floating_point else torch.arange(count, device=device)


def seconds(action: Callable[[], object], repeats: int, rounds: int = 5) -> tuple[float, float]:
    """Return seconds a call on the device and on the host: the median over rounds of calls enqueued together."""
    found = []
    for _ in range(rounds):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begun.record()
        started = time.perf_counter()
        for _ in range(repeats):
            action()
        host = time.perf_counter() - started
        ended.record()
        torch.cuda.synchronize()
        found.append((begun.elapsed_time(ended) / 1000 / repeats, host / repeats))
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


def enqueue(way: Way, x: torch.Tensor) -> None:
    assert way.fill is not None
    assert way.ring is not None
    device_statistics._enqueue(x, way.fill, way.ring)


def measure(way: Way, x: torch.Tensor) -> str:
    """Time one way on one tensor."""
    assert way.ring is not None
    enqueue(way, x)  # compiled now
    device, host = seconds(lambda: enqueue(way, x), 20)
    way.ring.fetch([way.ring.take()])  # rows that were dropped are free again
    target = torch.empty_like(x)
    copy, _ = seconds(lambda: target.copy_(x), 20)
    bytes_ = x.numel() * x.element_size()
    name = f"{str(x.dtype).removeprefix('torch.'):9} {bytes_ / 1e6:10.3f} MB  {way.description:34}"
    return f"{name} {bytes_ / device / 1e9:8.1f} GB/s  {1e6 * host:7.1f} us of the host   copy {bytes_ / copy / 1e9:8.1f} GB/s"


def ways(device: torch.device) -> list[Way]:
    """Return what works here, each after the trial that a capture makes."""
    found = []
    for attempt in (device_statistics._with_triton, device_statistics._with_operators):
        try:
            way = attempt(device)
            device_statistics._try(way, device)
        except Exception as error:  # noqa: BLE001 - said, and the next one is measured
            print(f"{attempt.__name__.removeprefix('_with_')}: not measured: {error}")
        else:
            found.append(way)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="bytes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"No CUDA or ROCm device here (PyTorch {torch.__version__}): the device kernels were not measured.")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}")
    found = ways(device)
    for dtype in DTYPES:
        for size in options.sizes:
            x = sample(dtype, size, device)
            for way in found:
                print(measure(way, x), flush=True)


if __name__ == "__main__":
    main()
