"""Small captures to read, break and fight over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import PACKED
from trueup.foundation.store import Writer, claim, statistics

ROOT = {
    "trueup_version": "0.1.0",
    "command": ["python", "train.py"],
    "levels": ["aten"],
    "detail": "stats",
    "config": {},
}
RANK = {"framework": "torch", "devices": ["cpu"], "world_size": 1, "environment": {"python": "3.11"}}


def writer(directory: Path, rank: int = 0, **root: Any) -> Writer:
    return Writer(directory, claim(directory, rank, root.get("run")), {**ROOT, **root}, RANK)


def columns(count: int = 6, first_seq: int = 0, seed: int = 0) -> dict[str, Any]:
    """Return a part: calls of one tensor slot and one argument slot each."""
    tensors = np.random.default_rng(seed).standard_normal((count, 10)).astype(np.float32)
    packed = np.empty((count, PACKED))
    for tensor, out in zip(tensors, packed, strict=True):
        summarize(tensor, out)
    rows = 2 * count
    return {
        "seq": first_seq + np.arange(rows) // 2,
        "phase": ["forward"] * rows,
        "level": ["aten"] * rows,
        "scope": [f"layers.{k // 2 % 3}" for k in range(rows)],
        "op": ["aten::mm"] * rows,
        "ordinal": [0] * rows,
        "slot": ["input.0", "arguments"] * count,
        "dtype": ["float32", None] * count,
        "shape": [[2, 5], None] * count,
        "numel": [10, None] * count,
        "digest": [hexadecimal(digest(tensors[k // 2])) if k % 2 == 0 else None for k in range(rows)],
        "value": [None, '{"alpha": 1}'] * count,
        "site": [0] * rows,
        **statistics(packed, np.arange(0, rows, 2), rows),
    }


def small(directory: Path, steps: int = 3, parts: int = 2) -> Path:
    """Write a complete capture with payload, stacks and one rank."""
    out = writer(directory)
    out.add_sites([(0, ["train.py:7 in step", "train.py:1 in <module>"], "loss.backward()")])
    tensor = np.arange(10, dtype=np.float32)
    segment, key = out.add_payload(hexadecimal(digest(tensor)), "float32", (2, 5), tensor.tobytes())
    for step in range(steps):
        for part in range(parts):
            content = columns(first_seq=100 * part, seed=part)
            content |= {"payload_segment": [segment] * 12, "payload_key": [key] * 12}
            out.write_records(step, content)
    out.close("complete")
    return directory


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
