"""What runs are set to: recorded from objects, compared, and named as the cause of what differs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import random
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trueup
from trueup.analysis.audit.preflight import Draw, FirstStep, _left_out, beginnings, came_along, first_step, odd, worth_a_look
from trueup.comparison.result.causes import Seen, place, with_causes
from trueup.comparison.result.reaching import is_set_otherwise
from trueup.doors.cli.app import run as run_command_line
from trueup.foundation.facts.why import Why
from trueup.foundation.model import CallKey, Finding, SlotComparison
from trueup.foundation.settings import differing, seeds_of
from trueup.foundation.store import Capture
from trueup.foundation.words.setup_sentence import settings_text
from trueup.recording.adapters.torch.buffers import in_host_memory
from trueup.recording.engine.environment import code
from trueup.recording.engine.settings import Delivered, arguments

SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr={lr})
for _ in range(3):
    net(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Block(nn.Module):
    def __init__(self, eps: float, p: float) -> None:
        super().__init__()
        self.norm, self.lin, self.drop = nn.LayerNorm(8, eps=eps), nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.lin(self.norm(x))))


def train(
    path: Path, *, lr: float = 1e-2, eps: float = 1e-5, p: float = 0.1, order: int = 0, gamma: float = 1.0, bare: bool = False,
    idle: bool = False,
) -> Path:  # fmt: skip
    torch.manual_seed(0)
    net = nn.Sequential(Block(eps, p), Block(eps, p), nn.Linear(8, 3))
    inputs = torch.randn(24, 8)
    trained = list(net.parameters())[: -1 if bare else None]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma)
    batches = DataLoader(inputs, 6, shuffle=True, generator=torch.Generator().manual_seed(order))  # type: ignore[arg-type]
    if idle:
        net[1].drop.eval()
    with trueup.capture(path, model=net, on_error="stop"):
        for batch in batches:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return path


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Arguments and loaders are read from all objects alive: those that other tests of this process left are not of these runs."""
    gc.collect()
    alive = gc.get_objects
    kinds = {"Namespace", "TrainingArguments", "DataLoader"}
    foreign = {id(one): one for one in alive() if not kinds.isdisjoint(base.__name__ for base in type(one).__mro__)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_objects", lambda: [one for one in alive() if id(one) not in foreign])
        yield


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("preflight") / "baseline")


def test_equal_settings_are_clear_and_no_verdict_speaks_of_them(baseline: Path, tmp_path: Path) -> None:
    again = train(tmp_path / "again")
    found = trueup.preflight(baseline, again)
    assert (found.verdict, found.exit_code, found.changes) == ("clear", 0, ())
    result = trueup.compare(baseline, again)
    assert result.verdict == "aligned"
    assert "set differently" not in result.sentence


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"lr": 1.1e-2}, "AdamW lr: 0.01 in the baseline, 0.011 in the candidate"),
    ({"eps": 1e-3}, "eps of 2 LayerNorms (0.norm, 1.norm): 1e-05 in the baseline, 0.001 in the candidate"),
    ({"p": 0.3}, "p of 2 Dropouts (0.drop, 1.drop): 0.1 in the baseline, 0.3 in the candidate"),
    ({"order": 7}, "DataLoader seed: 0 in the baseline, 7 in the candidate"),
    ({"gamma": 0.5}, "AdamW lr: 0.01 in the baseline, 0.005 in the candidate (from step 2)"),
]


