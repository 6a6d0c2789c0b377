"""`port --distributed`: one process becomes several, and their gradients are those of one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ports import free_port
from trueup.doors.cli import main
from trueup.foundation.model import TrueupError
from trueup.migration.port import port, undo
from trueup.migration.port.choosing import Distributor
from trueup.migration.port.proving import Batch, Shown, judged

ONE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(20, 4), torch.randn(20, 2))
device = "cuda:0" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model.to(device)
loader = DataLoader(data, 8, True)
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), y.sum().item())
torch.save(model.state_dict(), "last.pt")
"""
SEVERAL = """\
import torch
import torch_npu
import data_parallel
from torch.utils.data import DataLoader, TensorDataset

data_parallel.start()
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 2))
device = "npu" if torch.npu.is_available() else "cpu"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
model.to(device)
model = data_parallel.wrap(model)
loader = data_parallel.share(DataLoader(data, 8, True))
for epoch in range(2):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, data_parallel.mean(loss).item(), y.sum().item())
data_parallel.save(model.state_dict(), "last.pt")
"""
FUNCTIONS = """\
import torch
from torch import nn, optim
from torch.utils.data import DataLoader


def train(model, train_loader, optimizer):
    for x in train_loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()


def optimizer_of(net):
    return optim.Adam([p for p in net.parameters() if p.requires_grad])


def main():
    options = {"batch_size": 4, "shuffle": True}
    train_loader = DataLoader(torch.randn(8, 4), **options)
    net = nn.DataParallel(nn.Linear(4, 2)).cuda()
    test_loader = DataLoader(torch.randn(8, 4))
    train(net, train_loader, optimizer_of(net))


if __name__ == "__main__":
    main()
"""


def written(tmp_path: Path, text: str, **options: str) -> str:
    (tmp_path / "train.py").write_text(text)
    port(tmp_path / "train.py", tmp_path / "out", to="npu", distributed="train.py", **options)  # type: ignore[arg-type]
    return (tmp_path / "out" / "train.py").read_text()


def test_one_process_becomes_several(tmp_path: Path) -> None:
    assert written(tmp_path, ONE, also=["specify-device"]) == SEVERAL  # each process has a device of its own
    assert undo(tmp_path / "out")[1] == ()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.py"]


def test_a_model_goes_through_functions(tmp_path: Path) -> None:
    lines = written(tmp_path, FUNCTIONS).splitlines()
    assert "    train_loader = data_parallel.share(DataLoader(torch.randn(8, 4), **options))" in lines
    assert "    test_loader = DataLoader(torch.randn(8, 4))" in lines
    assert lines.index("    net = data_parallel.wrap(net)") == lines.index("    train(net, train_loader, optimizer_of(net))") - 1
    assert lines[-2:] == ["    data_parallel.start()", "    main()"]


