"""The tests of the TensorFlow adapter, those of PyTorch against Keras, each in a process of their own; the example's commands.

Importing TensorFlow takes five seconds, so these processes, and what they start, are forked from one that has it.

Run some by hand, in the folder ``cases``: ``python -m pytest check_calls.py -k gradient``, and in that of
``with_torch_and_tensorflow`` with ``USE_TF=0``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.executing import lines_of, wrong
from nursery import nursery
from test_documentation import ROOT

CASES = Path(__file__).parent / "cases"
BESIDE_TORCH = CASES.parents[1] / "with_torch_and_tensorflow/cases"
PAGE = ROOT / "examples/tensorflow_classifier/README.md"
GUILTY = {"gradient": [], "fusion": ["implementation_selector"], "backend": ["compiler backend"]}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """What runs scripts with both frameworks in it already, of a nursery of this file's own."""
    with nursery() as started:
        started.load("tensorflow.compat.v1", "keras", "sklearn.datasets")
        yield started.python


@pytest.mark.parametrize("cases", [CASES, BESIDE_TORCH], ids=lambda path: path.parent.name)
def test_cases(cases: Path, python: str) -> None:
    """Sessions come last: eager execution is off from then on, for good."""
    names = sorted((path.name for path in cases.glob("check_*.py")), key=lambda name: (name.startswith("check_sessions"), name))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= {"COLD": sys.executable, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # no case needs a plugin; they take a second
    command = [python, "-m", "pytest", *names]  # with the pytest.ini beside them
    run = subprocess.run(command, env=environment, cwd=cases, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_commands_of_the_page_work_as_written(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the classifier's page: trainings that are broken in ways that look alike."""
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
        if name == "fusion":
            assert any("(a part of grappler)" in remark for remark in found["remarks"])
            assert found["advice"][0] == "tf.config.optimizer.set_experimental_options({'implementation_selector': False})"
        for said in (found["said"], *found["remarks"]):  # but for what follows from rounding, and where the page's reader is
            assert re.sub(r"\d+", "#", re.split(r"[:;,(]| becomes ", said)[0]).strip() in page
