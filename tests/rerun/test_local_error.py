"""The judgement of one output against a float64 truth, beside the baseline's own error."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.foundation.facts import operators
from trueup.foundation.facts.slots import UNIT_ROUNDOFF
from trueup.recording.execution.local_error import Distance, Operand, Operation, criterion, judge, rounding, thresholds

TRUTH = np.random.default_rng(0).normal(size=4096)
TANH = Operation("aten::tanh")
CLONE = Operation("aten::clone")


def distance(error: float, truth: np.ndarray = TRUTH, dtype: str = "float64") -> Distance:
    noise = np.random.default_rng(1).normal(size=truth.shape)
    return Distance.of(truth, (truth + error * noise).astype(dtype))


def test_every_row_of_the_criterion_has_a_class() -> None:
    assert thresholds().classes.keys() == {row.name for row in criterion().rows}
    kinds = {row["name"]: set() for row in operators.rounding()["row"]}
    for row in operators.rounding()["row"]:
        kinds[row["name"]].add(row["replay"])
    assert all(len(found) == 1 for found in kinds.values())


def test_an_error_as_large_as_the_baselines_is_accurate() -> None:
    found = judge(TANH, "float32", distance(1.5e-5), distance(1e-5), rounding=1e-7)
    assert found.verdict == "accurate"
    assert found.ratio == pytest.approx(1.5, rel=0.01)


def test_what_rounding_explains_is_accurate_however_lucky_the_baseline() -> None:
    assert judge(TANH, "float32", distance(1e-6), distance(0.0), rounding=2e-6).verdict == "accurate"


def test_suspicious_then_wrong() -> None:
    words = [judge(TANH, "float32", distance(e), distance(1e-7), rounding=1e-6).verdict for e in (9e-7, 2e-6, 2e-5)]
    assert words == ["accurate", "suspicious", "wrong"]


def test_one_wrong_element_of_a_million_is_seen() -> None:
    truth = np.random.default_rng(0).normal(size=1_000_000)
    wrong = truth.copy()
    wrong[77] += 1e-3
    assert judge(TANH, "float32", Distance.of(truth, wrong), Distance.of(truth, truth), rounding=2e-6).verdict == "wrong"


def test_moved_data_may_not_differ_where_the_baselines_does_not() -> None:
    single = TRUTH.astype(np.float32).astype(np.float64)
    target = single.astype(np.float32)
    target[5] = np.nextafter(target[5], np.float32(9))
    found = judge(CLONE, "float32", Distance.of(single, target), Distance.of(single, single), rounding=2.0**-24)
    assert found.verdict == "wrong"


def test_ill_conditioned_where_one_unit_of_the_inputs_moves_as_much() -> None:
    found = judge(TANH, "float32", distance(1e-3), distance(1e-7), rounding=1e-6, perturbed=distance(8e-4))
    assert found.verdict == "ill-conditioned"
    assert "one unit in the last place of the inputs moves the result by 8.0e-04" in found.sentence


def test_nan_that_only_the_target_has_is_wrong_and_one_that_both_have_is_not() -> None:
    with_nan = TRUTH.copy()
    with_nan[3] = np.nan
    sound, broken = Distance.of(TRUTH, TRUTH), Distance.of(TRUTH, with_nan)
    assert judge(TANH, "float32", broken, sound).verdict == "wrong"
    assert judge(TANH, "float32", broken, broken).verdict == "accurate"
    assert Distance.of(with_nan, with_nan).disagreeing == 0


def test_overflow_of_the_dtype_is_legitimate_and_saturation_is_said() -> None:
    truth = np.array([1.0, 1e5, -1e5])
    overflown = np.array([1.0, np.inf, -np.inf], np.float16)
    saturated = np.array([1.0, 65504.0, -65504.0], np.float16)
    assert Distance.of(truth, overflown).disagreeing == 0
    found = judge(TANH, "float16", Distance.of(truth, saturated), Distance.of(truth, overflown))
    assert (found.verdict, found.rule) == ("suspicious", "transcendental: saturation")


def test_a_mask_of_the_largest_number_does_not_drown_the_rest() -> None:
    lowest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    truth = np.array([lowest, 1.0, 2.0])
    found = Distance.of(truth, np.array([lowest, 1.0, 2.5], ml_dtypes.bfloat16))
    assert (found.counted, found.largest, found.disagreeing) == (2, 0.5, 0)


def test_integers_are_the_truths_or_no_worse_than_the_baselines() -> None:
    truth = np.array([3, 1, 4])
    argmax = Operation("aten::argmax")
    sound, off = Distance.of(truth, truth), Distance.of(truth, np.array([3, 1, 5]))
    assert judge(argmax, "int64", sound, sound).verdict == "accurate"
    assert judge(argmax, "int64", off, sound).verdict == "wrong"
    assert judge(argmax, "int64", off, off).verdict == "accurate"
    assert judge(argmax, "int64", off).verdict == "suspicious"


def test_bitwise_the_baselines_result_is_never_blamed() -> None:
    assert judge(TANH, "float32", distance(1.0), distance(1.0), identical=True).verdict == "accurate"


def test_narrow_results_may_have_their_own_rounding_and_little_more() -> None:
    operands = [Operand("input.0", "bfloat16", (64, 512), 181.0), Operand("input.1", "bfloat16", (512, 64), 181.0)]
    output = Operand("output.0", "bfloat16", (64, 64), 1448.0)
    found = rounding(Operation("aten::mm"), operands, [output])["output.0"]
    unit = UNIT_ROUNDOFF["bfloat16"]
    assert 2.4 * unit < found < 2.5 * unit


def test_an_output_of_zeros_has_the_rounding_of_its_terms() -> None:
    inputs = [Operand("input.0", "float32", (100,), 1000.0), Operand("input.1", "float32", (100,), 1000.0)]
    found = rounding(Operation("aten::sub"), inputs, [Operand("output.0", "float32", (100,), 0.0)])["output.0"]
    assert found == pytest.approx(4 * 2.0**-24 * 100)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=50), st.floats(-1e-3, 1e-3))
def test_distance_agrees_with_the_plain_formula(values: list[float], error: float) -> None:
    truth = np.array(values)
    result = truth * (1 + error)
    found = Distance.of(truth, result)
    assert found.counted == truth.size
    assert found.largest == np.abs(result - truth).max()
    assert found.rms == pytest.approx(np.sqrt(np.mean(np.square(result - truth))), rel=1e-12, abs=1e-160)
