"""Where work on many ranks runs: in this process's children, on a Ray cluster, or on a Dask cluster.

    local                 processes of this machine, started anew (never forked: threads of Arrow hold locks)
    ray, ray:ADDRESS      a Ray of this machine, or the cluster at an address (``auto``: the one that runs here)
    dask, dask:ADDRESS    likewise, of Dask

Nothing is lost: each item comes back with what was found, or with the reason why nothing was. A process that is killed takes the
items of its pool with it; they are done again, each in a process of its own, so that only the one that ends it is given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from trueup.foundation.model import TrueupError, UsageError

Item = TypeVar("Item")
Found = TypeVar("Found")

TRIES = 2  # how often a cluster begins an item again whose worker died
ENDED = "the process that worked on it was ended from outside: out of memory, or killed"


@dataclass(frozen=True, slots=True)
class Failed:
    """Why nothing was found of an item."""

    why: str

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        """Take an error for the reason."""
        said = (str(error).strip().splitlines() or [""])[0][:300]
        return cls(said if isinstance(error, TrueupError) else f"{type(error).__name__}: {said}")


class Engine(Protocol):
    """Does work on items side by side."""

    @property
    def workers(self) -> int:
        """How many items are worked on at a time."""
        ...

    def map(self, work: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[tuple[int, Found | Failed]]:
        """Yield the place of each item, in the order in which they are done, and what ``work`` returned for it."""
        ...


@dataclass(frozen=True, slots=True)
class Local:
    """Processes of this machine."""

    workers: int

    def map(self, work: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[tuple[int, Found | Failed]]:
        """As `Engine.map`."""
        again: list[int] = []
        with _pool(min(self.workers, len(items))) as pool:
            try:
                places = {pool.submit(work, item): n for n, item in enumerate(items)}
                for future in as_completed(places):
                    if isinstance(future.exception(), BrokenProcessPool):
                        again.append(places[future])
                    else:
                        yield places[future], _found(future)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        with ThreadPoolExecutor(self.workers, "trueup-engine") as threads:
            yield from zip(again, threads.map(lambda n: _alone(work, items[n]), again), strict=True)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max(workers, 1), mp_context=get_context("spawn"))


def _alone(work: Callable[[Item], Found], item: Item) -> Found | Failed:
    with _pool(1) as pool:
        found: Found | Failed = _found(pool.submit(work, item))
    return found


def _found(future: Future[Any]) -> Any:
    error = future.exception()
    if error is None:
        return future.result()
    return Failed(ENDED) if isinstance(error, BrokenProcessPool) else Failed.by(error)


class Ray:
    """A Ray cluster; ``address`` empty: one of this machine, which ends with this process."""

    def __init__(self, address: str, workers: int) -> None:
        self._ray = ray = _imported("ray", "ray")
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        if not ray.is_initialized():
            ray.init(**({"address": address, "log_to_driver": False} if address else {"num_cpus": workers, **quiet}))
        self.workers = max(workers if not address else int(ray.cluster_resources().get("CPU", 1)), 1)

    def map(self, work: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[tuple[int, Found | Failed]]:
        """As `Engine.map`; no more than two items a worker are on their way."""
        ray, rest, running = self._ray, iter(enumerate(items)), dict[Any, int]()
        remote = ray.remote(max_retries=TRIES)(work)
        while True:
            while len(running) < 2 * self.workers and (following := next(rest, None)) is not None:
                running[remote.remote(following[1])] = following[0]
            if not running:
                return
            done, _ = ray.wait(list(running))
            for reference in done:
                yield running.pop(reference), self._result(reference)

    def _result(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return Failed.by(error.cause if isinstance(error.cause, BaseException) else error)
        except self._ray.exceptions.RayError as error:
            return Failed(f"{ENDED} ({type(error).__name__})")


class Dask:
    """A Dask cluster; ``address`` empty: processes of this machine, which end with this one."""

    def __init__(self, address: str, workers: int) -> None:
        self._distributed = distributed = _imported("distributed", "dask")
        if address:
            self._client = distributed.Client(address)
        else:
            local = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1")
            self._client = distributed.Client(local)
        self.workers = max(len(self._client.scheduler_info()["workers"]), workers, 1)

    def map(self, work: Callable[[Item], Found], items: Sequence[Item]) -> Iterator[tuple[int, Found | Failed]]:
        """As `Engine.map`."""
        places = {self._client.submit(work, item, pure=False, retries=0): n for n, item in enumerate(items)}
        for future in self._distributed.as_completed(list(places)):
            n = places.pop(future)
            error = future.exception()
            if error is None:
                yield n, future.result()
            else:
                killed = isinstance(error, self._distributed.KilledWorker)
                yield n, Failed(ENDED) if killed else Failed.by(error)


def _imported(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise TrueupError(f"--engine {extra} needs {error.name}, which is not installed: pip install 'trueup[{extra}]'") from None


ENGINES: dict[str, Callable[[str, int], Engine]] = {"local": lambda _, workers: Local(workers), "ray": Ray, "dask": Dask}


def engine_of(name: str, workers: int) -> Engine:
    """Return the engine of a name, ``local``, ``ray[:ADDRESS]`` or ``dask[:ADDRESS]``, with so many workers where it starts its
    own. Raises UsageError if there is no such engine, TrueupError if it is not installed or cannot be reached."""
    kind, _, address = name.partition(":")
    if kind not in ENGINES or (kind == "local" and address):
        expected = "local, ray, dask, ray:ADDRESS or dask:ADDRESS"
        raise UsageError(f"the engine {name!r} is unknown.\n  expected: {expected}\n  next:     leave --engine out for processes")
    try:
        return ENGINES[kind](address, workers)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise TrueupError(f"--engine {name} cannot be reached: {said}; check the address, or leave --engine out") from None


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
