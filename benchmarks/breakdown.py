"""Where the time of a capture goes, mode by mode; prints a line of JSON each.

A step under capture is split into: the plain step; reading the data (the kernel's calls); Python (what is left of the training
thread's CPU time); waiting (what is left of the wall time: the interpreter lock, the disk, cores and caches that the writer
took). The writer's own CPU time stands beside. Clocks around the kernel disturb the step, so none of this is in the ratios.

Each mode runs in a process of its own, forked before PyTorch starts its threads, so its peak memory is its own.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

import models
import probes
from machine import peak_megabytes, wait_until_quiet
from modes import MODES
from stepping import count, disturbed_share, mean, run
from timing import SETTLE


def measure(model: str, name: str, into: Path, seconds: float) -> dict[str, Any]:
    """Run a mode in this process."""
    torch.set_num_threads(2)
    step = models.build(model)
    for _ in range(3):
        step()
    plain = run(step, seconds)
    plain_peak = peak_megabytes()

    kernel, files = probes.install()
    gc.collect()
    settle = 0.0 if MODES[name].quiet else SETTLE
    with MODES[name].around(into):
        step()
        time.sleep(settle)
        kernel.clear()
        files.clear()
        writer = probes.writer_seconds()
        under = run(step, seconds, meter=lambda: kernel.seconds)
        steps = count(under)
        reading, reads = mean(under, "metered"), kernel.calls / steps
        time.sleep(settle)  # so that what these steps made is written by the thread, and counted
        writer = (probes.writer_seconds() - writer) / steps
        filing = (files.nanoseconds + files.elsewhere) / 1e9 / steps
    peak = peak_megabytes()
    wall, cpu = (mean(under, what) - mean(plain, what) for what in ("wall", "cpu"))
    return {
        "mode": name, "plain": mean(plain), "reading": reading, "reads": reads, "python": cpu - reading - kernel.cost * reads,
        "waiting": wall - cpu, "writer": writer, "files": filing, "disturbed": disturbed_share(plain + under),
        "plain_peak": plain_peak, "memory": peak - plain_peak, **content(into),
    }  # fmt: skip


def content(into: Path) -> dict[str, Any]:
    """Count what a step of the capture holds: rows, calls, bytes read if every buffer is read once, bytes written."""
    import pyarrow as pa
    import pyarrow.compute as pc

    import trueup

    if not (into / "manifest.json").exists():  # no step was selected
        return dict.fromkeys(("rows", "calls", "unique", "written"), 0)
    capture = trueup.open_capture(into)
    last = max(capture.steps)
    rows = capture.records(columns=["seq", "dtype", "numel", "min", "max", "l2", "mean", "digest"], step=last)
    slots = rows.filter(pc.is_valid(rows["numel"])).drop_columns(["seq"])
    different = slots.group_by(slots.column_names).aggregate([])
    sizes = [_itemsize(str(d)) for d in different["dtype"].cast(pa.string()).to_pylist()]
    unique = sum(n * size for n, size in zip(different["numel"].to_pylist(), sizes, strict=True))
    written = sum(f.stat().st_size for f in into.rglob("*") if f.is_file())
    return {
        "rows": rows.num_rows, "calls": pc.count_distinct(rows["seq"]).as_py(), "unique": unique,
        "written": written / (last + 1),
    }  # fmt: skip


def _itemsize(dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    return kind.itemsize if isinstance(kind, torch.dtype) else 1


def main() -> None:
    """Take ``{model, modes, seconds, patience, folder}`` from the command line."""
    asked = json.loads(sys.argv[1])
    into = Path(asked["folder"]) / "capture"
    if asked["model"] == "llama":
        import transformers.models.llama.modeling_llama  # noqa: F401 - once for all children
    for name in asked["modes"]:
        wait_until_quiet(asked["patience"])
        child = os.fork()
        if child == 0:
            print(json.dumps(measure(asked["model"], name, into, asked["seconds"])), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{asked['model']} {name}: the process failed")
        shutil.rmtree(into, ignore_errors=True)


if __name__ == "__main__":
    main()
