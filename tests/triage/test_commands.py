"""`trueup triage -- COMMAND` as a user types it: a wrong fused operator is named; commands that do not train are said."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from end_to_end.executing import lines_of
from launch.running import TRUEUP, cli, environment
from test_documentation import ROOT
from trueup.recording.recorder import launch

TRAIN = """
import os, torch
from torch import nn
torch.manual_seed(0)
fused = os.environ.get("OUR_FUSED_GELU", "1") == "1"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        y = self.wide(x)
        return self.narrow(y * torch.sigmoid(1.702 * y) if fused else nn.functional.gelu(y))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    loss = model(torch.randn(32, 8)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    print("loss", loss.item(), flush=True)
"""
SWITCHES = """
[[switch]]
name = "our fused GELU"
framework = "torch"
what = "the kernel of our extension"
environment = { OUR_FUSED_GELU = "0" }
origin = "README of the extension"
"""


@pytest.mark.usefixtures("warm")
def test_a_fused_operator_of_a_users_own_is_named(tmp_path: Path) -> None:
    """By a table of switches, in a run of its own for each question; the whole way, from the command line to the report: by the
    commands of docs/triage.md, as they are written there."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "own.toml").write_text(SWITCHES)
    settings = '[tool.trueup.triage]\noutput = "out"\nsteps = 1\nswitches = "own.toml"\n[tool.trueup.capture]\nstop = true\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    good, again = (
        subprocess.run(  # six runs: on a loaded machine they take their time
            [*TRUEUP, *shlex.split(line)], cwd=tmp_path, env=environment(COLUMNS="200", PATH=path, **more), capture_output=True,
            text=True, check=False, timeout=400,
        )
        for line, more in zip(lines_of(ROOT / "docs/triage.md"), ({"OUR_FUSED_GELU": "0"}, {}), strict=True)
    )  # fmt: skip
    assert good.returncode == 0, good.stderr
    run = again
    assert run.returncode == 1, run.stdout + run.stderr
    lines = [" ".join(line.split()) for line in run.stdout.splitlines()]
    assert "float anomalies pass no NaN, Inf or saturated value in 1 step" in lines
    assert any(line.startswith("compiler and fusion DEVIATES with our fused GELU off the loss of step 0 becomes") for line in lines)
    assert any(line.startswith("EXPLAINED by compiler and fusion: with our fused GELU off") for line in lines)
    assert "export OUR_FUSED_GELU=0" in lines
    told = json.loads((tmp_path / "out" / "triage.json").read_text())
    assert (told["schema"], told["verdict"], told["exit_code"], told["framework"]) == ("trueup-triage", "explained", 1, "torch")
    _, step, last = told["steps"]
    assert (step["guilty"], last["status"]) == (["our fused GELU"], "not reached")
    assert step["comparison"]["verdict"] == "deviates"
    page = (tmp_path / "out" / "index.html").read_text()
    assert f'href="{step["page"]}/index.html"' in page
    assert (tmp_path / "out" / step["page"] / "index.html").exists()
    assert "loss" in (tmp_path / "out" / "runs" / "01-as-it-is.txt").read_text()
    assert len((tmp_path / "out" / "runs" / "01-as-it-is.txt").read_text().splitlines()) == 1, "a run ends after its steps"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no such file: data.csv')", "it ended with exit code 1: no such file: data.csv ("),
        ("import os; os.abort()", "it was killed by SIGABRT"),
        ("print('done')", "no process of it imported a framework"),
        ("import time; time.sleep(10**6)", "it did not end within 1 s (--timeout) and was ended"),
    ],
)
def test_what_does_not_train_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    seconds = "1" if "1 s" in said else "300"
    exit_code, out, _ = cli(capsys, "triage", "-o", tmp_path / "out", "--timeout", seconds, "--", sys.executable, script)
    assert exit_code == 2
    assert said in " ".join(out.split())
    steps = json.loads((tmp_path / "out" / "triage.json").read_text())["steps"]
    assert [step["status"] for step in steps] == ["could not tell", "not reached", "not reached"]


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli(capsys, "triage")
    assert (code, err.splitlines()[0]) == (64, "trueup: There is nothing to run.")
    (tmp_path / "file").write_text("")
    code, _, err = cli(capsys, "triage", "-o", tmp_path, "--", "python", "train.py")
    assert code == 2
    assert "is not empty" in err
    code, _, err = cli(capsys, "triage", "-o", tmp_path / "out", "--baseline", tmp_path / "none", "--", "python", "train.py")
    assert code == 2
    code, _, err = cli(capsys, "triage", "-o", tmp_path / "out", "--", "no-such-program")
    assert (code, err.splitlines()[0]) == (2, "trueup: The command cannot start; nothing was captured.")


def test_a_late_command_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'child'); time.sleep(1000)"
    (tmp_path / "parent.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], cwd={str(tmp_path)!r})\n"
    )
    from trueup.recording.recorder.options import CaptureOptions

    for seconds in (3.0, 15.0, 60.0):  # until the child has begun: how long that takes is the machine's affair
        code = launch.execute(
            tmp_path / f"run-{seconds}", CaptureOptions.of(), [sys.executable, str(tmp_path / "parent.py")],
            environment=environment(), output=tmp_path / "said.txt", timeout=seconds,
        )  # fmt: skip
        assert code == launch.TIMED_OUT
        if (tmp_path / "child").exists():
            break
    pid = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.05)
