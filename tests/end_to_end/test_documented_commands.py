"""Every command of the pages works as it is written: executed at a desk where a user has a training and captures of it.

The pages of the demo are executed in `test_centernet_flow`; `ELSEWHERE` says who executes the others.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from end_to_end.executing import lines_of, wrong
from nursery import Nursery
from ports import free_port
from readers import writers
from test_documentation import PAGES, ROOT
from trueup.doors.cli.app import run

Said = pytest.CaptureFixture[str]
TRAIN = '''
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu")
parser.add_argument("--eps", type=float, default=EPS)
parser.add_argument("--large", action="store_true", default=LARGE)
args = parser.parse_args()
if args.device == "npu":
    from trueup import simdev
    simdev.install()
    simdev.inject("layer-norm-epsilon")

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16, eps=args.eps)

    def forward(self, x):
        return torch.nn.functional.gelu(self.norm(self.inner(x) * 0.1))

torch.manual_seed(0)
model = torch.nn.Sequential()
model.add_module("encoder", Block())
model.add_module("head", torch.nn.Linear(16, 4))
model.to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(2):
    out = model(torch.randn(12, 8).to(args.device))
    if args.large:
        out = out.half() * 60000 * 4
    loss = out.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
'''
CONFIGURED = """
parser.add_argument("-c")
parser.add_argument("-o", default="")
args = parser.parse_args()
args.device = "npu" if args.o == "Global.use_npu=True" else "cpu"
"""
CALL = "encoder.norm/torch.nn.functional.layer_norm#0"
DDP = TRAIN.replace("model.to(args.device)", """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
torch.manual_seed(torch.distributed.get_rank())
""") + "torch.distributed.destroy_process_group()\n"
HERE = (
    "align", "assess", "ci", "cluster", "criteria", "import", "invariants", "looking-around", "monitor", "overflow", "policy",
    "preflight", "replay", "reproduce", "shadow", "shell", "watch",
)  # fmt: skip
FLOW = "tests/end_to_end/test_centernet_flow.py"
ELSEWHERE = {
    "README.md": FLOW, "examples/centernet/README.md": FLOW, "docs/export-metrics.md": FLOW,
    "docs/your-runs.md": FLOW,
    "docs/bisect.md": "tests/bisection/test_commands.py", "docs/frameworks.md": "tests/with_torch_and_paddle/cases/check_map.py",
    "docs/layouts.md": "tests/distributed/test_layouts.py", "docs/triage.md": "tests/triage/test_commands.py",
    "docs/check.md": "tests/audit/test_amp.py", "docs/checkpoint.md": "tests/checkpoint/test_checkpoint.py",
    "docs/curves.md": "tests/curves/test_command.py", "docs/env.md": "tests/knowledge/test_env.py",
    "docs/explain-log.md": "tests/knowledge/test_logs.py", "docs/export.md": "tests/export/test_export.py",
    "docs/tensorflow.md": "tests/with_tensorflow/cases/recording.py",
    "docs/paddle.md": "tests/with_paddle/test_cases.py",
    "examples/tensorflow_classifier/README.md": "tests/with_tensorflow/test_cases.py",
    "examples/text_recogniser/README.md": "tests/examples/test_text_recogniser.py",
    "docs/profile.md": "tests/profile/test_profile.py", "docs/port.md": "tests/port/test_port.py",
}  # fmt: skip
"""Who executes a page's commands, and names it."""
LINES = {
    "reproduce runs/cpu 'transformer.h.1/aten::add#0' -o repro/ --device npu --context --minimise": "a fault of GPT-2; tests/rerun",
    "shell runs/cpu runs/npu": "a prompt, or its lines from a file; tests/shell types there",
}
"""Single lines that are left out."""


@pytest.fixture(scope="module")
def made(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Captures of the training on the CPU, with its tensors, and on a device that computes a layer norm wrong."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", str(Path(nursery.python).parent), prepend=":")
        train(folder)
        tensors = ["--detail", "tensor", "--steps", "0:1"]
        for name, more, given in (("gpu", tensors, []), ("cpu", [], []), ("npu", tensors, ["--device", "npu"])):
            assert run(["capture", "-o", f"runs/{name}", *more, "--", Path(nursery.python).name, "train.py", *given]) == 0
        train(folder, LARGE=True)
        assert run(["capture", "-o", "runs/large", "--", Path(nursery.python).name, "train.py"]) == 0
        yield folder


