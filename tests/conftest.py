from __future__ import annotations

import multiprocessing.spawn
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nursery import Nursery

pytest_plugins = ["frozen"]
os.environ["USE_TF"] = "0"
"""transformers 4 is to leave TensorFlow alone: beside Keras 3 it does not import its Trainer otherwise."""
os.environ["COLUMNS"] = "80"
"""Lines of a pipe are as long as they are; tests look at what a terminal shows."""
os.environ["TRUEUP_QUIET"] = "1"
"""On a busy machine anything may take ten seconds, and say so."""


@pytest.fixture(scope="session", autouse=True)
def _simulated_device() -> None:
    """Install the device before any test: autograd counts devices once in a process, at its first backward."""
    from trueup import simdev

    simdev.install()


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Write without waiting for the disk: a capture asks for it a dozen times, and a busy disk takes a second for each.

    Tests about fsync put their own in its place; the processes that tests start do wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process with PyTorch in it, of one that all workers share, that forks a child for each job: it need not take seconds."""
    from nursery import nursery as start

    with start() as started:
        yield started


@pytest.fixture
def warm(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``sys.executable`` is in this test: a Python that has PyTorch in it already (see `warm_python`)."""
    monkeypatch.setattr(sys, "executable", nursery.python)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(nursery.python))
    return nursery.python


LONG = (
    "with_tensorflow", "with_paddle", "verdict/test_planted_faults.py", "verdict/test_cases_noise.py",
    "verdict/test_implementations.py", "verdict/test_goldens.py", "audit/test_causes.py", "adapters/test_compiling.py",
    "verdict/test_cases_structure.py", "distributed", "verdict/test_other_forms.py", "adapters/test_observer.py",
    "report/test_page.py", "launch/test_ranks.py", "verdict/test_deletions.py", "end_to_end/test_documented_commands.py",
    "end_to_end/test_autocast.py", "verdict/test_cases_perturbed.py", "verdict/test_cases_lost.py",
)  # fmt: skip
"""Files and folders that take twenty seconds or more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: next((k for k, name in enumerate(LONG) if f"tests/{name}" in item.nodeid), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers of one process."""
    import workers

    python = workers.start(config)
    for spec in specs:
        spec.python = python


TOGETHER = ("tests/distributed/",)
"""Folders that one worker takes whole, for their files share captures."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Leave files whole, and some folders."""
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "loadfile":
        return None

    class Whole(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Whole(config, log)
