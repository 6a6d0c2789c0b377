"""`trueup check --amp`: a norm in float16 and a loss scale that collapses are found, and healed by the advice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trueup.analysis.audit.amp import DELICATE, NORM, amp
from trueup.analysis.remedy.healing import verify
from trueup.doors.cli import main
from trueup.recording.recorder import launch

PAGE = (Path(__file__).parents[2] / "docs/check.md").read_text("utf-8")
pytestmark = pytest.mark.usefixtures("warm")

TRAIN = """
import sys
import torch
from torch import nn

class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

torch.manual_seed(0)
half, size = sys.argv[1] == "half", float(sys.argv[2])
net = nn.Sequential(nn.Linear(8, 32), Norm(), nn.Linear(32, 1))
with torch.no_grad():
    net[0].weight.mul_(size)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=half)
for _ in range(4):
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=half):
        out = net(x)
    scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_norm_in_float16_and_the_scale_that_it_makes_collapse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN, "utf-8")
    runs = {name: tmp_path / name for name in ("half", "wide")}
    for name, run in runs.items():
        assert launch.run({"directory": str(run)}, [sys.executable, str(script), name, "2000"]) == 0
    capsys.readouterr()
    policy, saved = tmp_path / "policy.toml", tmp_path / "amp.json"
    assert main(["check", "--amp", str(runs["half"]), "--policy", str(policy), "--json", str(saved)]) == 1
    said = json.loads(saved.read_text("utf-8"))
    assert said["sentence"] == (
        "mixed precision is on: O1 in float16; 1 module has to stay wide: 1; the loss scale collapsed; "
        "loss scale 65,536 to 8,192, 4 of 4 steps skipped"
    )
    assert (said["state"], [one["kind"] for one in said["modules"] if one["products"]]) == ("O1", ["O1", "O1"])
    assert [skipped for _, _, skipped in said["scale"]] == [True] * 4
    assert 1 < said["first_scale"] < 65536

    command = [sys.executable, str(script), "half", "2000"]
    assert main(["heal", str(runs["half"]), "--baseline", str(runs["wide"]), "--policy", str(policy), "--", *command]) == 0
    assert "HEALED  the loss is within 0." in capsys.readouterr().out
    healed = amp(tmp_path / "half-healed/run-1")
    assert (healed.exit_code, [skipped for _, _, skipped in healed.scale]) == (0, [False] * 4)  # 65,536 was too much
    assert {scale for _, scale, _ in healed.scale} == {said["first_scale"]}
    for name in ("static", "bfloat16"):
        assert main(["check", "--amp", str(runs["half"]), "--policy", str(policy), "--instead", name]) == 1
        proved = verify(runs["half"], runs["wide"], command, policy, tmp_path / name)
        assert proved.verdict == "healed", name
    assert main(["check", "--amp", str(runs["half"]), "--instead", "none"]) == 64
    assert amp(tmp_path / "bfloat16/run-1").dtype == "bfloat16"
    assert PAGE.count(said["sentence"].replace("; ", ";\n", 1)) == 1

    assert amp(runs["wide"]).sentence.startswith("mixed precision is off")
    policy.write_text('[[rule]]\nscope = "2"\nop = "torch.nn.functional.linear"\ndtype = "float32"\n', "utf-8")
    other = verify(runs["half"], runs["wide"], command, policy, tmp_path / "other")
    assert other.verdict == "not healed"


O2 = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)).half()
if WIDE:
    net[1].float()
    net[1].register_forward_pre_hook(lambda _, given: (given[0].float(),))
    net[1].register_forward_hook(lambda _, given, made: made.half())
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.randn(16, 8).half()).float().square().mean().backward()
    optimizer.step()
"""


def test_all_in_float16_without_a_loss_scale(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    states = {}
    for wide in (False, True):
        script.write_text(O2.replace("WIDE", str(wide)), "utf-8")
        run = tmp_path / f"run-{wide}"
        assert launch.run({"directory": str(run)}, [sys.executable, str(script)]) == 0
        states[wide] = amp(run)
    throughout, o2 = states[False], states[True]
    assert throughout.sentence == (
        "mixed precision is on: narrow throughout in float16; 1 module has to stay wide: 1; a loss scale is missing"
    )
    assert "computes in float16, which autocast keeps in float32" in throughout.advice[0].why
    assert "scope = \"1\"" in throughout.policy
    assert (o2.state, [one.what for one in o2.advice]) == ("O2", ["a loss scale is missing"])
    by_hand = O2.replace("WIDE", "True").replace(".mean().backward()", ".mean().mul(128.0).backward()")
    script.write_text(by_hand.replace("optimizer.step()", "[one.grad.div_(128.0) for one in net.parameters()]; optimizer.step()"))
    assert launch.run({"directory": str(tmp_path / "scaled")}, [sys.executable, str(script)]) == 0
    scaled = amp(tmp_path / "scaled")
    said = "O2 in float16; loss scale 128, by which the training multiplies its loss itself; nothing is wrong with it"
    assert (scaled.exit_code, scaled.sentence) == (0, f"mixed precision is on: {said}")


def test_names_that_autocast_keeps_wide() -> None:
    wide = ("nn.functional.layer_norm", "Tensor.pow", "nn.functional.softmax", "exp", "linalg.vector_norm")
    assert all(DELICATE.search(f"torch.{name}") for name in wide)
    assert not any(DELICATE.search(name) for name in ("torch.nn.functional.linear", "torch.Tensor.expand", "torch.Tensor.normal_"))
    assert NORM.search("LlamaRMSNorm")
    assert not NORM.search("Normalize")
