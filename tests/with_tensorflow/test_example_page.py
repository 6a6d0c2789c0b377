"""The commands of the classifier's page, as they are written there: trainings that are broken in ways that look alike."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.executing import lines_of, wrong
from nursery import nursery
from test_documentation import ROOT

PAGE = ROOT / "examples/tensorflow_classifier/README.md"
GUILTY = {"gradient": [], "fusion": ["implementation_selector"], "backend": ["compiler backend"]}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")


@pytest.fixture
def python() -> Iterator[str]:
    """What runs scripts with both frameworks in it already, of a nursery of this file's own."""
    with nursery() as started:
        started.load("tensorflow.compat.v1", "sklearn.datasets")
        yield started.python


def test_commands_of_the_page_work_as_written(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(python).parent), prepend=":")
    monkeypatch.setattr("sys.executable", python)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    capture, *triages = lines_of(PAGE)
    assert wrong(capture, capsys, (0,)) == ""
    assert [wrong(line, capsys, (1,)) for line in triages] == [""] * len(GUILTY)
    page = re.sub(r"\d+", "#", " ".join(PAGE.read_text("utf-8").split()))
    for name, guilty in GUILTY.items():
        steps = json.loads(Path("runs", name, "triage.json").read_text("utf-8"))["steps"]
        found = next(one for one in steps if one["status"] == "DEVIATES")
        assert found["guilty"] == guilty
        for said in (found["said"], *found["remarks"]):  # but for what follows from rounding, and where the page's reader is
            assert re.sub(r"\d+", "#", re.split(r"[:;,(]| becomes ", said)[0]).strip() in page
