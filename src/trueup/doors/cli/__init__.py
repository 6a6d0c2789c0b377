"""The command line: a file for the commands of one kind; each parses, calls the library and prints.

No logic lives here, and nothing heavy is imported before a command runs. ``main`` is the only door: it turns every condition into
one message on stderr and an exit code (0 aligned, 1 deviates, 2 could not tell, 3 stopped, 64 bad usage).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``trueup`` with the process' arguments (or the given ones) and return its exit code."""
    try:
        with loading():
            from trueup.doors.cli.app import run
    except KeyboardInterrupt:  # while modules are loaded, which takes a while on a shared disk
        print("trueup: interrupted", file=sys.stderr)
        return 130
    return run(arguments)


@contextmanager
def loading() -> Iterator[None]:
    """Import within it without the collector of cyclic garbage, which later leaves out what was loaded by then. Modules make a
    few hundred thousand objects that stay; looking at each three times took a sixth of the start of `trueup compare`."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