@pytest.mark.parametrize(("changed", "said"), CHANGED, ids=[next(iter(changed)) for changed, _ in CHANGED])
def test_the_setting_stands_in_the_first_line_and_nothing_beside_it(
    baseline: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    candidate = train(tmp_path / "candidate", **changed)
    found = trueup.preflight(baseline, candidate)
    assert found.exit_code == 1
    assert found.sentence == said
    assert len(found.changes) == 1
    result = trueup.compare(baseline, candidate)
    assert result.verdict == "deviates"
    cause = f"batches in another order from step 0: {said}" if "order" in changed else said
    assert result.sentence.splitlines()[0] == f"DEVIATES  {cause}"
    assert len(result.culprits) == 1
    assert result.culprits[0].cause == cause


def test_two_settings_are_both_named(baseline: Path, tmp_path: Path) -> None:
    result = trueup.compare(baseline, train(tmp_path / "candidate", lr=1.1e-2, eps=1e-3))
    assert [culprit.cause.split(":")[0] for culprit in result.culprits] == ["eps of 2 LayerNorms (0.norm, 1.norm)", "AdamW lr"]
    assert "AdamW lr: 0.01 in the baseline" in result.sentence


def test_a_call_with_an_error_of_its_own_is_not_explained_by_a_setting(baseline: Path, tmp_path: Path) -> None:
    manifests = [dict(trueup.open_capture(path).ranks[0]) for path in (baseline, train(tmp_path / "candidate", lr=1.1e-2))]
    own = Finding("operator", 0, 0, "optimizer", "api", "", "torch.Tensor.addcdiv_", 0, None, "", "elementwise", 0.0, 1.0)
    given = dataclasses.replace(own, kind="argument")
    kept, unshown = with_causes([own, given, given], manifests[0], manifests[1])
    assert [finding.cause != "" for finding in kept] == [False, True]
    assert kept[1].alike == 1
    assert unshown == []
    kept, unshown = with_causes([own], manifests[0], manifests[1])
    assert [one.name for one in unshown] == ["lr"]


def test_a_run_by_itself(tmp_path: Path) -> None:
    found = trueup.preflight(None, train(tmp_path / "odd", bare=True, idle=True))
    assert found.odd == (
        "1 module evaluates while others train, the first: 1.drop (Dropout)",
        "1 of 10 parameters with a gradient is in no optimizer: 2.bias",
    )
    assert found.exit_code == 1


def test_a_frozen_parameter_in_an_optimizer_hides_none_that_is_left_out() -> None:
    modules = {
        "0": {"weight.dtype": "float32", "weight.requires_grad": False}, "1": {"weight.dtype": "float32", "bias.dtype": "float32"},
    }  # fmt: skip
    held = {"class": "SGD", "groups": [{"parameters": 2}], "parameters": [["0.weight", "1.weight"]]}
    said = "1 of 2 parameters with a gradient is in no optimizer: 1.bias"
    assert list(_left_out({"settings": {"modules": modules, "optimizers": [held]}})) == [said]
    for names in ([["1.weight", "1.bias"]], [["another", "names"]], []):
        assert list(_left_out({"settings": {"modules": modules, "optimizers": [held | {"parameters": names}]}})) == []


def test_a_seed_set_again_after_the_capture_began_is_the_one(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with torch.random.fork_rng(), trueup.capture(tmp_path / "run") as capture:
        torch.manual_seed(41)
        weight.sum().backward()
        torch.manual_seed(42)
        optimizer.step()
        capture.step()
    assert seeds_of(trueup.open_capture(tmp_path / "run").ranks[0])["torch"] == 42


def test_required_values(baseline: Path, tmp_path: Path) -> None:
    file = tmp_path / "required.toml"
    file.write_text('[optimizer]\n"AdamW.lr" = 0.01\n[module]\n"LayerNorm.eps" = 1e-6\n"1.drop.p" = 0.1\n[seed]\ntorch = 1\n')
    found = trueup.preflight(None, baseline, require=file)
    assert found.broken == ("module LayerNorm.eps must be 1e-06, and is 1e-05 in 2 places", "seed torch must be 1, and is 0")
    assert found.exit_code == 1
    file.write_text('[optimizer]\nAdamW.lr = 0.01\n[module]\nLayerNorm.eps = 1e-5\n"1.norm.bias" = true\n')  # dots not quoted
    found = trueup.preflight(None, baseline, require=file)
    assert (found.broken, found.held) == ((), 3)
    assert found.sentence.startswith("3 required values hold; ")
    file.write_text("[optimiser]\nlr = 1\n")
    with pytest.raises(trueup.TrueupError, match="'optimiser' is unknown"):
        trueup.preflight(None, baseline, require=file)


def test_manifests_that_anybody_may_have_written() -> None:
    odd: list[Any] = [None, 3, [], [3], {"modules": [1]}, {"modules": {"a": 3}}]
    odd.append({"optimizers": [{"groups": 1, "changes": [[1, 2]]}]})
    optimizers = [{"class": "SGD", "groups": [{"lr": 1}]}]
    sound = {"settings": {"modules": {"a": {"eps": 1}}, "optimizers": optimizers}, "seeds": {"torch": 3}}
    for settings in odd:
        found = differing({"settings": settings, "seeds": {"torch": 1}}, sound)
        assert [one.name for one in found if one.group == "seed"] == ["torch"]
        for unknown in ({}, 3, None):  # as a dump of another tool has it: nothing is known of it, so nothing differs
            assert not [one for one in differing({"seeds": {"torch": 1}}, {"seeds": unknown}) if one.group == "seed"]


def test_a_run_that_does_not_say_what_it_was_set_to_is_not_clear(baseline: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    subprocess.run(["cp", "-r", baseline, silent], check=True)
    manifest = silent / "rank-00000" / "manifest.json"
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != "settings"}))
    found = trueup.preflight(None, silent)
    assert found.exit_code == 2
    assert "does not say what it was set to" in found.sentence


