"""The entry point by which PyTorch finds the simulated device, for a checkout that is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.running import environment


@pytest.fixture
def autoloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as it is installed, also where this tree is not."""
    folder = tmp_path / "installed" / "trueup_autoload-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trueup-autoload\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\ntrueup_simulated = trueup.autoload:autoload\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), environment()["PYTHONPATH"]]))
