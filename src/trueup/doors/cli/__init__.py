"""The command line: one file per command, each parses, calls the library and prints.

No logic lives here and nothing heavy is imported before a command runs. ``main`` is the only door: it turns every
condition into one message on stderr and an exit code (0 aligned, 1 deviates, 2 could not tell or bad usage).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``trueup`` with the process' arguments (or the given ones) and return its exit code."""
    from trueup.doors.cli.app import run

    return run(arguments)