def test_what_main_does_not_import_stays(tmp_path: Path) -> None:
    """Beside it may lie another training, which joins a process group and has devices of its own."""
    source = tmp_path / "source"
    (source / "lib").mkdir(parents=True)
    other = "import torch\ntorch.distributed.init_process_group('gloo')\nx = torch.ones(2).to('cuda:1')\n"
    (source / "train.py").write_text(ONE.replace("model = torch.nn.Linear(4, 2)", "from lib import *\nmodel = made()"))
    (source / "lib" / "__init__.py").write_text("from .nets import made\n")
    (source / "lib" / "nets.py").write_text("import torch\ndef made():\n    return torch.nn.Linear(4, 2).cuda(0)\n")
    (source / "other.py").write_text(other)
    result = port(source, tmp_path / "out", to="npu", distributed="train.py")
    new = {one.path: [after for _, _, after in one.lines] for one in result.changed}
    assert new["other.py"] == ["import torch_npu", "x = torch.ones(2).to('npu:1')"]
    assert new["lib/nets.py"][-1] == "    return torch.nn.Linear(4, 2).npu()"
    assert ("other.py", 2, "train.py does not reach this script") in [(one.path, one.line, one.reason) for one in result.seen]
    (source / "lib" / "nets.py").write_text("import torch\nimport other\ndef made():\n    return torch.nn.Linear(4, 2)\n")
    with pytest.raises(TrueupError, match=r"other.py, line 2, joins a process group"):
        port(source, to="npu", distributed="train.py")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (ONE, {"distributed": "other.py"}, "a script of"),
        (f"{ONE}torch.distributed.init_process_group('nccl')\n", {}, "line 19, joins a process group"),
        (ONE.replace("model.parameters()", "weights"), {}, "name the model's variable with --model"),
        (ONE.replace("DataLoader(data, 8, True)", "data"), {}, "split the data by hand"),
    ],
)
def test_what_cannot_be_made_distributed(tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(TrueupError, match=message):
        port(tmp_path / "train.py", tmp_path / "out", **{"distributed": "train.py", **options})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("autoloaded")
def test_the_gradients_of_two_processes_are_those_of_one(tmp_path: Path, warm: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ONE)
    out, said = tmp_path / "out", tmp_path / "all.json"
    words = ["--distributed", "train.py", "--prove", f"{warm} train.py", "--to", "npu", "--steps", "3", "--json", str(said)]
    assert main(["port", str(tmp_path / "train.py"), "-o", str(out), *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The port trains the same: 3 steps, " in printed
    assert "The gradients of 2 processes are those of one: 3 steps, 2 gradients each, " in printed
    assert json.loads(said.read_text())["spread"]["same"] is True


WHOLE: Batch = ((32, "a"), (16, "b"))
PARTS: list[Batch] = [((16, "c"), (8, "d")), ((16, "e"), (8, "f"))]
BATCHES: list[Batch] = [((32, "c"),), ((32, "e"),)]


@pytest.mark.parametrize(
    ("factors", "batches", "layers", "said"),
    [
        ((1.0, 1.0), PARTS, "Linear", "are those of one: 2 steps, 2 gradients each, bitwise"),
        ((1.0, 1.0), [WHOLE, WHOLE], "Linear", "Each process computes the whole batch: nothing shares the data"),
        ((1.3, 1.3), BATCHES, "Linear", "Each process reads a batch as large as that of one: together 2 times as much"),
        ((1.3, 0.7), PARTS, "BatchNorm1d", "The processes do not agree on them: nothing takes their mean"),
        ((0.5, 0.5), PARTS, "BatchNorm1d", "each is 0.5 times that of one: the loss is a sum over the batch"),
        ((2.0, 2.0), PARTS, "Linear", "each is 2 times that of one: they are added over the processes"),
        ((8.0, 8.0), PARTS, "Linear", "each is 8 times that of one: the loss is scaled otherwise"),
        ((None, None), PARTS, "BatchNorm1d", "step 1, rel. L2 1. BatchNorm computes over a process's share"),
        ((None, None), PARTS, "Dropout", "dropout differs by process."),
        ((None, None), PARTS, "SyncBatchNorm", "No BatchNorm or Dropout ran: random data"),
    ],
)
def test_why_gradients_are_not_those_of_one(factors: tuple, batches: list[Batch], layers: str, said: str) -> None:
    """None: each step's gradient of the bias is off by itself, by no factor."""
    one = {(step, 0, name): np.arange(1.0, 5.0) for step in range(2) for name in ("weight", "bias")}

    def off(factor: float | None) -> dict:
        if factor is not None:
            return {key: factor * value for key, value in one.items()}
        return {key: value * (1 + key[0] + (key[2] == "bias") * 0.1 * (1 - key[0])) for key, value in one.items()}

    single = Shown([one], [WHOLE if len(batches[0]) == 2 else ((32, "a"),)], frozenset([layers]))
    found = judged(single, Shown([off(factor) for factor in factors], batches, frozenset([layers])), 2)
    assert said in found.sentence
    assert found.same is ("bitwise" in said)


def test_shares_of_a_batch(tmp_path: Path, warm: str) -> None:
    """Each sample once, a batch that two do not divide filled up, the checkpoint as of one process, one of them printing; started
    by the script that is written, from elsewhere."""
    for name, text in Distributor.files("two.py").items():
        (tmp_path / name).write_text(text)
    (tmp_path / "two.py").write_text(
        "import data_parallel, torch, torch.distributed as dist, sys\n"
        "data_parallel.start()\n"
        "loader = data_parallel.share(torch.utils.data.DataLoader(torch.arange(11), batch_size=4, shuffle=True, num_workers=0))\n"
        "mine = [one.tolist() for one in loader]\n"
        "both = [None, None]\n"
        "dist.all_gather_object(both, mine)\n"
        "model = data_parallel.wrap(torch.nn.Linear(2, 2))\n"
        "assert list(model.state_dict()) == ['weight', 'bias'] and model.in_features == 2 and len(loader) == 3\n"
        "mean = data_parallel.mean(torch.tensor(1.0 * dist.get_rank()))\n"
        "print(sorted(sum(both[0] + both[1], [])), [len(one) for one in both[0]], mean)\n"
        "data_parallel.save(dist.get_rank(), 'rank.pt')\n"
    )
    environment = {**os.environ, "TRUEUP_SIMULATED": "1", "NPUS": "0,1", "MASTER_PORT": str(free_port()), "PYTHON": warm}
    command = ["bash", str(tmp_path / "run_distributed_npu.sh")]
    ran = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    numbers, lengths, mean = ran.stdout.strip().split("] ")[0] + "]", [2, 2, 2], "tensor(0.5000)"
    assert set(json.loads(numbers)) == set(range(11))
    assert ran.stdout.strip().endswith(f"{lengths} {mean}")
    import torch

    assert torch.load(tmp_path / "rank.pt") == 0