def train(folder: Path, **said: object) -> None:
    (folder / "train.py").write_text(filled(TRAIN, **said))


def filled(text: str, **said: object) -> str:
    for name, value in {"LARGE": False, "EPS": 1e-5, **said}.items():
        text = text.replace(name, repr(value))
    return text


@pytest.fixture
def desk(made: Path, warm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(warm).parent}", prepend=":")
    monkeypatch.setenv("TRUEUP_SIMULATED", "1")
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "layer-norm-epsilon")
    (tmp_path / "runs").mkdir()
    for capture in (made / "runs").iterdir():
        (tmp_path / "runs" / capture.name).symlink_to(capture)
    train(tmp_path)
    return tmp_path


def prepare(name: str, desk: Path) -> None:
    """Put there what a page takes for granted."""
    if name == "align":  # a project whose configuration says which device, in place of PaddleOCR's; and the same in two scripts
        (desk / "tools").mkdir()
        (desk / "tools/train.py").write_text(filled(TRAIN).replace("args = parser.parse_args()", CONFIGURED))
        Path("config.yaml").touch()
        Path("map.toml").touch()
        for framework, capture in (("torch", "gpu"), ("paddle", "npu")):
            Path(f"train_{framework}.py").write_text(filled(TRAIN))
            Path(f"runs/{framework}").symlink_to(Path("runs", capture).readlink())
    if name == "cluster":
        (desk / "train.py").rename("train_ddp.py").write_text(filled(DDP))
        launcher = f"{sys.executable} -m torch.distributed.run --master-port {free_port()}"
        Path("torchrun").write_text(f'#!/bin/sh\nexec {launcher} "$@"\n')
        Path("torchrun").chmod(0o755)  # in front of the real one: it starts in a tenth of a second
    if name == "criteria":
        page = (ROOT / "docs/criteria.md").read_text("utf-8")
        Path("strict.toml").write_text(page.split("--criterion strict.toml")[1].split("```toml\n")[1].split("```")[0])
    if name == "import":
        for side, fault in (("gpu", 0.0), ("npu", 0.1)):
            writers.padiff(desk / f"dump_{side}", fault=fault)
    if name == "looking-around":
        for side in "ab":
            np.save(f"{side}.npy", np.arange(6.0))
    if name == "monitor":
        (desk / "runs/gpu").unlink()
        assert run(["monitor", "-o", "runs/gpu", "--", "python", "train.py"]) == 0
    if name == "invariants":  # of one step nothing can be said
        (desk / "runs/npu").unlink()
        (desk / "runs/npu").symlink_to((desk / "runs/cpu").readlink())
    if name == "policy":  # the same training, but for one setting
        train(desk, EPS=1e-3)
        (desk / "runs/npu").unlink()
        assert run(["capture", "-o", "runs/npu", "--steps", "0:1", "--", "python", "train.py"]) == 0
    if name in ("overflow", "watch"):
        train(desk, LARGE=True)
    if name == "reproduce":
        assert run(["compare", "runs/gpu", "runs/npu", "-o", "report"]) == 1


@pytest.mark.parametrize("name", HERE)
def test_commands_of_a_page_work_as_written(name: str, desk: Path, capsys: Said) -> None:
    prepare(name, desk)
    failed = []
    lines = [line for line in lines_of(ROOT / f"docs/{name}.md") if line not in LINES]
    for line in lines:
        into = re.search(r" -o (runs/\S+)", line)
        if into is not None and (desk / into[1]).is_symlink():
            (desk / into[1]).unlink()  # this one is the user's own
        failed.append(wrong(line.replace("CALL", CALL), capsys, (0,) if name == "policy" else (0, 1, 3)))  # it is healed
    assert lines, "no command was found"
    assert "\n".join(filter(None, failed)) == ""


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell after cell in this process, as a kernel does: the value of a cell's last line is what it shows."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs/notebook.ipynb").read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "kept without outputs"
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, cell["id"], "exec"), space)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), cell["id"], "eval"), space))
    result = next(one for one in shown if hasattr(one, "_repr_html_"))
    assert "aten::native_layer_norm_backward" in result._repr_html_()
    assert (tmp_path / "report/index.html").is_file()


def test_every_page_with_commands_is_accounted_for() -> None:
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if lines_of(page)}
    here = {f"docs/{name}.md" for name in HERE}
    assert pages == here | set(ELSEWHERE)
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text("utf-8"), f"{test} does not read {page}"
