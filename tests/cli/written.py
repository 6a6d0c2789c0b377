"""Captures made of given tensors, through the writer that recordings go through."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import PACKED
from trueup.foundation.store import Writer, claim, statistics

ROOT = {"trueup_version": "0.1.0", "command": ["python", "train.py"], "levels": ["api"], "detail": "stats", "config": {}}
RANK = {"framework": "torch", "devices": ["cpu"], "world_size": 1, "environment": {"python": "3.11"}}

Calls = Mapping[str, Mapping[str, np.ndarray]]
"""scope/op -> slot -> tensor, in order of execution."""


def capture(directory: Path, calls: Calls, detail: str = "tensor", steps: int = 1) -> Path:
    """Write a capture of one rank."""
    out = Writer(directory, claim(directory, 0, None), {**ROOT, "detail": detail}, RANK)
    rows = [(seq, *name.rpartition("/")[::2], slot, values) for seq, (name, slots) in enumerate(calls.items())
            for slot, values in slots.items()]  # fmt: skip
    packed = np.empty((len(rows), PACKED))
    for (*_, values), to in zip(rows, packed, strict=True):
        summarize(values, to)
    content: dict[str, Any] = {
        "seq": [row[0] for row in rows], "scope": [row[1] for row in rows], "op": [row[2] for row in rows],
        "slot": [row[3] for row in rows], "phase": ["forward"] * len(rows), "level": ["api"] * len(rows),
        "ordinal": [0] * len(rows), "dtype": [row[4].dtype.name for row in rows], "device": ["cpu"] * len(rows),
        "shape": [list(row[4].shape) for row in rows], "numel": [row[4].size for row in rows],
        "digest": [hexadecimal(digest(row[4])) for row in rows],
    }  # fmt: skip
    if detail == "digest":
        numbers: dict[str, Any] = {}
    else:
        numbers = statistics(packed, np.arange(len(rows)), len(rows))
    if detail == "tensor":
        places = [out.add_payload(key, row[4].dtype.name, row[4].shape, row[4].tobytes())
                  for key, row in zip(content["digest"], rows, strict=True)]  # fmt: skip
        content |= {"payload_segment": [place[0] for place in places], "payload_key": [place[1] for place in places]}
    for step in range(steps):
        out.write_records(step, {**content, **numbers})
    out.close("complete")
    return directory
