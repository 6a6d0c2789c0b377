"""Every instruction set that this processor has, one after the other."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trueup.kernels import native

SETS = ["neon"] if platform.machine() in ("aarch64", "arm64") else ["plain", "avx2", "avx512"]


@contextmanager
def compiled_for(instructions: str) -> Iterator[None]:
    """Let the compiled kernel use this instruction set; skip the test where it, or the kernel, is not there."""
    kernel = native()
    if kernel is None:
        pytest.skip("the compiled kernel was not built")
    before = kernel.target(None)
    try:
        kernel.target(instructions)
    except ValueError:
        pytest.skip("not on this processor")
    yield
    kernel.target(before)


def available() -> list[str]:
    """Return the instruction sets that this processor and this build have, to go through in one test."""
    kernel = native()
    found = []
    for instructions in SETS if kernel is not None else ():
        before = kernel.target(None)
        try:
            kernel.target(instructions)
        except ValueError:
            continue
        kernel.target(before)
        found.append(instructions)
    return found


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with compiled_for(request.param):
        yield request.param
