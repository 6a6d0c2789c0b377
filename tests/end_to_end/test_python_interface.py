"""The Python interface, in a program as the documentation writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trueup

PROGRAM = """
import sys
import torch
import trueup

def run(path, scale):
    trueup.seed_all(1234)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [torch.randn(3, 4) for _ in range(3)]
    with trueup.capture(path, model=model, level=("module", "api", "aten"), detail="stats",
                        steps=range(0, 3), ranks=None, include=None, exclude=None) as cap:
        for batch in loader:
            loss = torch.mul(model(batch), scale).square().mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            cap.step()

run("runs/cpu", 1.0)
run("runs/same", 1.0)
run("runs/npu", 1.5)
assert trueup.compare("runs/cpu", "runs/same").verdict == "aligned"
result = trueup.compare("runs/cpu", "runs/npu")
assert result.verdict == "deviates"
culprit = result.culprit
assert culprit is result.culprits[0]
print(culprit.step, culprit.rank, culprit.phase, culprit.level, culprit.op, culprit.ordinal, culprit.kind)
print(culprit.source)
assert culprit.error_in < 1e-6 and culprit.rule and culprit.expected >= 0 and culprit.slots and culprit.scope == ""
assert result.victims and not result.unmatched and isinstance(list(result.notes), list)
print(sorted(path.name for path in result.save("report/").iterdir()))
with trueup.capture("runs/none", steps=[7]) as cap:
    torch.ones(3) + 1
try:
    trueup.capture("runs/cpu").__enter__()
except trueup.TrueupError as error:
    print(error)
"""

NO_COMPILER = "ignore:trueup's compiled statistics kernel is missing:RuntimeWarning"


@pytest.mark.usefixtures("warm")
def test_the_program_of_the_documentation(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(filter(None, [str(Path(trueup.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": NO_COMPILER}
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    first, source, files, refusal = run.stdout.splitlines()
    assert first == "0 0 forward api torch.mul 0 argument"
    assert source.endswith("program.py:14 in run")
    assert files == "['calls.parquet', 'index.html', 'verdict.json']"
    assert refusal == "runs/cpu already holds a capture: nothing was recorded; choose another -o or remove it"
    assert run.stderr == (
        "trueup: nothing was captured into runs/none: steps 7 selected nothing: "
        "the run ended no step (no optimizer made one), so all it did was step 0\n"
    )
