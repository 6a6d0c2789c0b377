"""Call stacks as the tools write them: frames ``file:line in function``, innermost first, without the frameworks' own."""

from __future__ import annotations

import re
from typing import Any

from trueup.exchange.readers.dump import Frames

MAX_FRAMES = 48
MAX_LENGTH = 400

INTERNAL = (
    "/site-packages/torch/", "/site-packages/msprobe/", "/ptdbg_ascend/", "/site-packages/torch_npu/", "/site-packages/paddle/",
    "/site-packages/tensorflow/", "/site-packages/keras/",
)  # fmt: skip

_MSPROBE = re.compile(r"File (?P<file>.*?), line (?P<line>\d+), in (?P<function>.*?), *\n?(?P<text>.*)", re.DOTALL)
_TRACEBACK = re.compile(r'File "(?P<file>.*?)", line (?P<line>\d+), in (?P<function>[^\n]*)\n?(?P<text>.*)', re.DOTALL)

_REPEATING = re.compile(
    r"torch/(utils/checkpoint|autograd/__init__|autograd/graph|_tensor)\.py:\d+ in (\w*backward|unpack_hook|recompute_fn)"
)
"""Frames below which a forward call repeats one that was made before: activation checkpointing inside the backward pass."""


def from_text(frames: Any) -> tuple[Frames | None, bool]:
    """Read a list of texts, or of ``[file, line, function, code]``; also tell whether a backward pass made the call."""
    if not isinstance(frames, (list, tuple)):
        return None, False
    found: list[tuple[str, str | None]] = []
    for frame in frames[:400]:
        if (one := _frame(frame)) is not None:
            found.append(one)
    repeats = any(_REPEATING.search(place) for place, _ in found)
    users = [one for one in found if not any(part in one[0] for part in INTERNAL)] or found
    if not users:
        return None, repeats
    return (tuple(place for place, _ in users[:MAX_FRAMES]), users[0][1]), repeats


def _frame(frame: Any) -> tuple[str, str | None] | None:
    if isinstance(frame, (list, tuple)) and len(frame) >= 3:
        file, line, function = frame[:3]
        text = frame[3] if len(frame) > 3 else None
    elif isinstance(frame, str) and (match := _MSPROBE.match(frame) or _TRACEBACK.match(frame.strip())):
        file, line, function, text = match.groups()
    else:
        return None
    place = f"{file}:{line} in {function}"[:MAX_LENGTH]
    return place, str(text).strip()[:MAX_LENGTH] or None if text else None
