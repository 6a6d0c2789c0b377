"""Every instruction set that this processor has, one after the other."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trueup.foundation.kernels import native

KNOWN = ["neon"] if platform.machine() in ("aarch64", "arm64") else ["plain", "avx2", "avx512"]
"""Instruction sets that the compiled kernel has code for."""


@contextmanager
def compiled_for(instructions: str) -> Iterator[None]:
    """Let the compiled kernel use this instruction set, which the processor has."""
    kernel = native()
    assert kernel is not None
    before = kernel.target(None)
    kernel.target(instructions)
    yield
    kernel.target(before)


def available() -> list[str]:
    """Return the instruction sets that this processor and this build have; none where the kernel was not built."""
    kernel = native()
    found = []
    for instructions in KNOWN if kernel is not None else ():
        before = kernel.target(None)
        try:
            kernel.target(instructions)
        except ValueError:
            continue
        kernel.target(before)
        found.append(instructions)
    return found


SETS = available()
"""What tests are repeated for: what the processor lacks is skipped once, by `test_native.test_sets_of_this_processor`."""


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with compiled_for(request.param):
        yield request.param
