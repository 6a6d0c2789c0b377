"""The tests of the Paddle adapter, in processes of their own: one framework a process.

Run some by hand, in the folder ``cases``: ``python -m pytest check_backward.py -k recurrent``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trueup.simdev.paddle import COMPILERS, ROOT, build, install

FOLDER = Path(__file__).parent
CASES = FOLDER / "cases"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")


LAUNCH = "check_launch.py"
GROUPS = {"in one process": sorted({path.name for path in CASES.glob("check_*.py")} - {LAUNCH}), "launch": [LAUNCH]}


def run(files: list[str], **variables: str) -> None:
    """Run some files of cases in a process of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", **variables}
    command = [sys.executable, "-m", "pytest", *files]  # with the pytest.ini beside them
    ended = subprocess.run(command, env=environment, cwd=CASES, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("group", GROUPS)
def test_cases(group: str) -> None:
    run(GROUPS[group])


def test_cases_on_a_second_device(tmp_path: Path) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler to build the device with")
    build(tmp_path, name="host", devices=2)
    files = sorted(path.name for path in CASES.glob("device_*.py"))
    run(files, CUSTOM_DEVICE_ROOT=str(tmp_path), FLAGS_use_stride_kernel="0")  # strided copies need kernels of the device


def test_a_script_finds_the_simulated_device_by_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trueup simdev run`, and a sentence where the device cannot be built."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler to build the device with")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = (
        "import paddle\npaddle.set_device('npu:1')\nm = paddle.nn.Linear(2, 2)\no = paddle.optimizer.SGD(0.1, m.parameters())\n"
        "m, o = paddle.amp.decorate(m, o, level='O2')\ns = paddle.amp.GradScaler()\n"
        "with paddle.amp.auto_cast(dtype='float16'):\n    loss = m(paddle.ones([1, 2])).mean()\n"
        "s.scale(loss).backward()\ns.step(o)\nprint(m.weight.place, m.weight.dtype)"
    )
    command = [sys.executable, "-m", "trueup", "simdev", "run", "--devices", "2", "--", sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1:] == ["Place(npu:1) paddle.float32"], ended.stderr[-2000:]
    assert ended.stderr.count("mixed precision has no effect on the simulated device") == 1


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(ROOT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    install()
    (finder,) = [one for one in sys.meta_path if type(one).__name__ == "_BeforePaddle"]
    assert finder.find_spec("torch") is None
    assert finder.find_spec("paddle") is None  # type: ignore[func-returns-value]
    assert finder not in sys.meta_path
    assert "trueup: Paddle has no simulated device here: Paddle's simulated device cannot be built." in capsys.readouterr().err
    assert ROOT not in os.environ
