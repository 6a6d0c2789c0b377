"""Doing one thing to several files at a time: a disk takes many short writes together as fast as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WORKERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], workers: int = WORKERS) -> list[Result]:
    """Return ``work`` of each item, in order, ``workers`` at a time; its errors are raised once all are done. A single item is
    done without threads, and so are all while the interpreter is ending, when no more threads can start."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(workers, len(items)), "trueup-disk") as pool:
        started = []
        try:
            for item in items:
                started.append(pool.submit(work, item))
        except RuntimeError:  # cannot schedule new futures after, or start new threads at, interpreter shutdown
            rest = [work(item) for item in items[len(started) :]]
        else:
            rest = []
        return [future.result() for future in started] + rest
