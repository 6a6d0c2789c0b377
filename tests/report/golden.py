"""Comparing output with a stored text; set TRUEUP_UPDATE_GOLDEN=1 to store it, and read the diff before committing."""

from __future__ import annotations

import os
from pathlib import Path


def check(name: str, text: str) -> None:
    path = Path(__file__).with_name("golden") / name
    trimmed = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if os.environ.get("TRUEUP_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(trimmed, encoding="utf-8")
    assert trimmed == path.read_text(encoding="utf-8")
