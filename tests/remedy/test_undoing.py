"""A cause that a verdict names is set back by a policy: what is left is what the verdict called independent, and no victim."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trueup
from trueup.analysis.remedy.undoing import Kept, by_hand, judge, kept_word, rules_for, undo
from trueup.doors.cli.app import run as run_command_line
from trueup.foundation.model import Finding, Result, TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch.policies import apply_policy
from trueup.recording.policy_file import parse

SCRIPT = """
import torch, sys
from torch import nn
from torch.nn import functional

def train(lr=1e-2, p=0.1, smoothing=0.0, eps=1e-5, beta2=0.999, often=1, seed=0):
    torch.manual_seed(seed)
    norms = [nn.LayerNorm(16, eps=eps) for _ in range(2)]
    net = nn.Sequential(nn.Linear(8, 16), norms[0], nn.GELU(), nn.Dropout(p), nn.Linear(16, 16), norms[1], nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, beta2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(6, 8, generator=data), torch.randint(0, 4, (6,), generator=data)
        functional.cross_entropy(net(x), y, label_smoothing=smoothing).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(often):
            schedule.step()
"""
namespace: dict[str, Any] = {}
exec(compile(SCRIPT, "train.py", "exec"), namespace)


def run(path: Path, policy: str = "", **options: Any) -> Path:
    """Train in this process under capture, and under the rules of a policy."""
    with trueup.capture(path, on_error="stop", level=["module", "api"]):
        handle = apply_policy(None, parse(policy, "policy.toml")) if policy else None
        namespace["train"](**options)
        if handle is not None:
            assert all(use.changed for use in handle.uses())
            handle.remove()
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("undoing") / "base")


PAIRS = {
    "a function's argument, an optimizer's setting": (
        {"lr": 0.011, "smoothing": 0.1}, "set = { label_smoothing = 0.0 }",
        "AdamW lr: 0.01 in the baseline, 0.011 in the candidate",
    ),
    "a module's attribute, a schedule": (
        {"p": 0.2, "often": 2}, "set = { p = 0.1 }",
        "AdamW lr: 0.009000000000000001 in the baseline, 0.008100000000000001 in the candidate (from step 1)",
    ),
    "two layers, half of a tuple": (
        {"eps": 1e-3, "beta2": 0.99}, "set = { eps = 1e-05 }", "AdamW beta2: 0.999 in the baseline, 0.99 in the candidate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_left_is_what_was_called_independent(base: Path, tmp_path: Path, name: str) -> None:
    options, rule, other = PAIRS[name]
    candidate, sides = run(tmp_path / "candidate", **options), [open_capture(base)]
    before = trueup.compare(base, candidate)
    rules, (first,) = "", rules_for(before.culprits[0], *sides, open_capture(candidate))
    assert rule in first[1]
    rules += first[1]
    after = trueup.compare(base, run(tmp_path / "one", rules, **options))
    assert kept_word(before, after, [first[0]]) == Kept((first[0],), gone=True, left=(other,), new=(), lost=())
    assert after.culprits[0].cause == other
    ((_, second),) = rules_for(after.culprits[0], *sides, open_capture(candidate))
    last = trueup.compare(base, run(tmp_path / "both", rules + second, **options))
    assert (last.verdict, last.sentence.count("\n")) == ("aligned", 1)  # beside it, that a policy was given


def test_an_optimizer_and_a_module_are_left_as_they_were() -> None:
    layer = nn.Dropout(0.2)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    text = '[[rule]]\nlevel = "optimizer"\nop = "AdamW"\nset = { lr = [[0, 0.1], [1, 0.2]], momentum = 0.9 }\n'
    text += '[[rule]]\nlevel = "module"\nop = "Dropout"\nset = { p = 0.1 }\n'
    with apply_policy(layer, parse(text, "policy.toml")) as handle:
        layer(torch.ones(3))
        assert layer.p == 0.1
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
    assert (layer.p, optimizer.param_groups[0]["lr"]) == (0.2, 0.5)
    first, second = handle.uses()
    assert (first.matched, first.changed, first.why_not) == (2, 1, "there is none of that name with such a value")
    assert (second.changed, second.change) == (1, "p = 0.1")


def said(*causes: str, notes: str = "") -> Result:
    made = [Finding("argument", 0, 0, "forward", "api", "", "op", n, None, "", cause=cause) for n, cause in enumerate(causes)]
    result = object.__new__(Result)
    for name, value in {"culprits": made, "sentence": "; ".join(causes) + notes, "verdict": "deviates"}.items():
        object.__setattr__(result, name, value)
    return result


def test_a_word_that_is_broken() -> None:
    before = said("lr: 1, 2; eps: 3, 4", "clip", notes="\nnote: also set differently: dropout: 0, 1")
    assert by_hand(before, said("eps: 3, 4", "clip")) == Kept(("lr: 1, 2",), gone=True, left=("eps: 3, 4", "clip"), new=(), lost=())
    kept = by_hand(before, said("eps: 3, 4", "mask"))
    assert (kept.new, kept.lost, kept.holds) == (("mask",), ("clip",), False)
    assert by_hand(before, said("eps: 3, 4", "clip", "dropout: 0, 1")).holds
    assert not by_hand(before, before).gone
    computes = "the candidate computes in bfloat16: {} of 9 products, float32 in the baseline"
    assert by_hand(said("lr: 1, 2", computes.format(8)), said(computes.format(7))).holds
    assert by_hand(said("lr: 1, 2", ""), said("")).holds  # a call without a cause
    kept = by_hand(said("", "clip"), said("clip"))  # the call was mended
    assert (kept.holds, kept.left, len(kept.undone)) == (True, ("clip",), 1)
    assert not by_hand(said("", "clip"), said("", "clip")).gone
    before = said("p: 1, 2", notes="\nnote: besides, gradients are clipped in the candidate only: square, sum")
    changed = "gradients are changed in the candidate only, as by clipping, between backward and optimizer: mul_"
    assert by_hand(before, said(changed)).holds  # that it is clipping is known where more of it is seen
    assert by_hand(said("p: 1, 2", "decay: 1, 0"), said("decay: 1, 0; parameters: 3, 4")).holds  # a part of what was named
    order = "batches in another order from step 0: DataLoader seed: 0, 7"
    assert by_hand(said(order, "clip"), said("clip")).undone == ("DataLoader seed: 0, 7",)


def test_the_command(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/policy.md shows: the training is run again, with the cause set back."""
    script = tmp_path / "train.py"
    script.write_text(f"{SCRIPT}\ntrain(eps=1e-3)\n", encoding="utf-8")
    candidate = run(tmp_path / "candidate", eps=1e-3)
    words = ["heal", str(candidate), "--baseline", str(base)]
    assert run_command_line([*words, "-o", str(tmp_path / "healed"), "--", sys.executable, str(script)]) == 0
    out = capsys.readouterr().out
    assert "HEALED  with 1 cause set back" in out
    assert "set = { eps = 1e-05 }" in out
    assert run_command_line([*words, "--undone", str(base)]) == 0
    assert "set back: eps of 2 LayerNorms (1, 5): 1e-05" in capsys.readouterr().out
    assert run_command_line(["heal", str(candidate), "--undone", str(base)]) == 64
    assert "goes with --baseline, and without a command" in capsys.readouterr().err
    assert undo(base, base, ["true"]).verdict == judge(base, base, base).verdict == "nothing to heal"
    with pytest.raises(TrueupError, match="is not empty"):
        undo(base, candidate, ["true"], tmp_path / "healed")


def test_a_cause_that_no_rule_undoes(base: Path, tmp_path: Path) -> None:
    other = run(tmp_path / "other", seed=7)
    lines = undo(base, other, ["true"], tmp_path / "healed").sentence.splitlines()
    assert lines[0].startswith("no rule of a policy reaches it: ")
    said = "set it back in the script, record that as RUN, and have it judged: "
    assert lines[1] == f"{said}trueup heal {other} --baseline {base} --undone RUN"
    assert not (tmp_path / "healed").exists()
