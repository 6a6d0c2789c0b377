"""Policies suggested for findings."""

from __future__ import annotations

from typing import Any

import pytest

from trueup.analysis.remedy import suggest
from trueup.foundation.model import Finding, SlotComparison, TensorStats
from trueup.recording.policy_file import parse


def finding(dtype: str = "float32", **given: Any) -> Finding:
    stats = TensorStats(8, -1, 1, 0, 2, given.pop("nan", 0), 0, 0, 0, 0, 0)
    clean = TensorStats(8, -1, 1, 0, 2, 0, 0, 0, 0, 0, 0)
    slot = SlotComparison("output.0", "deviates", 0.1, "tensor", (dtype, dtype), ("[8]", "[8]"), clean, stats)
    facts = {
        "kind": "operator", "step": 0, "rank": 0, "phase": "forward", "level": "api", "scope": "neck.lstm", "op": "torch.lstm",
        "ordinal": 0, "source": None, "sentence": "", "error_out": 1.0, "expected": 0.1, "slots": (slot,),
    }  # fmt: skip
    return Finding(**(facts | given))


@pytest.mark.parametrize(("given", "change"), [
    ({}, (None, "cpu")),
    ({"dtype": "bfloat16", "expected": 0.1}, ("float32", None)),
    ({"dtype": "float16", "expected": 1e-6}, ("float32", "cpu")),
    ({"dtype": "float16", "expected": 1e-6, "nan": 3}, ("float32", None)),
])  # fmt: skip
def test_rounding_asks_for_a_wider_dtype_and_what_is_wrong_for_the_cpu(given: dict[str, Any], change: tuple[Any, Any]) -> None:
    text = suggest(finding(**given))
    assert text is not None
    (rule,) = parse(text, "p").rules
    assert (rule.dtype, rule.device) == change
    assert rule.matcher()("neck.lstm", "torch.lstm")
    assert not rule.matcher()("neck.lstm2", "torch.lstm")


def test_an_operator_is_reached_by_its_function() -> None:
    (rule,) = parse(suggest(finding(level="aten", op="aten::mm", api="torch.mm")) or "", "p").rules
    assert rule.op == "torch.mm"
    assert suggest(finding(level="aten", op="aten::mm", api=None)) is None


def test_modules_optimizers_and_calls_outside_modules() -> None:
    (module,) = parse(suggest(finding(level="module", op="LSTM")) or "", "p").rules
    assert (module.level, module.scope, module.op) == ("module", "neck.lstm", "LSTM")
    (step,) = parse(suggest(finding(phase="optimizer", scope="", op="torch._fused_adamw_")) or "", "p").rules
    assert (step.phase, step.scope) == ("optimizer", None)
    assert suggest(finding(phase="collective")) is None
    assert suggest(finding(kind="input")) is None
    assert suggest(finding(phase="optimizer", level="module", op="optimizer.step")) is None  # no call of a run has this name


def test_nothing_is_moved_to_where_it_ran_nor_where_a_setting_is_the_cause() -> None:
    assert suggest(finding(), on=["cpu"]) is None
    assert suggest(finding(), on=["cpu", "npu:0"]) == suggest(finding())
    assert suggest(finding(dtype="bfloat16"), on=["cpu"])  # a wider dtype is another matter
    assert suggest(finding(cause="AdamW lr: 0.1 in the baseline, 0.2 in the candidate")) is None


@pytest.mark.parametrize("name", ['a*[0]?', 'quo"te', "line\nbreak", "/both/", "\x7f\x1b[2J", "täg"])
def test_a_hostile_name_stays_a_name(name: str) -> None:
    text = suggest(finding(scope=name))
    assert text is not None
    (rule,) = parse(text, "p").rules
    assert rule.matcher()(name, "torch.lstm")
    assert not rule.matcher()(name + "x", "torch.lstm")
    assert not any(c in text for c in "\x1b\x7f")
