"""Each planted overflow is blamed on the call that made it, in forward, backward and optimizer; what is healthy stays silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trueup
from anomalies import planted
from anomalies.planted import ORIGINS
from trueup.foundation.facts.anomaly import OverflowResult
from trueup.recording.policy_file import load

LEVELS = ("api", "aten")


def judged(path: Path, train: Callable[[], None], *levels: str) -> OverflowResult:
    torch.manual_seed(0)
    with trueup.capture(path, level=levels, on_error="stop"):
        train()
    return trueup.overflow(path)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", ORIGINS)
def test_the_origin_is_named(case: str, level: str, tmp_path: Path) -> None:
    result = judged(tmp_path / "run", getattr(planted, case), level)
    first = result.first
    assert first is not None
    kind, scope, phase, step, *ops = ORIGINS[case]
    assert (first.kind, first.place.scope, first.place.phase, first.place.step) == (kind, scope, phase, step), result.sentence
    assert first.place.op == ops[LEVELS.index(level)]
    assert (result.verdict, result.exit_code, first.matters) == ("found", 1, "accuracy-relevant"), result.sentence
    assert [one.sentence for one in result.anomalies[1:] if one.matters != "harmless"] == []
    assert "planted.py" in str(first.place.source)


@pytest.mark.parametrize("case", ["zero_norm", "bad_batch", "exploding_step", "log_of_zero"])
def test_levels_together_name_the_finest_call_and_what_is_around_it(case: str, tmp_path: Path) -> None:
    result = judged(tmp_path / "run", getattr(planted, case), "module", "api", "aten")
    kind, scope, _, step, api, aten = ORIGINS[case]
    first = result.first
    assert first is not None
    assert (first.kind, first.place.scope, first.place.step) == (kind, scope, step), result.sentence
    assert (first.place.op, first.place.api) == (aten, api)
    assert [one.sentence for one in result.anomalies[1:] if one.matters != "harmless"] == []


@pytest.mark.parametrize("case", ["zero_norm", "bad_batch"])
def test_modules_alone_name_the_module(case: str, tmp_path: Path) -> None:
    result = judged(tmp_path / "run", getattr(planted, case), "module")
    assert result.first is not None
    assert (result.first.kind, result.first.place.scope) == ORIGINS[case][:2]
    assert len(result.anomalies) == 1


@pytest.mark.parametrize("case", planted.HEALTHY, ids=lambda case: case.__name__)
def test_healthy_infinities_are_silent(case: Callable[[], None], tmp_path: Path) -> None:
    for level in LEVELS:
        result = judged(tmp_path / level, case, level)
        assert (result.verdict, result.exit_code, result.anomalies) == ("clean", 0, ()), result.sentence
    assert result.expected, "the case holds infinities, or it shows nothing"


def test_a_device_that_saturates(tmp_path: Path) -> None:
    from trueup import simdev

    with simdev.inject("products-saturate-65504"):
        result = judged(tmp_path / "run", planted.saturating, "api", "aten")
    first = result.first
    assert first is not None
    assert (first.kind, first.place.scope, first.place.api) == ("saturated", "1", "torch.nn.functional.linear"), result.sentence
    assert (first.matters, result.exit_code) == ("unknown", 1)
    assert "a saturated number is finite, and wrong by an amount that the capture does not tell" in first.because
    assert 'dtype = "float32"' in first.policy
    healthy = judged(tmp_path / "healthy", planted.saturating, "api", "aten")
    assert healthy.first is not None
    assert (healthy.first.kind, healthy.first.place.scope) == ("overflow", "1")


def test_a_first_scale_that_is_too_large_is_harmless(tmp_path: Path) -> None:
    result = judged(tmp_path / "run", planted.scaled, "api")
    assert (result.verdict, result.exit_code) == ("harmless", 0), result.sentence
    assert result.anomalies
    assert {one.because for one in result.anomalies} == {"a GradScaler saw it in the gradients and skipped the step"}
    assert all(one.transient for one in result.anomalies)
    assert "steps skipped" in str(result.scale_history)


def test_a_forward_that_no_scale_helps(tmp_path: Path) -> None:
    result = judged(tmp_path / "run", planted.skipping, "module", "api")
    first = result.first
    assert first is not None
    assert (first.kind, first.place.scope, first.matters, result.exit_code) == ("overflow", "1", "accuracy-relevant", 1)
    said = "a GradScaler skipped all 3 steps because of it: a lower loss scale changes no forward, so nothing is learned"
    assert first.because == said
    assert 'scope = "1"' in first.policy


def test_a_scale_that_falls_to_one_is_a_finding_with_its_cause(tmp_path: Path) -> None:
    result = judged(tmp_path / "run", planted.collapsing_scale, "api")
    first = result.first
    assert first is not None
    assert (first.kind, result.exit_code) == ("loss_scale", 1)
    assert "the loss scale fell from 4 to 0.25 and skipped 5 of 5 steps; what overflowed:" in first.sentence
    assert "2 (torch.nn.functional.linear)" in first.sentence
    assert 'scope = "2"' in first.policy  # a gradient has the dtype of its tensor: the module goes on in float32


def test_what_led_to_it_and_the_policy(tmp_path: Path) -> None:
    result = judged(tmp_path / "run", planted.attention_without_scaling, "api")
    first = result.first
    assert first is not None
    assert (first.led[0].place.scope, first.led[0].dtype) == ("1.attention.key", "float16")
    assert 100 < first.led[0].largest < 65504
    (tmp_path / "policy.toml").write_text(first.policy)
    (rule,) = load(tmp_path / "policy.toml").rules
    assert (rule.level, rule.scope, rule.dtype, rule.returns) == ("module", "1.attention", "float32", "float32")
    assert (first.matters, first.run_next) == ("accuracy-relevant", "")


@pytest.mark.parametrize(("dtype", "op"), [("fp16", "torch.Tensor.mul"), ("fp8_e4m3", "torch.Tensor.mul"), ("bf16", None)])
def test_would_overflow(dtype: str, op: str | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with trueup.capture(tmp_path / "run", level="api"):
        planted.wide()
    assert trueup.overflow(tmp_path / "run").verdict == "clean"
    result = trueup.overflow(tmp_path / "run", would_overflow=dtype)
    over = [one for one in result.anomalies if one.kind == "would_overflow"]
    if op is None:
        assert (over, result.exit_code) == ([], 0)
        return
    assert (over[0].place.op, over[0].place.scope, result.exit_code) == (op, "1", 1), result.sentence
    assert "masked_fill" not in " ".join(one.place.op for one in over), "a mask of -1e9 becomes -Inf, as it is meant to"
    assert 'dtype = "float32"' in over[0].policy
