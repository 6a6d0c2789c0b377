"""The verdict's lines, sorted by what they answer."""

from __future__ import annotations

import dataclasses

import pytest

from trueup.foundation.model import Result
from trueup.foundation.words.answers import answers, dtypes

from .results import crowded, culprit, missing, ranks, result, slot


def rows(shown: Result) -> dict[str, tuple[str, ...]]:
    return dict(answers(shown).rows)


def test_without_a_setting_the_cause_is_what_the_call_does() -> None:
    said = answers(result())
    assert (said.head, said.cause) == ("DEVIATES", "torch.lstm, backward: inputs agree, outputs do not")
    assert [name for name, _ in said.rows] == ["place", "size", "certainty", "dtype", "reach"]
    assert rows(result()) == {
        "place": (
            "first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward…)",
            "your code: centernet.py:57 in forward",
        ),
        "size": ("inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)",),
        "certainty": ("certain; the error is estimated from sketches, to about ±18 %",),
        "dtype": ("float32 in both runs",),
        "reach": ("37 later calls deviate because their inputs do",),
    }


def test_a_setting_comes_first_and_the_call_is_its_place() -> None:
    said = answers(result(culprits=(culprit(cause="AdamW lr: 0.001 in the baseline, 0.002 in the candidate"),)))
    assert said.cause == "AdamW lr: 0.001 in the baseline, 0.002 in the candidate"
    assert dict(said.rows)["place"][0].startswith("first seen in: neck.lstm, backward, step 0, rank 0")


def test_of_a_long_cause_the_first_part_is_in_large() -> None:
    seen, *others = "the candidate computes in bfloat16: 222 of 224 products", "dtype of 39 parameters: float32, bfloat16", "x" * 60
    said = answers(result(culprits=(culprit(cause="; ".join([seen, *others])),)))
    assert (said.cause, said.rows[0]) == (seen, ("cause", ("; ".join(others),)))


def test_what_could_be_rounding_is_not_called_certain() -> None:
    assert rows(result(culprits=(culprit(confidence="could be rounding"),)))["certainty"] == (
        "could be rounding: compare two runs of the baseline to see how far they differ by themselves",
    )


def test_dtypes_that_differ_are_told_by_side_and_by_way() -> None:
    narrow = {"input.0": "bfloat16", "output.0": "float16"}
    given, made = (slot(name, "deviates", 0.1, dtype=("float32", to)) for name, to in narrow.items())
    assert dtypes(culprit(slots=(given, made))) == ["float32 in the baseline", "bfloat16 in and float16 out in the candidate"]
    assert dtypes(culprit(slots=())) == []


UNSURE = result("inconclusive", unmatched=(missing(),))


@pytest.mark.parametrize("shown", [result(), crowded(), ranks(), result("aligned", notes=("a", "b", "c")), UNSURE])
def test_no_line_of_the_verdict_is_lost(shown: Result) -> None:
    said = answers(shown)
    told = " ".join([said.head, said.cause, *(line for _, lines in said.rows for line in lines)])
    for line in shown.sentence.splitlines():
        assert line.strip().removeprefix(said.head).strip().removeprefix("note: ").removeprefix("next: ") in told


def test_settings_behind_the_place_are_a_note() -> None:
    shown = result()
    first, *others = shown.sentence.splitlines()
    shown = dataclasses.replace(shown, sentence="\n".join([f"{first}; set differently: TF32: off, on", *others]))
    assert rows(shown)["note"] == ("set differently: TF32: off, on",)
