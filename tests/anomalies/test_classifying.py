"""The rules, on records made by hand: origins, carriers, healing, saturation, steps in a row, rows in memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import trueup
from trueup.analysis.anomalies import Memory, StepAnomalies, classify
from trueup.foundation.store.schema import table
from verdict.captures import Array, Recording, Slot, normal

INF = np.full((4, 4), math.inf, np.float32)


def rows(recording: Recording, step: int = 0, memory: Memory | None = None) -> StepAnomalies:
    """Judge one step of a recording in memory, without a disk."""
    chosen = [row for row in recording.rows if row["step"] == step]
    found = table(recording.columns(chosen) | {"step": [step] * len(chosen), "rank": [0] * len(chosen)})
    return classify(found, memory)


def fresh(value: float = math.nan, dtype: type = np.float32) -> Array:
    return np.full((4, 4), value, dtype)


def test_two_independent_origins_are_two_findings() -> None:
    recording = Recording()
    x, first, second = normal(4, 4), fresh(), fresh()
    recording.call("aten::log", [x], [first], scope="a")
    recording.call("aten::sqrt", [x], [second], scope="b")
    both = fresh()
    recording.call("aten::add", [first, second], [both], scope="c")
    found = rows(recording)
    assert [(one.kind, one.place.scope) for one in found.anomalies] == [("nan", "a"), ("nan", "b")]
    assert found.anomalies[0].carried == 1


def test_a_computed_infinity_that_is_healed_is_transient() -> None:
    recording = Recording()
    x, large = normal(4, 4), INF.copy()
    recording.call("aten::exp", [x], [large], scope="sigmoid")
    recording.call("aten::reciprocal", [large], [normal(4, 4)], scope="sigmoid")
    (one,) = rows(recording).anomalies
    assert (one.kind, one.transient, one.reached, one.healed_by) == ("overflow", True, (), ("sigmoid/aten::reciprocal",))


def test_looking_for_nan_does_not_heal_it() -> None:
    recording = Recording()
    x, bad = normal(4, 4), fresh()
    recording.call("aten::log", [x], [bad])
    recording.call("aten::isnan", [bad], [np.ones((4, 4), bool)])
    recording.call("aten::zeros_like", [bad], [np.zeros((4, 4), np.float32)])
    (one,) = rows(recording).anomalies
    assert (one.reached, one.transient) == (("unread",), False)


@pytest.mark.parametrize(("dtype", "value"), [(np.float16, 65504), (np.float32, np.finfo(np.float32).max)])
def test_saturation(dtype: type, value: float) -> None:
    recording = Recording()
    x, bad = normal(4, 4, dtype=dtype), fresh(value, dtype)
    recording.call("aten::mm", [x, x], [bad])
    recording.call("aten::layer_norm", [bad], [normal(4, 4, dtype=dtype)])
    (one,) = rows(recording).anomalies
    assert (one.kind, one.severity, one.transient) == ("saturated", "high", False)


def test_the_largest_number_as_a_mask_is_expected() -> None:
    recording = Recording()
    x, mask = normal(4, 4), fresh(np.finfo(np.float32).min)
    masked = np.where(np.tri(4) > 0, x, np.finfo(np.float32).min).astype(np.float32)
    recording.call("aten::full", [], [mask], arguments={"1": float(np.finfo(np.float32).min)})
    recording.call("aten::where", [mask, x], [masked])
    recording.call("aten::_softmax", [masked], [normal(4, 4)])
    found = rows(recording)
    assert (found.anomalies, found.expected) == ((), (("aten::full", 1),))


def test_a_mask_whose_reader_makes_nan_names_the_reader_and_who_asked() -> None:
    recording = Recording()
    x, masked = normal(4, 4), np.full((4, 4), -math.inf, np.float32)
    recording.call("aten::masked_fill", [x], [masked], arguments={"2": "-inf"}, scope="attention")
    recording.call("aten::_softmax", [masked], [fresh()], scope="attention")
    (one,) = rows(recording).anomalies
    assert (one.kind, one.place.op) == ("nan", "aten::_softmax")
    assert one.notes == ("the -Inf that it read were asked for, by attention/aten::masked_fill",)


def test_bad_weights_are_the_doing_of_the_step_before(tmp_path: Path) -> None:
    recording = Recording()
    weight, gradient, after = normal(4, 4), fresh(), fresh()
    recording.call("aten::mm", [normal(4, 4), weight], [normal(4, 4)], scope="layer")
    recording.call("aten::log", [normal(4, 4)], [gradient], phase="backward", scope="layer")
    recording.call("aten::add_", [weight, gradient], [after], phase="optimizer")
    recording.call("aten::mm", [normal(4, 4), after], [fresh()], scope="layer", step=1)
    result = trueup.overflow(recording.write(tmp_path / "run"))
    (one,) = result.anomalies
    assert (one.place.op, one.place.step, one.matters) == ("aten::log", 0, "accuracy-relevant")
    assert one.because == "the next step reads weights that are bad because of it"


def test_a_step_that_was_left_out_is_harmless(tmp_path: Path) -> None:
    recording = Recording()
    weight = normal(4, 4)
    recording.call("aten::mm", [normal(4, 4), weight], [normal(4, 4)], scope="layer")
    recording.call("aten::log", [normal(4, 4)], [fresh()], phase="backward", scope="layer")
    recording.call("aten::mm", [normal(4, 4), weight], [normal(4, 4)], scope="layer", step=1)
    result = trueup.overflow(recording.write(tmp_path / "run"))
    assert (result.verdict, result.exit_code) == ("harmless", 0)
    assert "the run left this step out" in result.anomalies[0].because


def test_the_same_call_again_is_one_finding(tmp_path: Path) -> None:
    recording = Recording()
    for step in range(4):
        recording.call("aten::log", [normal(4, 4)], [fresh()], scope="loss", step=step)
    result = trueup.overflow(recording.write(tmp_path / "run"))
    (one,) = result.anomalies
    assert (one.place.step, one.again) == (0, (1, 2, 3))


def test_foreign_rows_break_nothing() -> None:
    recording = Recording()
    recording.call("aten::log", [normal(4, 4)], [fresh()], forward=99, parent=77, phase="backward")
    recording.rows[0]["producer"] = (5000, "output.0")
    recording.rows.append({**recording.rows[0], "slot": "arguments", "value": "[" * 5000, "tensor": None})
    assert [one.kind for one in rows(recording).anomalies] == ["nan"]


def test_a_long_chain_is_followed() -> None:
    """Of a step in which all is bad after its first call."""
    recording = Recording()
    x = fresh()
    recording.call("aten::log", [normal(4, 4)], [x])
    for _ in range(2000):
        y = fresh()
        recording.call("aten::add", [x, x], [y])
        x = y
    found = rows(recording)
    assert len(found.anomalies) == 1
    assert found.anomalies[0].carried == 2000


@pytest.mark.parametrize(("parts", "verdict"), [("digest", "inconclusive"), ("stats digest", "clean")])
def test_a_result_without_statistics_is_not_clean(parts: str, verdict: str, tmp_path: Path) -> None:
    recording = Recording()
    recording.call("aten::exp", [normal(4, 4)], [normal(4, 4)], scope="a")
    recording.call("aten::log", [normal(4, 4)], [Slot(normal(4, 4), parts=parts)], scope="b")
    found = trueup.overflow(recording.write(tmp_path / "run"))
    assert found.verdict == verdict
    if verdict == "inconclusive":
        assert found.exit_code == 2
        assert found.sentence.endswith("overflowed: 1 result of calls without statistics: record with --detail stats")