def test_arguments_are_read_without_their_secrets(tmp_path: Path) -> None:
    told = argparse.Namespace(rate_told=0.1, api_key="sk-0123456789abcdef", told_data=torch.ones(3), _told_private=1)
    other = argparse.Namespace(rate_told=0.1, steps_told=2)
    third = argparse.Namespace(steps_told=1)
    recorded = trueup.open_capture(train(tmp_path / "run")).ranks[0]["settings"]["arguments"]
    assert recorded["rate_told"] == told.rate_told == other.rate_told
    assert recorded["steps_told"] == sorted([other.steps_told, third.steps_told])
    assert recorded["api_key"] == "***"
    assert not {"told_data", "_told_private"} & recorded.keys()


def test_an_attribute_that_raises_ends_no_capture(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        @property
        def param_groups(self) -> Any:
            if sys._getframe(1).f_code.co_name == "optimizer_facts":
                raise RuntimeError("no")
            return self._groups

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self._groups = groups

    net = nn.Linear(2, 1)
    optimizer = Odd(net.parameters(), lr=0.1)
    with trueup.capture(tmp_path / "run", model=net):
        for _ in range(2):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    manifest = trueup.open_capture(tmp_path / "run").ranks[0]
    assert manifest["status"] == "complete"
    assert "what Odd is set to could not be read: RuntimeError" in manifest["notes"]


@pytest.mark.usefixtures("warm")
def test_a_command_in_place_of_a_capture(tmp_path: Path) -> None:
    for lr in ("0.1", "0.2"):
        (tmp_path / f"train_{lr}.py").write_text(SCRIPT.format(lr=lr))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trueup", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("capture", "-o", "base", "--steps", "0", "--", sys.executable, "train_0.1.py").returncode == 0
    found = run("preflight", "base", "--json", "found.json", "--", sys.executable, "train_0.2.py")
    assert found.returncode == 1, found.stderr
    assert found.stdout.startswith("DIFFERS  SGD lr: 0.1 in the baseline, 0.2 in the candidate")
    assert json.loads((tmp_path / "found.json").read_text())["settings"][0]["name"] == "lr"
    assert run("preflight", "base", "--", sys.executable, "train_0.1.py").returncode == 0
    mistyped = run("preflight", "bsae")
    assert mistyped.returncode == 64
    assert "no capture and no command" in mistyped.stderr


ACCUMULATES = """
import sys
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    for _ in range(2):
        x = torch.ones(3, 4) + {noise}
        loss = net(x).square().mean(){share}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("warm")
def test_the_first_step_of_a_command_and_its_page(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which loss is divided, and which line draws first what the baseline does not draw; no folder that is gone is named."""
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text(ACCUMULATES.format(noise=0, share=" / 2"))
    other.write_text(ACCUMULATES.format(noise="torch.rand(3, 4)", share=""))
    with trueup.capture(tmp_path / "base", on_error="stop"):
        exec(compile(script.read_text(), str(script), "exec"), {})
    words = ["preflight", str(tmp_path / "base"), "--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "found.json")]
    assert run_command_line([*words, "--", sys.executable, str(other)]) == 1
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["candidate"] == shlex.join([sys.executable, str(other)])
    rows = {one["name"]: (one["baseline"], one["candidate"]) for one in document["settings"] if one["group"] in ("data", "random")}
    assert rows["loss is scaled"] == ("divided by 2", "not set")
    first = rows["first draw that differs"]
    assert first[0].startswith("aten::bernoulli_ (3, 2) in 1")
    assert first[1] == "aten::rand (3, 4), other.py:9"
    assert document["looks"] == [
        "the model runs forward 2 times in a step, and no loss is divided by 2: gradients are added up, and not averaged"
    ]
    page = (tmp_path / "page.html").read_text()
    assert "DIFFERS" in page
    assert "first draw that differs" in page
    assert "trueup-preflight-" not in page + "".join(capfd.readouterr())


def test_settings_of_two_frameworks_are_not_compared_by_name(baseline: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", baseline, other], check=True)
    manifest = other / "rank-00000" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"framework": "paddle", "seeds": {"paddle": 0}}))
    found = trueup.preflight(baseline, other)
    assert (found.settings, found.exit_code) == ((), 2)
    assert "trueup align" in found.sentence


