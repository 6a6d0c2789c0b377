"""Speed of the statistics kernel: dtype x size x threads, beside what a copy of the memory costs; and of the pairwise kernel.

``python benchmarks/kernel.py [--threads N] [--rounds N] [--pairs]``, the last for the pairwise kernel alone. One thread is timed
by its CPU time, so that other processes on the machine do not enter; several by the clock. Each figure is the best of the rounds
[the median].
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch  # its OpenMP team does the work of several threads

from trueup.foundation.kernels import KINDS, native, pair
from trueup.foundation.model import PACKED

KILO, MEGA = 1 << 10, 1 << 20
SIZES = (KILO, 16 * KILO, 256 * KILO, MEGA, 16 * MEGA, 64 * MEGA)
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int8", "bool", "complex64")


PAIRS = (
    ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float64", "float64"),
    ("float8_e4m3fn", "float8_e4m3fn"), ("int64", "int64"), ("int8", "int8"), ("bool", "bool"), ("complex64", "complex64"),
)  # fmt: skip


def tensor(name: str, size: int) -> np.ndarray:
    """Return ``size`` bytes of normal data."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.random.default_rng(0).standard_normal(size // dtype.itemsize, np.float32)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64  # as PyTorch aligns its storages
    array = raw[start : start + size].view(dtype)
    array[:] = (values > 0 if name == "bool" else values * 40).astype(dtype)
    return array


def seconds(work: Callable[[], object], size: int, clock: Callable[[], float], rounds: int) -> list[float]:
    """Time ``work`` on ``size`` bytes: seconds a call, one number a round."""
    repeats = max(1, min(2000, 32 * MEGA // size))
    work()
    times = []
    for _ in range(rounds):
        start = clock()
        for _ in range(repeats):
            work()
        times.append((clock() - start) / repeats)
    return times


def speed(size: int, times: list[float]) -> str:
    """Format as GB/s; small sizes as microseconds a call, the call from Python included."""
    best, median = min(times), statistics.median(times)
    if size <= 2 * KILO:
        return f"{best * 1e6:.2f} us [{median * 1e6:.2f}]"
    return f"{size / best / 1e9:.1f} [{size / median / 1e9:.1f}]"


def row(name: str, size: int, threads: int, rounds: int) -> str:
    """Return one line of the table."""
    array, out = tensor(name, size), np.empty(PACKED)
    kernel, source, to = native(), array.ctypes.data, out.ctypes.data
    kind, strides = KINDS[name], (1,)
    clock = time.thread_time if threads == 1 else time.perf_counter
    works = (
        lambda: kernel.measure(source, kind, array.shape, strides, to, threads, False),
        lambda: kernel.measure(source, kind, array.shape, strides, 0, threads),
        lambda: kernel.measure(source, kind, array.shape, strides, to, threads),
    )
    cells = [speed(size, seconds(work, size, clock, rounds)) for work in works]
    label = f"{size // MEGA} MB" if size >= MEGA else f"{size // KILO} KB"
    return f"| {name} | {label} | {threads} | {' | '.join(cells)} |"


def pair_row(names: tuple[str, str], size: int, threads: int, rounds: int) -> str:
    """Return one line of the table of pairs: ``size`` bytes of the first side, and as many elements of noise upon it."""
    first = tensor(names[0], size)
    dtype = np.dtype(getattr(ml_dtypes, names[1], names[1]))
    noise = np.random.default_rng(1).standard_normal(first.size, np.float32)
    second = first.astype(dtype)
    if dtype.name not in ("bool", "int8", "int64"):
        second = (first * (1 + 1e-6 * noise)).astype(dtype)
    clock = time.thread_time if threads == 1 else time.perf_counter
    both = first.nbytes + second.nbytes
    times = seconds(lambda: pair(first, second, threads), both, clock, rounds)
    label = f"{size // MEGA} MB" if size >= MEGA else f"{size // KILO} KB"
    return f"| {names[0]} | {names[1]} | {label} | {threads} | {speed(both, times)} |"


def pairs(options: argparse.Namespace) -> None:
    """Print the table of pairs."""
    print("| baseline | candidate | size | threads | GB/s of both sides |\n| --- | --- | --- | --- | --- |")
    for names in PAIRS:
        for size in (KILO, 256 * KILO, 64 * MEGA):
            for threads in sorted({1, options.threads} if size >= MEGA else {1}):
                print(pair_row(names, size, threads, options.rounds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="several threads: how many (from 1 MB on)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", action="store_true", help="the pairwise kernel alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{platform.machine()}, instruction set {native().target(None)}, PyTorch {torch.__version__}\n")
    if options.pairs:
        pairs(options)
        return
    print("| dtype | size | threads | statistics, GB/s | digest | both |\n| --- | --- | --- | --- | --- | --- |")
    for name in DTYPES:
        for size in SIZES:
            for threads in sorted({1, options.threads} if size >= MEGA else {1}):
                print(row(name, size, threads, options.rounds), flush=True)
    print("\nTo compare: memory copied by one thread, GB/s read")
    for size in SIZES[1:]:
        source = tensor("float32", size)
        target = np.empty_like(source)
        times = seconds(lambda to=target, of=source: np.copyto(to, of), size, time.thread_time, options.rounds)
        print(f"{size // KILO} KB: {speed(size, times)}")
    print()
    pairs(options)


if __name__ == "__main__":
    main()
