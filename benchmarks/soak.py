"""Does memory stay flat? Ten thousand steps under an idle capture, as many seen as modules, five hundred seen whole: the slopes.

A GPT-2 of `transformers` (2 layers, width 64) learns the next byte of this repository's LICENSE. Each run is a process of its own;
memory is what the process holds (RSS) after a garbage collection. The slope is fitted over the second half, so that what fills
once (caches of layouts, call sites, the allocator's arenas) does not count. `make soak` runs it; a short form is a test.

    idle          step  5000   463.3 MB
    idle          FLAT    0.00 KB a step over steps 5000 to 10000 (463.3 to 463.3 MB)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent

RUNS: dict[str, tuple[int, dict[str, object]]] = {
    "idle": (10_000, {"steps": "1000000000:"}),
    "module stats": (10_000, {"level": "module"}),
    "api stats": (500, {"level": "api"}),
    "aten stats": (500, {"level": "aten"}),
    "api tensor": (500, {"level": "api", "detail": "tensor"}),
}
POINTS = 20
ALLOWED_KB = {"idle": 0.5, "module stats": 2.0, "api stats": 20.0, "aten stats": 20.0, "api tensor": 400.0}
"""KB a step that still count as flat. Python's own growth at level api (`traced`: 1.8 KB a step over 500) is two slices of the text
a step, whose bounds are new each time and whose encoding is kept (`recorder.arguments.MAX_VALUES`: 4096); so are their
statistics, 256 of them (`buffers.MOST_VIEWS`). With payloads, a name is kept for each tensor stored, so that equal bytes are
stored once."""


def training():  # type: ignore[no-untyped-def]
    """Return a function that trains one step."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray((HERE.parent / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    source = torch.Generator().manual_seed(0)

    def step() -> None:
        starts = torch.randint(0, len(text) - 32, (2,), generator=source)
        tokens = torch.stack([text[start : start + 32] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def resident() -> float:
    """Return the memory that this process holds, in MB; what the allocators keep comes and goes by tens of MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def traced() -> float:
    """Return what Python and NumPy hold, in MB, and the tensors made since the start, each counted as a MB: exact, and slow.

    The least of three looks: the thread that writes may hold for a moment longer what it wrote last.
    """
    import torch

    looks = []
    for _ in range(3):
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        looks.append(tracemalloc.get_traced_memory()[0] / 2**20 + tensors)
        threading.Event().wait(0.02)
    return min(looks)


def soak(
    name: str, steps: int, options: dict[str, object], into: Path, measured: Callable[[], float] = resident
) -> list[tuple[int, float]]:
    """Train ``steps`` steps under a capture; return (step, MB) at `POINTS` moments, once the writer has caught up."""
    import trueup

    step = training()
    step()
    if measured is traced:
        gc.collect()
        gc.freeze()  # what is there before the capture is none of its garbage: twenty looks at a million objects take their time
        tracemalloc.start()
    points = []
    with trueup.capture(into, on_error="stop", **options) as capture:  # type: ignore[arg-type]
        recorder = capture._session.recorder
        for k in range(1, steps + 1):
            step()
            if k % (steps // POINTS) == 0:
                recorder.flush()  # which would be done within a second
                while recorder._rows or recorder._flusher.backlog.held:  # what waits for the disk is no leak
                    threading.Event().wait(0.05)
                points.append((k, measured()))
                print(f"{name:12} step {k:6} {points[-1][1]:8.1f} MB", file=sys.stderr, flush=True)
    return points


def slope(points: list[tuple[int, float]]) -> float:
    """Return the least-squares slope over the second half, in KB a step."""
    half = points[len(points) // 2 - 1 :]
    middle = sum(k for k, _ in half) / len(half)
    level = sum(mb for _, mb in half) / len(half)
    return 1024 * sum((k - middle) * (mb - level) for k, mb in half) / sum((k - middle) ** 2 for k, _ in half)


def verdict(name: str, points: list[tuple[int, float]], allowed: float) -> tuple[bool, str]:
    """Say whether memory is flat."""
    grown = slope(points)
    (first, before), (last, after) = points[len(points) // 2 - 1], points[-1]
    flat = grown <= allowed
    said = f"{grown:6.2f} KB a step over steps {first} to {last} ({before:.1f} to {after:.1f} MB; {allowed:g} allowed)"
    return flat, f"{name:12} {'FLAT' if flat else 'GROWS'} {said}"


def in_process(name: str, steps: int, measured: str = "resident") -> list[tuple[int, float]]:
    """Soak in a fresh process; ``measured`` is resident or traced."""
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, __file__, "--one", name, str(steps), str(Path(work) / "capture"), measured]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return [(int(k), float(mb)) for k, mb in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    """Print a verdict on each run; 1 if one grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=4, metavar=("RUN", "STEPS", "DIRECTORY", "MEASURED"), help=argparse.SUPPRESS)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--short", action="store_true", help="a tenth of the steps")
    options = parser.parse_args()
    if options.one:
        name, steps, into, measured = options.one
        print(json.dumps(soak(name, int(steps), RUNS[name][1], Path(into), traced if measured == "traced" else resident)))
        return 0
    results = [verdict(n, in_process(n, RUNS[n][0] // (10 if options.short else 1)), ALLOWED_KB[n]) for n in options.runs]
    print("\n".join(said for _, said in results))
    return 0 if all(flat for flat, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
