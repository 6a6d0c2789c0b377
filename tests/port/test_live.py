"""`port --run` and `assess`: a training for CUDA as it is, on another device, and on one that computes shapes alone."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trueup.doors.cli import main
from trueup.doors.report.saving import write_patch
from trueup.migration.assess.support import has_kernel, support
from trueup.migration.port.running import Place, Ran, patch
from trueup.simdev.shapes import _forms

pytestmark = pytest.mark.usefixtures("autoloaded", "warm")

BARE = """\
import torch
from torch.cuda.amp import GradScaler, autocast

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
device = torch.device("cuda:0")
scaler = GradScaler()
for step in range(3):
    batch = torch.randn(4 + step, 4, device="cuda")
    wanted = torch.zeros(4 + step, dtype=torch.long).to(device, non_blocking=True)
    with autocast():
        loss = torch.nn.functional.cross_entropy(model(batch), wanted)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    kept = batch[batch > 0]
    far = torch.nn.functional.huber_loss(batch, torch.zeros_like(batch))
    assert batch.device == device and isinstance(device, torch.device)
torch.cuda.synchronize()
print("last", loss.item(), far.item())
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "bare.py").write_text(BARE)
    monkeypatch.chdir(tmp_path)
    return "bare.py"


def saved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_training_for_cuda_runs_as_it_is(bare: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--simulated", "--json", "all.json", "--to", "npu", "--patch", "it.patch"]
    assert main(["port", "--run", *options, "--", sys.executable, bare]) == 0
    said = capfd.readouterr()
    assert "last " in said.out
    assert "6 places in 1 file asked for CUDA and went to the device." in said.out
    assert said.err.count("bare.py:4: torch.Tensor.cuda: is .to('npu')") == 1
    found = saved(tmp_path / "all.json")["places"]
    assert {one["line"] for one in found} == {4, 6, 7, 9, 11, 20}
    applied = subprocess.run(["git", "apply", "it.patch"], capture_output=True, text=True)
    assert (applied.returncode, applied.stderr) == (0, "")
    ported = (tmp_path / "bare.py").read_text()
    assert main(["port", "--check", "--to", "npu", bare]) == 0  # nothing is left to change
    assert ".npu()" in ported
    assert len(ported.splitlines()) == len(BARE.splitlines()) + 1  # the import


def test_a_training_that_knows_cuda_alone_is_proved(bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"{shlex.quote(sys.executable)} bare.py"
    assert main(["port", bare, "-o", str(tmp_path / "out"), "--to", "npu", "--prove", command, "--steps", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The port trains the same: 2 steps, " in said
    assert "The original does not run on the CPU" in said


def test_what_a_training_asks_of_a_device(bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.cu").write_text("__global__ void __launch_bounds__(256) scatter_kernel(float* x) {}\n")
    assert main(["assess", "-o", "report", "--json", "all.json", "--cann", "5.0", bare]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "CPU fallback: aten::huber_loss where bare.py:18, " in said
    assert "1. PyTorch makes it of others: torch._decomp.get_decompositions([torch.ops.aten.huber_loss]) 2. run it on" in said
    assert "limit: shapes change; only fixed shapes work where bare.py:9 " in said
    assert "own.cu scatter_kernel" in said
    found = saved(tmp_path / "all.json")
    grades = {one["name"]: one["grade"] for one in found["operators"]}
    assert grades["aten::addmm"] == grades["aten::mm"] == grades["aten::native_batch_norm_backward"] == "kernel"
    assert grades["aten::t"] == "composite"
    assert found["steps"] == 2
    assert found["failed"] is None
    rows = {one["name"]: one for one in found["operators"]}
    assert rows["aten::addmm"]["flops"] == 2 * (4 + 5) * (4 * 8 + 8 * 2)
    assert sum(one["share"] for one in found["operators"]) == pytest.approx(1)
    assert found["memory"] > 4 * (4 * 8 + 8 * 2)
    page = (tmp_path / "report" / "index.html").read_text()
    assert "CPU fallback" in page
    assert "drop_last=True" in page
    fallen = (tmp_path / "report" / "unsupported_api.csv").read_text().splitlines()
    assert fallen[0] == "File,Start Line,End Line,OP,Tips"
    assert any(line.startswith("bare.py,18,18,aten::huber_loss,") for line in fallen)
    assert {place for place, _ in found["dynamic"]} >= {"bare.py:9", "bare.py:17"}
    assert [place for place, _ in found["reads"]] == ["bare.py:15"]


NO_DEVICE = """\
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        state = torch.zeros(1, x.size(1), 8)
        return self.head(self.lstm(x, (state, state))[0])

model = Model()
optimizer = torch.optim.Adam(model.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 5, 4), torch.zeros(8, 3)), 2, shuffle=True)
total = torch.zeros(())
for x, wanted in data:
    made = model(x)[:, -1]
    loss = torch.nn.functional.huber_loss(made, wanted)
    optimizer.zero_grad()
    loss.backward()
    total += loss.detach()
    print(made.detach().numpy().shape, made[0].tolist(), total.item())
    optimizer.step()
"""


def test_a_training_that_names_no_device(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(NO_DEVICE)
    assert main(["assess", "--json", str(tmp_path / "all.json"), "--", sys.executable, str(tmp_path / "bare.py")]) == 1
    found = saved(tmp_path / "all.json")
    assert found["sentence"].endswith("The training names no device: these are its operators as they would run on one.")
    grades = {one["name"]: one["grade"] for one in found["operators"]}
    assert grades["aten::addmm"] == grades["aten::_thnn_fused_lstm_cell_backward_impl"] == "kernel"
    assert grades["aten::huber_loss"] == "CPU fallback"
    assert found["dynamic"] == []
    assert (found["failed"], found["steps"]) == (None, 2)


def test_a_training_that_names_no_device_is_assessed_by_its_calls_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "none.py"
    script.write_text("""\
import torch
weight = torch.randn(4, 2, requires_grad=True)
optimizer = torch.optim.AdamW([weight])
for step in range(9):
    optimizer.zero_grad()
    torch.nn.functional.huber_loss(torch.randn(8, 4) @ weight, torch.zeros(8, 2)).backward()
    optimizer.step()
""")
    assert main(["assess", "--json", "all.json", "none.py"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "puts nothing on a device: these are its calls on the CPU, as the device would get them." in said
    assert "CPU fallback: aten::huber_loss where none.py:6, 2 calls" in said
    assert saved(tmp_path / "all.json")["on_cpu"] is True


def test_a_training_that_ends_early_is_not_assessed_as_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import torch\nx = torch.ones(3, device='cuda') * 2\nraise ValueError('no data')\n")
    assert main(["assess", "--", sys.executable, str(script)]) == 2
    assert "The run ended early: ValueError: no data." in " ".join(capsys.readouterr().out.split())
    script.write_text("import sys\n")
    assert main(["assess", "--", sys.executable, str(script)]) == 2
    assert "no import of torch" in capsys.readouterr().err
    assert main(["assess", "--", str(tmp_path / "none")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["assess", "training.ipynb"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operator", "version", "wanted"),
    [
        ("aten::gelu", (2, 13), True),  # by gelu.out
        ("aten::add_.Tensor", (2, 13), True),
        ("aten::huber_loss", (2, 13), False),
        ("aten::no_such_operator", (2, 13), False),
        ("aten::add.Tensor", (99, 0), True),
        ("aten::add.Tensor", (1, 8), False),
        ("aten::softplus_backward", (2, 13), True),  # by softplus_backward.grad_input
        ("aten::glu_backward_jvp", (2, 13), False),
    ],
)
def test_which_operators_have_a_kernel(operator: str, version: tuple[int, ...], wanted: bool) -> None:
    assert has_kernel(operator, version, _forms(operator)) == wanted


def test_the_table_says_where_it_is_from() -> None:
    for source in support().source:
        assert len(source.commit.split(" of ")[0]) == 40
        assert source.paths


def test_a_patch_is_of_the_bytes_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    old = "# coding: latin-1\r\n# \xe9 \f\r\nimport torch\r\nx = torch.ones(2).cuda()".encode("latin-1")
    script.write_bytes(old)
    ran = Ran(0, (Place(str(script), 4, "torch.Tensor.cuda", "is .to('npu')"),))
    write_patch(patch(ran, "npu"), tmp_path / "it.patch")
    applied = subprocess.run(["git", "apply", "it.patch"], capture_output=True, text=True)
    assert applied.stderr == ""
    assert script.read_bytes() == old.replace(b"cuda", b"npu").replace(b"import torch\r\n", b"import torch\r\nimport torch_npu\r\n")
