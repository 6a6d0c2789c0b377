from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from nursery import Nursery

pytest_plugins = ["frozen"]
os.environ["USE_TF"] = "0"
"""transformers 4 is to leave TensorFlow alone: beside Keras 3 it does not import its Trainer otherwise."""


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
    """A process with PyTorch in it that forks a child for each job: what needs a process need not need seconds."""
    from nursery import nursery as start

    with start() as started:
        yield started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits for a process of another framework for a minute, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: not item.path.parent.name.startswith("with_"))
