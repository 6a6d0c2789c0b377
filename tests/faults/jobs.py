"""What the children of the nursery do: train under capture while something goes wrong."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import trueup
from faults.training import Training
from trueup.foundation.store import durable
from trueup.foundation.store.layout import holds_records
from trueup.recording.recorder import flusher

MB = 2**20


def say(*words: Any) -> None:
    """Print a line in one write: `print` writes it in pieces under PYTHONUNBUFFERED, and another thread's line comes between."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def train(out: str, steps: int = 10**9, flush: float = 1.0, pause: float = 0.0, **options: Any) -> None:
    """Train and say each step and its loss."""
    flusher.FLUSH_SECONDS = flush
    training = Training()
    with trueup.capture(out, model=training.model, **options):
        for step in range(steps):
            say("step", step, training.step().hex())
            time.sleep(pause)
    say("trained")


def plain(steps: int) -> None:
    """Train without a capture."""
    training = Training()
    for step in range(steps):
        say("step", step, training.step().hex())


def train_until(out: str, end: str, after: int, **options: Any) -> None:
    """Train until a file appears, then some steps more: what is done to the directory is done in between."""
    flusher.FLUSH_SECONDS = 0.1
    training = Training()
    with trueup.capture(out, model=training.model, **options):
        step = left = 0
        while left < after:
            say("step", step, training.step().hex())
            step, left = step + 1, left + Path(end).exists()
            time.sleep(0.02)
    say("trained")


def limited(out: str, steps: int, size: int, **options: Any) -> None:
    """Train where from some step on no file may grow beyond ``size`` bytes: the write fails in its middle."""
    flusher.FLUSH_SECONDS = 0.1
    training = Training()
    with trueup.capture(out, model=training.model, **options):
        for step in range(steps):
            say("step", step, training.step().hex())
            if holds_records(Path(out)):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            time.sleep(0.02)
    say("trained")


def slow_disk(out: str, steps: int, megabytes_per_second: float, wide: int, **options: Any) -> None:
    """Train on a disk that takes ``megabytes_per_second``, then say the memory that came on top of the training's own."""
    import torch

    write = durable.put

    def throttled(path: Path, chunks: Any, *, sync: bool) -> None:
        chunks = [bytes(chunk) for chunk in chunks] if ".json" in path.suffixes else list(chunks)
        time.sleep(sum(memoryview(chunk).nbytes for chunk in chunks) / megabytes_per_second / MB)
        write(path, chunks, sync=sync)

    durable.put = throttled
    layers = torch.nn.Sequential(*(torch.nn.Linear(wide, wide) for _ in range(4)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        layers(torch.randn(wide, wide)).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before = peak()
    started = time.monotonic()
    with trueup.capture(out, **options):
        for _ in range(steps):
            step()
        say("trained", time.monotonic() - started)
    say("closed", time.monotonic() - started, "more", (peak() - before) / MB)


def peak() -> int:
    """Return the most memory that this process ever held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def hanging_disk(out: str, steps: int, patience: float, **options: Any) -> None:
    """Train on a disk that takes the first parts and then hangs for ever."""
    flusher.PATIENCE, flusher.LOUD_AFTER = patience, patience / 4
    flusher.PORTION_BYTES, flusher.HELD_BYTES = MB, 2 * MB
    write = durable.put
    written: list[Path] = []

    def hangs(path: Path, chunks: Any, *, sync: bool) -> None:
        if len(written) > 8:
            say("hanging")
            time.sleep(10**6)
        written.append(path)
        write(path, chunks, sync=sync)

    durable.put = hangs
    train(out, steps, 0.05, **options)


def dying_writer(out: str, steps: int, **options: Any) -> None:
    """Train while the thread that writes ends of something that is no Exception."""
    from trueup.foundation.store import Writer

    def dies(*_: Any) -> None:
        raise SystemExit(7)

    flusher.PORTION_BYTES, flusher.HELD_BYTES = MB // 4, MB
    Writer.write_parts = dies  # type: ignore[method-assign]
    train(out, steps, 0.05, **options)


def jumping_clock(out: str, steps: int) -> None:
    """Train while the wall clock jumps back and forth by days, and the local time zone changes."""
    real, jumps = time.time, iter(range(10**9))
    time.time = lambda: real() + (-1) ** next(jumps) * 1e6 * (next(jumps) % 7)  # type: ignore[method-assign]
    time.time_ns = lambda: int(time.time() * 1e9)  # type: ignore[method-assign]
    os.environ["TZ"] = "Pacific/Kiritimati"
    time.tzset()
    train(out, steps, 0.05)


def forks_while_writing(out: str, steps: int, how: str) -> None:
    """Fork in the middle of a flush; the child ends as ``how`` says, the parent trains on."""
    middle: list[str] = []
    write = durable.put

    def in_two_halves(path: Path, chunks: Any, *, sync: bool) -> None:
        def halves() -> Any:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                yield view[: len(view) // 2]
                middle.append(path.name)
                time.sleep(0.03)
                middle.clear()
                yield view[len(view) // 2 :]

        write(path, halves(), sync=sync)

    durable.put = in_two_halves
    flusher.FLUSH_SECONDS = 0.02
    training, children = Training(), []
    with trueup.capture(out, model=training.model):
        for step in range(steps):
            say("step", step, training.step().hex())
            if any(".parquet" in name for name in middle):
                pid = os.fork()
                if pid == 0:
                    training.step()
                    if how == "_exit":
                        os._exit(0)
                    raise SystemExit(0)
                children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    print("forked", len(children), flush=True)


def in_barrier(out: str, barrier: str, me: int, steps: int) -> None:
    """Begin a capture at the same moment as a sibling."""
    Path(barrier, str(me)).touch()
    while len(list(Path(barrier).iterdir())) < 2:
        pass
    training = Training()
    try:
        with trueup.capture(out, model=training.model):
            for _ in range(steps):
                training.step()
                time.sleep(0.05)
    except trueup.TrueupError as error:
        print("refused:", error, flush=True)


def many_calls(out: str, calls: int, **options: Any) -> None:
    """Make ``calls`` calls in one step: a scalar recurrence, as a Python loop over time makes it."""
    import torch

    weight = torch.nn.Parameter(torch.full((4,), 0.5))
    started = time.monotonic()
    before = peak()
    with trueup.capture(out, **options) as capture:
        state = torch.zeros(4)
        for k in range(calls // 2):
            state = torch.tanh(state * weight)
            if k % 500 == 499:
                state.sum().backward()
                state = state.detach()
        capture.step()
    print("took", time.monotonic() - started, "more", (peak() - before) / MB, flush=True)


def many_steps(out: str, steps: int, **options: Any) -> None:
    """Train ``steps`` steps of a tiny model; say the time and the memory of each tenth."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.capture(out, model=model, **options):
        for _ in range(10):
            started = time.monotonic()
            for _ in range(steps // 10):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
                optimizer.step()
            print("tenth", 1e3 * (time.monotonic() - started) / (steps // 10), resident(), flush=True)


def resident() -> float:
    """Return the memory this process holds, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB


