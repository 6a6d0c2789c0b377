"""What an assessed run wrote (`trueup.simdev.shapes`): a row for each operator at each line of the user's."""

from __future__ import annotations

import os
from typing import Literal

import msgspec

FULL = 8
"""Shapes of a row, of which the run keeps no more: whether they changed between steps cannot be told then."""


class Row(msgspec.Struct):
    """An operator at one line of the user's, as the run wrote it."""

    operator: str
    kind: Literal["kernel", "composite", "view", "custom", "untold"]
    phase: Literal["forward", "backward"]
    function: str
    dtypes: list[str]
    site: tuple[str, int, str] | None
    calls: int
    flops: int
    shapes: list[tuple[int, str]]
    why: Literal["shape", "mask", "meta"] | None
    """The shape of its result, or how many elements it writes, depends on numbers; ``meta``: PyTorch has no shapes of it."""
    decomposes: bool
    package: str = ""
    groups: list[int] = []
    forms: list[str] = []
    """Its forms that write into what they are given, of which PyTorch makes it: ``gelu.out``."""
    untold: str = ""
    """Why nobody knows what a function of a capture is made of."""

    @property
    def place(self) -> str:
        """Return the user's line, or whose backward it is."""
        if self.site is None:
            return ""
        file, line, name = self.site
        return f"{os.path.relpath(file)}:{line}" if file else f"backward of {name.removesuffix('0').removesuffix('Backward')}"

    @property
    def varies(self) -> bool:
        """Return whether its shapes in one step are others than in another."""
        steps: dict[int, set[str]] = {}
        for step, shapes in self.shapes:
            steps.setdefault(step, set()).add(shapes)
        several = list(steps.values())
        return len(self.shapes) < FULL and any(one != several[0] for one in several[1:])

    @property
    def is_dynamic(self) -> bool:
        """Return whether its shapes change, or depend on numbers."""
        return self.varies or self.why in ("shape", "mask")


class Run(msgspec.Struct):
    """What one process wrote: ``memory`` is the most bytes of its tensors, ``packages`` are those imported, with their folders."""

    steps: int
    torch: str
    rows: list[Row]
    memory: int = 0
    packages: dict[str, str] = {}
    script: str = ""