def test_what_a_script_was_told_explains_a_call_that_was_given_it() -> None:
    def side(norm: float, other: float = 0.5) -> dict[str, Any]:
        return {"settings": {"arguments": {"max_grad_norm": norm, "other": other}}}

    slot = SlotComparison("arguments", "deviates", float("nan"), "value", ("", ""), ("", ""), '{"1": 1.0}', '{"1": 0.1}')
    clip = Finding("argument", 0, 0, "optimizer", "api", "", "torch.Tensor.__rtruediv__", 0, None, "", slots=(slot,))
    kept, unshown = with_causes([clip], side(1.0), side(0.1))
    assert kept[0].cause == "max_grad_norm: 1.0 in the baseline, 0.1 in the candidate"
    assert unshown == []
    kept, unshown = with_causes([clip], side(1.0), side(0.2))  # other values: said, and not as the cause
    assert (kept[0].cause, [one.name for one in unshown]) == ("", ["max_grad_norm"])
    kept, unshown = with_causes([clip], side(1.0, 1.0), side(0.1, 0.1))  # which of the two it was nobody knows
    assert (kept[0].cause, len(unshown)) == ("", 2)


def test_a_decay_that_was_taken_from_biases_explains_the_updates_in_other_operators() -> None:
    def side(*groups: dict[str, Any]) -> dict[str, Any]:
        return {"settings": {"optimizers": [{"class": "AdamW", "groups": list(groups), "changes": []}]}}

    sides = side({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}), side({"lr": 0.1, "weight_decay": 0.1})
    update = Finding("operator", 0, 0, "optimizer", "module", "head", "optimizer.step", 0, None, "", "update", 0.0, 1.0)
    kept, unshown = with_causes([update], *sides)
    assert kept[0].cause == "AdamW weight_decay: [0.1, 0.0] in the baseline, [0.1] in the candidate"
    assert unshown == []


def test_an_optimizer_that_one_run_alone_has_is_said() -> None:
    def side(*kinds: str) -> dict[str, Any]:
        return {"settings": {"optimizers": [{"class": kind, "groups": [{"lr": 0.1}], "changes": []} for kind in kinds]}}

    (found,) = differing(side("AdamW", "SGD"), side("AdamW"))
    assert (found.name, found.baseline, found.candidate, found.severity) == ("optimizers", "AdamW, SGD", "AdamW", "changes")
    assert differing(side("AdamW"), side()) == []  # it may have ended before it stepped: the calls tell


