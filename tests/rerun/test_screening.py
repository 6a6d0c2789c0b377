"""Several models on one device: operators as one list, what is wrong in which, and the policy that moves them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from trueup import simdev
from trueup.analysis.rerun.replay import Settings, names_of, screen
from trueup.analysis.rerun.replay import run as replay
from trueup.doors.cli import main
from trueup.recording.execution.judging import Outcome, Replay
from trueup.recording.policy_file import parse


def recorded(into: Path, activation: nn.Module) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.LayerNorm(16))
    with trueup.capture(into, model=model, detail="tensor", level=["api", "aten"], on_error="stop"):
        model(torch.randn(4, 8)).square().mean().backward()
    return into


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("screening")
    return {"smooth": recorded(folder / "smooth", nn.GELU()), "sharp": recorded(folder / "sharp", nn.ReLU())}


def test_an_operator_that_is_wrong_in_one_model_is_told_from_those_that_are_right(models: dict[str, Path]) -> None:
    with simdev.inject("gelu-tanh-for-erf"):
        found = {name: replay(Settings(str(path), "npu", simulated=True), processes=0) for name, path in models.items()}
    result = screen(found)
    assert (result.exit_code, [one.op for one in result.wrong]) == (1, ["torch.nn.functional.gelu"])
    assert "wrong, in 1 of 2 models: torch.nn.functional.gelu (smooth); sharp does not use it." in result.sentence
    (rule,) = parse(result.policy, "p.toml").rules
    assert (rule.op, rule.device, rule.phase) == ("torch.nn.functional.gelu", "cpu", None)
    by_name = {(one.level, one.op): one for one in result.operators}
    assert by_name["aten", "aten::gelu"].wrong == ("smooth",)
    assert by_name["api", "torch.nn.functional.layer_norm"].accurate == ("smooth", "sharp")
    healthy = screen({"sharp": found["sharp"]})
    assert (healthy.exit_code, healthy.policy, healthy.sentence) == (0, "", "npu computes no operator of 1 model wrong.")


@pytest.mark.usefixtures("warm")
def test_replay_of_several_captures(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEUP_SIMDEV_FAULT", "gelu-tanh-for-erf")
    out, saved = tmp_path / "out", tmp_path / "screening.json"
    given = ["--device", "npu", "--simulated", "--calls", "*gelu", "--calls", "*relu", "--level", "api"]
    assert main(["replay", *map(str, models.values()), *given, "-o", str(out), "--json", str(saved)]) == 1
    said = json.loads(saved.read_text("utf-8"))
    assert (said["schema"], said["verdict"], list(said["models"])) == ("trueup-screening", "wrong", ["smooth", "sharp"])
    assert [one["op"] for one in said["operators"]] == ["torch.nn.functional.gelu", "torch.nn.functional.relu"]
    assert (out / "policy.toml").read_text("utf-8") == said["policy"]
    assert {path.parent.name for path in out.glob("*/replay.json")} == {"smooth", "sharp"}


CALL = Outcome(0, 0, 1, "api", "forward", "", "paddle._C_ops.softmax", "", 0, "float16 [4]", "wrong", "it is off", excess=9.0)


def test_the_black_list_of_paddle_s_devices_and_the_phases_of_rules() -> None:
    calls = [
        CALL, replace(CALL, phase="backward"), replace(CALL, op="paddle._C_ops.pad3d", phase="backward"),
        replace(CALL, op="paddle._C_ops.adam_", phase="optimizer"), replace(CALL, op="paddle._C_ops.relu", verdict="accurate"),
    ]  # fmt: skip
    result = screen({"ocr": Replay("ocr", "npu", "float64", calls), "det": Replay("det", "npu", "float64", [])})
    assert result.black_list == "softmax,softmax_grad,pad3d_grad"
    rules = parse(result.policy, "p.toml").rules
    assert [(rule.op, rule.phase, rule.dtype) for rule in rules] == [
        ("paddle._C_ops.softmax", None, "float32"),
        ("paddle._C_ops.pad3d", "backward", "float32"),
        ("paddle._C_ops.adam_", "optimizer", "float32"),
    ]
    assert result.sentence.endswith("; det could not be judged."), "a model of which nothing is known is never right"
    unjudged = replace(CALL, verdict="could not tell")
    open_ = screen({"ocr": Replay("ocr", "npu", "float64", [unjudged]), "det": Replay("det", "npu", "float64", [unjudged])})
    assert (open_.exit_code, open_.sentence) == (2, "Could not tell; ocr, det could not be judged.")


def test_what_only_operators_of_level_aten_show_is_wrong_and_no_rule_reaches_it() -> None:
    call = replace(CALL, level="aten", op="aten::gelu")
    calls = {"a": call, "b": replace(call, verdict="accurate")}
    result = screen({name: Replay(name, "npu", "float64", [one]) for name, one in calls.items()})
    assert (result.exit_code, [one.op for one in result.wrong], result.policy) == (1, ["aten::gelu"], "")
    assert "aten::gelu (a); b uses it and is right" in result.sentence


def test_names_of_models_are_folders_unless_two_are_alike() -> None:
    assert names_of([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert names_of([Path("one/npu"), Path("two/npu")]) == ["one/npu", "two/npu"]
