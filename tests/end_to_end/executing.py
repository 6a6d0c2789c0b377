"""Executing the command lines of a page, in this process, as they are written there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from test_documentation import words, written
from trueup.doors.cli.app import run


def lines_of(page: Path) -> list[str]:
    """Return a page's command lines, with what stands for a call."""
    return list(dict.fromkeys(" ".join(map(shlex.quote, words(line))) for line in written(page)))


def wrong(line: str, capsys: pytest.CaptureFixture[str], allowed: tuple[int, ...] = (0, 1, 3)) -> str:
    """Execute a line; return what went wrong, empty where it worked: it ended as a verdict does."""
    code = run(shlex.split(line))
    said = capsys.readouterr()
    return "" if code in allowed else f"trueup {line}: {code}\n{said.out[-400:]}\n{said.err[-1500:]}"
