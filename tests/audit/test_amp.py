"""`trueup check --amp`: a norm in float16 and a loss scale that collapses are found, and healed by the advice."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trueup.analysis.audit.amp import DELICATE, NORM, amp
from trueup.analysis.remedy.healing import first_beside, heal, verify
from trueup.doors.cli import main
from trueup.foundation.facts.anomaly import Anomaly, Place
from trueup.foundation.store import open_capture
from trueup.foundation.store.declared import recorded_uses
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
    high = tmp_path / "high.toml"
    high.write_text(policy.read_text("utf-8").replace(f"init_scale = {said['first_scale']}", "init_scale = 1e9"), "utf-8")
    proved = verify(runs["half"], runs["wide"], command, high, tmp_path / "high", rounds=1)
    assert proved.verdict == "not healed"
    assert proved.sentence.startswith("with the policy the scaler skipped all of 4 steps: ")
    skipped = tmp_path / "high/run-1"
    proved = heal(skipped, command)  # of a run under a policy: its other rule stays, the next scale comes from its gradients
    rules = [rule.rule for rule in recorded_uses(open_capture(proved.runs[0]).ranks.values())]
    assert (proved.verdict, rules) == ("healed", [1, 2])
    assert proved.sentence.startswith("4 of 4 steps are made, and nothing that matters overflows; ")
    for name in ("static", "bfloat16"):
        assert main(["check", "--amp", str(runs["half"]), "--policy", str(policy), "--instead", name]) == 1
        proved = verify(runs["half"], runs["wide"], command, policy, tmp_path / name)
        assert proved.verdict == "healed", name
    assert main(["check", "--amp", str(runs["half"]), "--instead", "none"]) == 64
    assert amp(tmp_path / "bfloat16/run-1").dtype == "bfloat16"
    assert PAGE.count(said["sentence"].replace("; ", ";\n", 1)) == 1

    capsys.readouterr()
    assert main(["check", "--amp", str(runs["half"])]) == 1
    assert "--baselineFLOAT32--policypolicy.toml--COMMAND" in "".join(capsys.readouterr().out.split())
    assert main(["check", "--amp", str(runs["wide"]), "--policy", str(tmp_path / "none.toml")]) == 0
    said = capsys.readouterr().out
    assert "none.tomlwasnotwritten:thereisnothingtoadvise." in "".join(said.split()), "a long path wraps anywhere"

    assert amp(runs["wide"]).sentence.startswith("mixed precision is off")
    policy.write_text('[[rule]]\nscope = "2"\nop = "torch.nn.functional.linear"\ndtype = "float32"\n', "utf-8")
    other = verify(runs["half"], runs["wide"], command, policy, tmp_path / "other")
    assert (other.verdict, len(other.runs)) == ("healed", 2)
    assert other.sentence.splitlines()[1].startswith("the policy that it began with did not suffice; now: amp GradScaler: ")
    assert "module 1: float32" in other.sentence


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


GATE = """
import sys, torch
from torch import nn

torch.manual_seed(0)
half = sys.argv[1] == "half"
score, norm, head = nn.Linear(8, 1), nn.LayerNorm(8), nn.Linear(8, 1)


class Gate(nn.Module):
    def forward(self, x):
        weight = torch.exp(score(x).half() if torch.is_autocast_enabled("cpu") else score(x))  # without the maximum
        return head(norm((weight / weight.sum(1, keepdim=True) * x).sum(1).to(score(x).dtype)))


gate = Gate()
gate.score, gate.norm, gate.head = score, norm, head
if sys.argv[3] == "inside":
    gate = nn.Sequential(gate)
with torch.no_grad():
    score.bias.fill_(float(sys.argv[2]))
optimizer = torch.optim.SGD(gate.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=half)
for _ in range(3):
    x = torch.randn(16, 3, 8)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=half):
        out = gate(x)
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_an_exponential_in_float16_beside_a_norm_with_wide_weights(tmp_path: Path) -> None:
    script, policy = tmp_path / "train.py", tmp_path / "policy.toml"
    script.write_text(GATE, "utf-8")
    for name in ("half inside", "wide inside", "half outside"):
        kind, where = name.split()
        assert launch.run({"directory": str(tmp_path / name)}, [sys.executable, str(script), kind, "12", where]) == 0
    found = amp(tmp_path / "half inside")
    assert [one.what for one in found.advice] == ["0 has to stay wide", "the loss scale collapsed"]
    policy.write_text(found.policy, "utf-8")
    command = [sys.executable, str(script), "half", "12", "inside"]
    proved = verify(tmp_path / "half inside", tmp_path / "wide inside", command, policy, tmp_path / "healed")
    assert proved.sentence.startswith("the loss is within 0.0")
    outside = amp(tmp_path / "half outside")  # in the forward of the whole model, which no scope names
    assert [one.what for one in outside.advice] == ["aten::exp has to stay wide", "the loss scale collapsed"]


def test_what_the_float32_run_does_as_well_is_not_held_against_a_policy() -> None:
    place = Place(0, 1, 7, "backward", "api", "mix", "torch.Tensor.div", 0)
    vanishes = Anomaly("vanishes", place, "low", "the norm of grad_input.0 is 1.43e-18")
    made = Anomaly("overflow", replace(place, phase="forward"), "critical", "it made Inf")
    assert first_beside([vanishes], [replace(vanishes, place=replace(place, step=2, seq=9))]) is None
    assert first_beside([vanishes, made], [vanishes]) is made
    assert first_beside([vanishes], [made]) is vanishes


def test_names_that_autocast_keeps_wide() -> None:
    wide = ("nn.functional.layer_norm", "Tensor.pow", "nn.functional.softmax", "exp", "linalg.vector_norm")
    assert all(DELICATE.search(f"torch.{name}") for name in wide)
    assert not any(DELICATE.search(name) for name in ("torch.nn.functional.linear", "torch.Tensor.expand", "torch.Tensor.normal_"))
    assert NORM.search("LlamaRMSNorm")
    assert not NORM.search("Normalize")
