"""What runs are set to: recorded from objects, compared, and named as the cause of what differs."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trueup
from trueup.comparison.result.causes import with_causes
from trueup.foundation.model import Finding, SlotComparison
from trueup.foundation.settings import differing

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
        "1 of 10 parameters with a gradient is in no optimizer",
    )
    assert found.exit_code == 1


def test_required_values(baseline: Path, tmp_path: Path) -> None:
    file = tmp_path / "required.toml"
    file.write_text('[optimizer]\n"AdamW.lr" = 0.01\n[module]\n"LayerNorm.eps" = 1e-6\n"1.drop.p" = 0.1\n[seed]\ntorch = 1\n')
    found = trueup.preflight(None, baseline, require=file)
    assert found.broken == ("module LayerNorm.eps must be 1e-06, and is 1e-05 in 2 places", "seed torch must be 1, and is 0")
    assert found.exit_code == 1
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
    assert mistyped.returncode == 2
    assert "no capture and no command" in mistyped.stderr


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