def test_what_clips_what_schedules_and_who_seeds_is_recorded_and_left_as_it_was(tmp_path: Path) -> None:
    net, seeded = nn.Linear(4, 2), (random.seed, torch.nn.utils.clip_grad._clip_grads_with_norm_)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, halved)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with trueup.capture(tmp_path / "run", model=net, on_error="stop"):
        random.seed(44)
        net(torch.ones(3, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=1.0)
        optimizer.step()
        schedule.step()
    assert (random.seed, torch.nn.utils.clip_grad._clip_grads_with_norm_) == seeded
    held = trueup.open_capture(tmp_path / "run").ranks[0]["settings"]
    (recorded,) = held["optimizers"]
    assert (recorded["clipping"], recorded["schedule"]) == ("1-norm at 0.5", "LambdaLR (halved)")
    assert recorded["parameters"] == [["weight", "bias"]]
    assert held["seeds"] == {"python": 44, "torch": torch.initial_seed()}
    assert [one["init_scale"] for one in held["scalers"] if one["init_scale"] == scaler.get_scale()] == [8.0]
    assert not [name for module in held["modules"].values() for name in module if name.endswith("address")]


def halved(step: int) -> float:
    return 0.5**step


def side(**more: Any) -> dict[str, Any]:
    group = {"lr": 0.1, "parameters": 2}
    settings = {"form": 2, "optimizers": [{"class": "SGD", "groups": [group], "changes": []}]}
    return {"devices": ["cuda:0"], "world_size": 1, "seeds": {"torch": 0}, "settings": settings | more}


def test_a_parameter_that_another_one_took_the_place_of_is_named() -> None:
    def holding(*names: str) -> dict[str, Any]:
        return side(optimizers=[{"class": "SGD", "groups": [{"parameters": len(names)}], "parameters": [list(names)]}])

    (found,) = differing(holding("a", "b", "c"), holding("a", "d"))
    assert (found.name, found.baseline, found.candidate) == ("parameters", "3, with b, c", "2, with d")


def test_parameters_that_moved_to_another_group_are_named_by_what_they_are_updated_with() -> None:
    def holding(decays: list[float], *groups: list[str], **more: Any) -> dict[str, Any]:
        held = [{"lr": 0.1, "weight_decay": one, "parameters": len(names)} for one, names in zip(decays, groups, strict=True)]
        return side(optimizers=[{"class": "SGD", "groups": held, "changes": [], "parameters": list(groups), **more}])

    apart = holding([0.1, 0.0], ["a.weight", "b.weight"], ["a.bias", "b.bias"])
    said = "SGD weight_decay of 2 parameters (a.bias, b.bias): 0.0 in the baseline, 0.1 in the candidate"
    assert settings_text(differing(apart, holding([0.1], ["a.weight", "b.weight", "a.bias", "b.bias"]))) == said
    assert settings_text(differing(apart, holding([0.1, 0.0], ["a.weight", "b.weight", "a.bias", "b.bias"], []))) == said
    assert differing(apart, holding([0.0, 0.1], ["a.bias", "b.bias"], ["a.weight", "b.weight"])) == []  # in another order
    one = holding([0.1, 0.0], ["a.weight", "b.weight", "b.bias"], ["a.bias"], changes=[[1, 1, {"weight_decay": 0.2}]])
    assert [(s.places, s.baseline, s.candidate, s.step) for s in differing(apart, one)] == [
        (("a.bias",), 0.0, 0.2, 1), (("b.bias",), 0.0, 0.1, None)
    ]  # fmt: skip
    assert "of a.bias: 0.0" in settings_text(differing(apart, one))


def test_what_a_setting_explains_is_no_rounding() -> None:
    def holding(**group: Any) -> dict[str, Any]:
        return side(optimizers=[{"class": group.pop("kind", "SGD"), "groups": [group], "changes": []}])

    update = Finding("operator", 0, 0, "optimizer", "module", "", "optimizer.step", 0, None, "", "update", 0.0, 1e-5)
    assert is_set_otherwise(update, holding(lr=0.1), holding(lr=0.2))
    assert not is_set_otherwise(update, holding(lr=0.1), holding(lr=0.1))
    assert not is_set_otherwise(update, holding(foreach=True), holding(foreach=False))  # which rounds in another order
    assert not is_set_otherwise(update, holding(lr=0.1), holding(lr=0.1, kind="MySGD"))  # may be the same
    assert not is_set_otherwise(dataclasses.replace(update, phase="forward", op="aten::mm"), holding(lr=0.1), holding(lr=0.2))


def test_autocast_is_a_setting_of_the_model_that_runs_under_it(tmp_path: Path) -> None:
    def train(name: str, *, casts: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        with trueup.capture(tmp_path / name, model=net, on_error="stop") as capture:
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = net(torch.ones(3, 4)).square().mean()
            loss.backward()
            capture.step()
        return trueup.open_capture(tmp_path / name).ranks[0]

    said = "autocast of the model (Linear): not set in the baseline, bfloat16 in the candidate"
    sides = [train(name, casts=casts) for name, casts in (("plain", False), ("cast", True))]
    assert settings_text(differing(*sides)) == said
    result = trueup.compare(tmp_path / "plain", tmp_path / "cast")
    assert f"the candidate computes in bfloat16: 2 of 2 products, float32 in the baseline; {said}" in result.sentence
    sides[0]["settings"]["form"] = 2  # it was not recorded then
    assert differing(*sides) == []


def test_arguments_of_two_names_are_one() -> None:
    (found,) = differing(side(arguments={"learning_rate": 0.1, "wd": 1}), side(arguments={"optim.lr": 0.2, "weight_decay": 1}))
    assert (found.name, found.baseline, found.candidate) == ("learning_rate", 0.1, 0.2)


class Node:
    """A value of a configuration of OmegaConf 2: ``_val`` of a scalar, ``_content`` of a list or mapping."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def test_configurations_are_read_as_their_libraries_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """OmegaConf 2.4, pytorch-lightning 2.6 (both run once with the packages) and DeepSpeed's own source, by their shapes."""

    def library(module: str, name: str, **held: Any) -> Any:
        kind = type(name, (Node,), {"__module__": module})
        loaded = ModuleType(module)
        setattr(loaded, name, kind)
        monkeypatch.setitem(sys.modules, module, loaded)
        return kind(**held)

    def scalar(value: Any) -> Any:
        return type("AnyNode", (Node,), {"__module__": "omegaconf.nodes"})(_val=value)

    def several(*inner: Any) -> Any:
        return type("ListConfig", (Node,), {"__module__": "omegaconf.listconfig"})(_content=list(inner))

    inner = library("omegaconf.dictconfig", "DictConfig", _content={"p": scalar(0.1)}, _parent="the list")
    betas = several(scalar(0.9), scalar(0.99))
    whole = type(inner)(_content={"lr": scalar(0.1), "betas": betas, "layers": several(inner)}, _parent=None)
    kept = library("pytorch_lightning.core.mixins.hparams_mixin", "HyperparametersMixin", _hparams={"conf": {"width": 4}})
    trainer = library("pytorch_lightning.trainer.trainer", "Trainer", gradient_clip_val=0.5, _loggers=[], fit_loop=object())
    speed = library(
        "deepspeed.runtime.config", "DeepSpeedConfig", _param_dict={"optimizer": {"params": {"lr": 0.3}}}, train_batch_size=8
    )
    found = arguments([whole, inner, kept, trainer, speed])
    assert found == {
        "gradient_clip_val": 0.5, "train_batch_size": 8, "conf.width": 4, "lr": 0.1, "betas": [0.9, 0.99], "layers.0.p": 0.1,
        "optimizer.params.lr": 0.3,
    }  # fmt: skip


def test_what_an_older_capture_does_not_say_is_not_compared() -> None:
    newer = side(seeds={"numpy": 3}, scalers=[{"class": "GradScaler"}])
    assert len(differing(side(), newer)) == 2
    older = side()
    del older["settings"]["form"]
    assert differing(older, newer) == []


@pytest.mark.parametrize(
    ("base", "more", "differ"),
    [
        ({}, {"npu.matmul.allow_hf32": "False"}, 0),  # off, on a device that the other run does not have
        ({}, {"npu.conv.allow_hf32": "True"}, 1),
        ({"npu.conv.allow_hf32": "False"}, {"npu.conv.allow_hf32": "False", "npu.matmul.allow_hf32": "False"}, 1),
        ({}, {"TASK_QUEUE_ENABLE": "False"}, 1),
    ],
)
def test_a_switch_of_a_device_that_one_run_has_is_no_difference_where_it_is_off(
    base: dict[str, str], more: dict[str, str], differ: int
) -> None:
    sides = [{**side(), "environment": {"num_threads": "1", **own}} for own in (base, more)]
    assert len(differing(*sides)) == differ
    assert len(differing(*reversed(sides))) == differ


def test_hyper_parameters_that_came_along_with_a_port_are_named() -> None:
    ported = side(optimizers=[{"class": "SGD", "groups": [{"lr": 0.8, "parameters": 2}], "clipping": "norm at 1"}])
    first, second = side(data=[{"class": "DataLoader", "batch_size": 128}]), ported
    second["settings"]["data"] = [{"class": "DataLoader", "batch_size": 2048}]
    assert came_along(differing(first, second), first, second) == ""  # nothing was moved
    second["world_size"] = 8
    said = came_along(differing(first, second), first, second)
    assert said == (
        "hyper-parameters came along with the port: DataLoader batch_size 128 to 2048 (16 times); SGD lr 0.1 to 0.8 (8 times; in "
        "proportion to the batch it would be 1.6); SGD clipping in the candidate alone (norm at 1)"
    )
    second["settings"]["optimizers"][0] |= {"schedule": "LambdaLR", "groups": [{"lr": 0.008, "parameters": 2}]}
    first["settings"]["arguments"], second["settings"]["arguments"] = {"lr": 0.1}, {"lr": 0.8}
    assert "; lr 0.1 to 0.8 (8 times" in came_along(differing(first, second), first, second)  # not what a warm-up begins with
    del second["settings"]["optimizers"][0]["schedule"], second["settings"]["arguments"]
    second["settings"]["optimizers"][0]["groups"][0]["lr"] = 0.4
    assert "SGD lr 0.1 to 0.4 (4 times, by the root of the batch)" in came_along(differing(first, second), first, second)


def test_first_steps_side_by_side(baseline: Path, tmp_path: Path) -> None:
    begun = first_step(trueup.open_capture(baseline))
    assert (begun.samples, begun.passes, len(begun.weights), len(begun.batches[0])) == (6, 1, 10, 1)
    other = dataclasses.replace(
        begun, weights={**begun.weights, "2.bias": "ffffffff00"}, batches={0: ["ff"]}, samples=12, passes=2,
        draws={level: (Draw("torch.rand", "", "(4)", "train.py:3 in train"), *drawn) for level, drawn in begun.draws.items()},
        factors=(("divided", 2.0),),
    )  # fmt: skip
    names = [(one.name, one.places) for one in beginnings(begun, other)]
    assert names == [
        ("initial weights", ("2.bias",)), ("digest of the first batch", ()), ("samples in a step", ()),
        ("forward passes in a step", ()), ("loss is scaled", ()), ("first draw that differs", ()), ("torch.rand", ()),
    ]  # fmt: skip
    first = next(one for one in beginnings(begun, other) if one.name == "first draw that differs")
    assert first.candidate == "torch.rand (4), train.py:3"
    assert str(first.baseline).startswith(next(iter(begun.draws.values()))[0].text)
    moved = dataclasses.replace(other, draws={**begun.draws, "aten": ()}, devices=frozenset({"cpu", "npu"}))
    assert "first draw that differs" not in {one.name for one in beginnings(begun, moved)}  # a device draws by operators of its own
    known = differing(side(), side(seeds={"numpy": 3}))
    assert next(beginnings(begun, other, known)).name == "samples in a step"  # the rest follows from the seed


def test_ranks_and_devices_by_themselves() -> None:
    half = Counter(float16=3)
    one, two = side(), side()
    one["environment"], one["parallel"] = {"NVIDIA_TF32_OVERRIDE": "1", "NCCL_ALGO": "Ring"}, {"groups": [[0, 1]]}
    two["environment"] = {"NVIDIA_TF32_OVERRIDE": "1", "NCCL_ALGO": "Tree"}
    two["settings"]["seeds"], one["settings"]["seeds"] = {"numpy": 1}, {"numpy": 0}
    ranks = cast(Capture, SimpleNamespace(ranks={0: one, 1: two}))
    step = FirstStep(batches={0: ["same"], 1: ["same"]}, dtypes=half)
    assert list(odd(ranks, step)) == [
        "NVIDIA_TF32_OVERRIDE is 1: float32 products and convolutions are computed of factors that are rounded to 10 bits, "
        "whatever the script asks for",
        "the run computes in float16 without a scaler of the loss: small gradients become 0",
        "ranks differ: NCCL_ALGO: Ring on rank 0, Tree on rank 1",
        "ranks 0 and 1 are given the same batch in the first step, and learn the same twice",
    ]
    drawn = {"class": "DataLoader", "batch_size": 4, "samples": 12, "sampler": "RandomSampler", "batch_sampler": "BatchSampler"}
    one["settings"]["data"], two["settings"]["data"] = [drawn], [drawn]
    (said,) = [text for text in worth_a_look(ranks, FirstStep()) if "shares" in text]
    assert said.startswith("each rank draws from 12 samples by a RandomSampler, which knows no ranks: where these are the whole")
    two["settings"]["data"] = [{**drawn, "sampler": "DistributedSampler"}]
    one["settings"]["data"] = [{"class": "DataLoader", "batch_size": 4, "samples": 14, "drop_last": False}]
    one["settings"]["modules"] = {"head": {"weight.dtype": "float32", "weight.requires_grad": False}}
    assert list(worth_a_look(ranks, step)) == [
        "1 parameter is frozen: head.weight",
        "the last batch of DataLoader has 2 of 4 samples, for drop_last is False",
        "ranks have seeds of their own: seed of numpy: 0 on rank 0, 1 on rank 1; weights that each rank draws differ, unless "
        "they are broadcast",
    ]


def test_the_commit_and_the_files_that_a_script_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import part")
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git" / "refs" / "heads" / "main").write_text("a" * 40)
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = code()
    assert found.pop("commit") == "a" * 40
    assert list(found) == ["train.py"]
    for path in ("part.py", "site-packages/foreign.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("a = 1")
        module = ModuleType(path)
        module.__file__ = str(tmp_path / path)
        monkeypatch.setitem(sys.modules, path, module)
    before = code()
    assert sorted(before) == ["commit", "part.py", "train.py"]
    (tmp_path / "part.py").write_text("a = 22")
    assert {name for name, digest in code().items() if digest != before[name]} == {"part.py"}
    packed = tmp_path / ".git" / "packed-refs"
    (tmp_path / ".git" / "refs" / "heads" / "main").rename(packed)
    packed.write_text("b" * 40 + " refs/heads/main\n")
    assert code()["commit"] == "b" * 40


def test_a_seed_of_the_host_explains_numbers_that_vary_and_no_constant() -> None:
    def multiplied(step: int, first: float, second: float) -> Finding:
        numbers = f'{{"1": {first}}}', f'{{"1": {second}}}'
        slot = SlotComparison("arguments", "deviates", math.nan, "value", ("", ""), ("", ""), *numbers)
        line = "/a/train.py:9 in mixup"
        return Finding("argument", step, 0, "forward", "api", "", "torch.Tensor.mul", 0, line, "", slots=(slot,), stack=(line,))

    sides = side(seeds={"numpy": 43}), side(seeds={"numpy": 7})
    kept, unshown = with_causes([multiplied(0, 0.1, 0.7), multiplied(1, 0.3, 0.2)], *sides)
    assert [one.cause for one in kept] == ["seed of numpy: 43 in the baseline, 7 in the candidate"]
    assert unshown == []
    kept, unshown = with_causes([multiplied(0, 0.1, 0.7), multiplied(1, 0.1, 0.7)], *sides)
    assert [one.name for one in unshown] == ["numpy"]


def test_a_parameter_of_one_run_alone_explains_what_is_drawn_where_it_is_built() -> None:
    def built(**more: Any) -> dict[str, Any]:
        return side(modules={"stem": {"class": "Conv2d", "weight.dtype": "float32", **more}})

    key = CallKey(0, 0, "forward", "aten", "", "aten::uniform_", 0)
    alone = Why.DRAWN_ALONE(key, "candidate", "net.py:76 in __init__")
    draws = Finding("random", 0, 0, "forward", "aten", "", "aten::normal_", 0, None, "", seq=(3, 4))
    seen = Seen({place(draws): alone})
    kept, unshown = with_causes([draws], built(), built(**{"bias.dtype": "float32"}), seen)
    assert kept[0].cause == "bias of stem (Conv2d) is absent in the baseline, trained in the candidate"
    assert unshown == []


def test_samples_that_ranks_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(40.0).reshape(10, 4), torch.arange(10))
    found = {}
    for rank in range(2):
        share = torch.utils.data.DistributedSampler(data, num_replicas=4, rank=rank * 2, shuffle=False)
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with trueup.capture(tmp_path / f"{rank}", detail="digest"):
            with torch.no_grad():  # an evaluation before the first step gives all ranks the same
                assert len(list(DataLoader(data, batch_size=5))) == 2
            for numbers, _ in DataLoader(data, batch_size=3, sampler=share):
                (numbers @ weight).sum().backward()
                optimizer.step()
        found[rank] = dict(trueup.open_capture(tmp_path / f"{rank}").ranks[rank])
    assert "samples" not in {one.name for one in differing(found[0], found[1])}
    ranks = cast(Capture, SimpleNamespace(ranks=found))
    said = [text for text in worth_a_look(ranks, FirstStep()) if "share" in text]  # 10 samples for 4 ranks: 0 and 1 come twice
    assert said == ["ranks 0 and 1 share 1 of the first 3 samples that rank 1 is given (number 1 of those of rank 0)"]
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__.__module__ == "torch.utils.data.dataloader"


def test_a_batch_without_samples_tells_nothing() -> None:
    class Loader:
        def __init__(self, *batches: object) -> None:
            self._batches = iter(batches)

        def __next__(self) -> object:
            return next(self._batches)

    def watched(*batches: object) -> list[str]:
        delivered, loader = Delivered((Loader,), in_host_memory, lambda: True), Loader(*batches)
        with contextlib.suppress(StopIteration):
            while True:
                next(loader)
        return delivered.end()

    rows = torch.arange(6.0).reshape(3, 2)
    assert len(watched({"x": rows, "y": [rows.t().contiguous().t(), "a name"]})) == 3
    assert watched(rows) == watched(rows.t().contiguous().t())
    assert len(watched(rows.to(torch.bfloat16))) == 3
    assert watched((rows, torch.ones(4))) == watched("text") == watched() == []
