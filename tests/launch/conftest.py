"""One complete capture, for the tests that compare with it or break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import script, trueup_run


@pytest.fixture(scope="session")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "complete"
    run = trueup_run("capture", "-o", out, "--detail", "tensor", "--", *script("train.py"))
    assert run.returncode == 0, run.stderr
    return out
