from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _simulated_device() -> None:
    """Install the device before any test: autograd counts devices once in a process, at its first backward."""
    from trueup import simdev

    simdev.install()
