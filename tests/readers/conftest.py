from __future__ import annotations

import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps that msprobe wrote (`record_msprobe`)."""
    folder = tmp_path_factory.mktemp("msprobe")
    with tarfile.open(Path(__file__).with_name("dumps.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder
