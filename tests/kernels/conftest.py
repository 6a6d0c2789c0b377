"""Every instruction set that this processor has, one after the other."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from trueup.kernels import native

SETS = ["neon"] if platform.machine() in ("aarch64", "arm64") else ["plain", "avx2", "avx512"]


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    kernel = native()
    if kernel is None:
        pytest.skip("the compiled kernel was not built")
    before = kernel.target(None)
    try:
        kernel.target(request.param)
    except ValueError:
        pytest.skip("not on this processor")
    yield request.param
    kernel.target(before)
