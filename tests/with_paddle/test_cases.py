"""The tests of the Paddle adapter and those of PyTorch against Paddle, in processes of their own.

These processes, and what they start, are forked from one that has Paddle, but for those that look for a device when they import it.

Run some by hand, in the folder ``cases`` here or of ``with_torch_and_paddle``: ``python -m pytest check_backward.py -k recurrent``.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm_python
from end_to_end.executing import lines_of
from launch.running import environment
from nursery import nursery
from test_documentation import ROOT as PROJECT
from trueup.simdev.paddle import COMPILERS, ROOT, build, install

FOLDER = Path(__file__).parent
CASES = FOLDER / "cases"
BESIDE_TORCH = FOLDER.with_name("with_torch_and_paddle") / "cases"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="paddlepaddle is not installed")


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """What runs scripts with Paddle in it already, of a nursery of this file's own."""
    with nursery() as started:
        started.load("paddle")
        yield started.python


def run(python: str, cases: Path, kind: str = "check") -> None:
    """Run the files of cases of a kind in a process of their own."""
    told = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", "COLD": sys.executable}
    told["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no case needs one, and they take a second to import
    command = [python, "-m", "pytest", *sorted(path.name for path in cases.glob(f"{kind}_*.py"))]  # with the pytest.ini beside them
    ended = subprocess.run(command, env=told, cwd=cases, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("cases", [CASES, BESIDE_TORCH], ids=lambda path: path.parent.name)
def test_cases(cases: Path, python: str) -> None:
    run(python, cases)


SERVES = """
import os, socket, sys
import paddle, pytest, trueup.doors.cli.app, warm_python

given = os.environ["PYTHONPATH"].split(os.pathsep)
order = warm_python.serve(socket.socket(fileno=int(sys.argv[1])))
warm_python.run(order, [path for path in sys.path if path and path not in given])
"""
"""A process that has found the second device, of which the others are forked: a nursery began without it."""


def test_cases_on_a_second_device(tmp_path: Path) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler to build the device with")
    build(tmp_path, name="host", devices=2)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="warm-") as folder:
        patch.setenv("CUSTOM_DEVICE_ROOT", str(tmp_path))
        patch.setenv("FLAGS_use_stride_kernel", "0")  # strided copies need kernels of the device
        python, listening = warm_python.write(Path(folder)), warm_python.listen(Path(folder))
        command = [sys.executable, "-c", SERVES, str(listening.fileno())]
        paths = os.pathsep.join([str(FOLDER.parent), environment()["PYTHONPATH"]])
        with subprocess.Popen(command, pass_fds=[listening.fileno()], env=environment(PYTHONPATH=paths)) as server:
            listening.close()
            try:
                run(str(python), CASES, "device")
            finally:
                server.kill()


PROJECT_OF_A_USER = """
import argparse
import paddle

parser = argparse.ArgumentParser()
parser.add_argument("-c")
parser.add_argument("-o", default="")
configured = parser.parse_args().o
if configured == "Global.use_npu=True":
    paddle.set_device("npu")
paddle.seed(0)
m = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Hardswish(), paddle.nn.Linear(8, 2))
o = paddle.optimizer.SGD(0.1, m.parameters())
s = paddle.amp.GradScaler(enable=bool(configured))
if configured:
    m, o = paddle.amp.decorate(m, o, level="O2")
for _ in range(3):
    with paddle.amp.auto_cast(enable=bool(configured), dtype="float16"):
        loss = m(paddle.rand([3, 4])).mean()
    s.scale(loss).backward()
    s.step(o)
    o.clear_grad()
    print("loss", float(loss), flush=True)
print(m[0].weight.place, m[0].weight.dtype, flush=True)
"""


def test_commands_of_the_page_on_the_simulated_device(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/paddle.md, as they are written there, on a project like PaddleDetection's, whose script finds the device by its
    import; the last two, which need a device with kernels of its own, are executed in cases/device_replay.py."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler to build the device with")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/train.py").write_text(PROJECT_OF_A_USER)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "pyproject.toml").write_text("[tool.trueup.capture]\nstop = true\n")  # when the last of its steps is recorded
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2"}

    def said(line: str, python: str = python, **more: str) -> tuple[str, str]:
        command, path = [python, "-m", "trueup", *shlex.split(line)], f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(command, env=environment | {"PATH": path} | more, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, f"{line}\n{ended.stdout[-1000:]}{ended.stderr[-2000:]}"
        return ended.stdout, ended.stderr

    cpu, launched, compared, simulated, tensors, verified, replayed, *others = lines_of(PROJECT / "docs/paddle.md")
    assert [line.split()[0] for line in others] == ["replay", "reproduce"]
    assert "over 3 steps into" in said(cpu)[1]
    cold = sys.executable  # Paddle looks for devices when it is imported
    assert "over 3 steps into" in said(launched, cold, TRUEUP_SIMULATED="1")[1]
    assert said(compared)[0].startswith("ALIGNED")
    told = "".join(said(simulated, cold))
    assert "Place(npu:0) paddle.float32" in told, told[-3000:]
    assert "Place(npu:1) paddle.float32" in (tmp_path / "log/workerlog.1").read_text()
    assert told.count("mixed precision has no effect on the simulated device") == 1
    shutil.rmtree(tmp_path / "runs/npu")  # the page begins anew
    out, told = said(tensors)
    assert (out.count("loss"), "over 1 step into" in told) == (1, True), "the second step did not run"
    assert said(verified)[0].startswith("REPRODUCED")
    assert "accurate" in said(replayed)[0]


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
