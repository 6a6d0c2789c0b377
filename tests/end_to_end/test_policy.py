"""A fault is found, a policy is suggested for it, and a run with that policy is aligned: a verified fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import trueup
import zoo
from trueup import simdev
from trueup.analysis.remedy import suggest
from trueup.doors.report.document import document


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    simdev.heal()


def recorded(
    model: str, device: str, into: Path, *, steps: int = 1, fault: str | None = None, policy: Path | None = None
) -> Path:  # fmt: skip
    simdev.heal()
    trueup.seed_all(1)
    training = zoo.build(model, device)
    with (
        simdev.inject(fault) if fault else nullcontext(),
        trueup.capture(into, model=training.model, level=("module", "api")) as capture,
        trueup.apply_policy(training.model, policy) if policy else nullcontext(),
    ):
        for _ in range(steps):
            training.step()
            capture.step()
    return into


FAULTS = [
    ("lstm_tagger", "lstm-backward-cell-gate", 1),
    ("bert", "gelu-tanh-for-erf", 1),
    ("gpt2", "matmul-large-k", 1),
    ("resnet", "conv-weight-grad-last-tile", 2),
]
"""With steps: a rule is applied to each call alike, and what it does to weights one row tells."""


@pytest.mark.parametrize(("model", "fault", "steps"), FAULTS)
def test_what_is_suggested_heals_the_run(model: str, fault: str, steps: int, tmp_path: Path) -> None:
    baseline = recorded(model, "cpu", tmp_path / "cpu", steps=steps)
    broken = trueup.compare(baseline, recorded(model, "npu", tmp_path / "npu", steps=steps, fault=fault))
    assert broken.verdict == "deviates"
    assert broken.culprit is not None
    policy = tmp_path / "policy.toml"
    result, rules = broken, ""
    for attempt in range(6):  # a fault of an operator shows in every call of it, perhaps one after the other
        rules += "".join(found for culprit in result.culprits if (found := suggest(culprit)))
        policy.write_text(rules)
        again = recorded(model, "npu", tmp_path / f"run-{attempt}", steps=steps, fault=fault, policy=policy)
        result = trueup.compare(baseline, again)
        if result.verdict != "deviates":
            break
    assert result.verdict == "aligned", result.sentence
    assert result.candidate.policy
    assert any("only the candidate was given a policy" in note for note in result.notes)
    assert document(result)["candidate"]["policy"] == list(result.candidate.policy)
    assert document(broken)["policy_to_try"]


def test_a_rule_that_matches_nothing_is_said_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rule]]\nscope = "encoder.*"\nop = "torch.tanh"\ndtype = "float64"\n')
    baseline = recorded("gpt2", "cpu", tmp_path / "one")
    result = trueup.compare(baseline, recorded("gpt2", "cpu", tmp_path / "two", policy=policy))
    said = f"{policy}, rule 1 (torch.tanh in encoder.*: float64) changed nothing: no call matched"
    assert result.verdict == "aligned"
    assert result.counts["equal"] == result.counts["compared"]
    assert result.candidate.policy == (said,)
    assert f"trueup: note: {said}" in capsys.readouterr().err


def test_the_capture_sees_what_the_user_gave(tmp_path: Path) -> None:
    """The call as it was meant: half precision in and out, forward and backward, with nothing of the policy at level api."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rule]]\nop = "torch.nn.functional.layer_norm"\ndtype = "float32"\n')
    rows = []
    for given in (None, policy):
        trueup.seed_all(1)
        net = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)).bfloat16()
        into = tmp_path / f"run-{given is not None}"
        with (
            trueup.capture(into, model=net, level=("module", "api")),
            trueup.apply_policy(net, given) if given else nullcontext(),
        ):
            net(torch.randn(4, 8).bfloat16().requires_grad_()).sum().backward()
        table = trueup.open_capture(into).records(["seq", "phase", "level", "scope", "op", "slot", "dtype", "shape", "device"])
        rows.append(sorted(map(str, table.to_pylist())))  # which gradient of a call comes first is autograd's affair
    assert rows[0] == rows[1]
    assert any("layer_norm" in row and "grad_input.0" in row for row in rows[1])
