from __future__ import annotations

import dataclasses

import pytest

from report.results import HOSTILE, crowded, culprit, missing, ranks, result, slot
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import CallKey
from trueup.foundation.words.sentence import evidence, operators, verdict_lines

CALL = CallKey(0, 1, "forward", "aten", "layer.2", "aten::mm", 3)


def test_the_sentence_of_the_readme() -> None:
    assert result().sentence.splitlines() == [
        "DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  "
        "(torch.lstm / aten::_thnn_fused_lstm_cell_backward…)",
        "          inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)",
        "          your code: centernet.py:57 in forward",
        "          37 later calls deviate because their inputs do",
    ]


def test_aligned() -> None:
    assert result("aligned").sentence == (
        "ALIGNED  1,234 calls compared over 3 steps: 1,200 bitwise equal, 34 within rounding; nothing unmatched"
    )


def test_what_inputs_explain_is_not_called_rounding() -> None:
    line = verdict_lines("aligned", (), (), (), (), {"compared": 9, "equal": 2, "agrees": 7, "inherited": 4})[0]
    assert line == "ALIGNED  9 calls compared: 2 bitwise equal, 3 within rounding, 4 explained by their inputs; nothing unmatched"


def test_aligned_says_its_notes() -> None:
    lines = verdict_lines("aligned", (), (), (), ["step 3 is missing", "b", "c"], {"compared": 1, "equal": 1})
    assert lines == [
        "ALIGNED  1 call compared: 1 bitwise equal, 0 within rounding; nothing unmatched",
        "         note: step 3 is missing",
        "         note: b",
        "         and 1 more note in the report",
    ]


@pytest.mark.parametrize(
    ("unmatched", "notes", "counts", "because", "next_step"),
    [
        (0, [], {}, "nothing was captured", "capture both runs again"),
        (0, ["the candidate is empty"], {}, "the candidate is empty", "capture both runs again"),
        (3, [], {}, "no call of one run was found in the other (3 unmatched)", "the same --level, --steps"),
        (0, [], {"compared": 9, "incomparable": 2}, "2 of 9 calls could not be compared", "--detail stats or tensor"),
        (0, [Why.NOT_COMPARED(2, Why.UNRECORDED("ptdbg"), CALL)], {"compared": 9, "incomparable": 2},
         "2 of 9 calls could not be compared", "with --detail tensor"),
        (4, [Why.UNSEEN("input.1", CALL, 0.5, Why.ALL_PHASES())], {"compared": 9},
         f"input.1 of {CALL} differs (rel. L2 0.5) and no compared call made that difference", "capture all phases, from step 0"),
        (4, [Why.UNSEEN("input.1", CALL, 0.5, Why.ALL_PHASES())], {}, "no call of one run was found in the other (4 unmatched)",
         "the same --level, --steps"),
        (0, [Why.MISSING("run", Why.NO_FORWARD(CALL))], {}, "calls are missing that were recorded: run: aten::mm",
         "record that run"),
        (0, [Why.UNLIKE_SIBLINGS("a", "b", None, "c")], {"compared": 9}, "a (b) is off, which could be rounding; c",
         "look at what"),
        (1, [], {"compared": 9}, "1 call exists in only one run", "--level api"),
        (0, ["why"], {"compared": 9}, "why", "--detail tensor"),
    ],
)  # fmt: skip
def test_could_not_tell(unmatched: int, notes: list[Reason | str], counts: dict[str, int], because: str, next_step: str) -> None:
    lines = verdict_lines("inconclusive", (), (), [missing(k=k) for k in range(unmatched)], notes, counts)
    assert lines[0].startswith(f"COULD NOT TELL  because {because}")
    assert lines[-1].startswith("                next: ")
    assert next_step in lines[-1]
    assert sum(because in line for line in lines) == 1


def test_one_victim_is_one() -> None:
    assert verdict_lines("deviates", [culprit(victims=1)], (), (), (), {})[-1].strip() == (
        "1 later call deviates because its inputs do"
    )


def test_victims_that_may_hide_another_fault_are_counted() -> None:
    assert [line.strip() for line in verdict_lines("deviates", [culprit(victims=3700, beyond=1200)], (), (), (), {})[-2:]] == [
        "3,700 later calls deviate because their inputs do",
        "a second fault could hide in 1,200 of them, whose inputs are far off: "
        "record the candidate with --detail tensor, and compare again",
    ]


@pytest.mark.parametrize(
    ("cleared", "beyond", "said"),
    [
        (1, 0, ["1 call behind it was computed again from its own inputs, and not wrong"]),
        (1200, 3, ["1,200 calls behind it were computed again from their own inputs, and not wrong",
                   "3 calls could not be told: a second fault would not show there"]),
    ],
)  # fmt: skip
def test_what_was_computed_again_is_said(cleared: int, beyond: int, said: list[str]) -> None:
    lines = verdict_lines("deviates", [culprit(victims=3700, beyond=beyond, cleared=cleared)], (), (), (), {})
    assert [line.strip() for line in lines[-len(said) - 1 :]] == ["3,700 later calls deviate because their inputs do", *said]


def test_several_culprits_are_named_and_counted() -> None:
    lines = crowded().sentence.splitlines()
    assert lines[4].strip() == (
        "5 further culprits deviate independently: neck.norm, forward, step 0, rank 0; "
        "head.size.0, backward, step 0, rank 0; backbone.conv1, forward, step 0, rank 0; and 2 more"
    )
    assert lines[5].strip() == "23 calls exist in only one run"


def test_what_could_be_rounding_is_a_suspect() -> None:
    lines = verdict_lines("deviates", [culprit(confidence="could be rounding", victims=0)], (), (), (), {})
    assert lines[0].startswith("DEVIATES  first suspect: neck.lstm")
    assert lines[2].strip().startswith("could be rounding: compare two runs of the baseline")


def test_deviation_without_a_culprit() -> None:
    lines = verdict_lines("deviates", (), (), (), (), {"deviates": 4})
    assert lines[0] == "DEVIATES  4 calls deviate, and none of them had inputs that agree"
    assert "capture from step 0" in lines[1]


def test_runs_that_do_not_line_up() -> None:
    lines = verdict_lines("deviates", (), (), [missing("baseline")], (), {})
    assert lines[0] == "DEVIATES  the runs do not line up: 1 call exists in only one run"
    assert lines[1].strip() == "the first: decoder.0.proj, forward, step 0, rank 0  (aten::copy_), only in the baseline"


def test_culprits_of_a_kind_are_counted() -> None:
    """An optimizer of single operators has one for each weight, all of one name."""
    other = culprit(scope="", op="aten::add_", phase="optimizer", alike=80, alike_in=("aten::add_, optimizer, step 0, rank 0",))
    lines = verdict_lines("deviates", [culprit(), other], (), (), (), {})
    assert lines[-1].endswith("1 further culprit deviates independently: aten::add_, optimizer, step 0, rank 0 (81 calls alike)")
    alone = verdict_lines("deviates", [other], (), (), (), {})
    assert alone[-1].endswith("80 further calls of its kind deviate by themselves, too")


def test_calls_like_the_first_culprit_are_named() -> None:
    names = tuple(f"layers.{n}.norm, forward, step 0, rank 0" for n in range(1, 6))
    said = verdict_lines("deviates", [culprit(alike=5, alike_in=names)], (), (), (), {})[-1]
    assert said.strip() == f"5 further calls of its kind deviate by themselves, too: {'; '.join(names[:3])}…"
    one = verdict_lines("deviates", [culprit(alike=1, alike_in=names[:1])], (), (), (), {})[-1]
    assert one.strip() == f"1 further call of its kind deviates by itself, too: {names[0]}"


EPSILON = dataclasses.replace(
    slot("eps", "deviates", float("nan"), "value"), baseline="1e-05", candidate="1e-06", reason="differs"
)

NAN = float("nan")
BROKEN = (slot("input.0", "agrees", 0), slot("output.0", "deviates", NAN, reason="12 NaN on one side"))
TWO = dataclasses.replace(EPSILON, slot="arguments", baseline='{"dim": 1}', candidate='{"dim": -1, "keepdim": true}')
CUT = dataclasses.replace(EPSILON, slot="arguments", baseline='{"eps": 1', candidate='{"eps": 2')


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (
            culprit(error_in=0.0),
            "inputs are bitwise equal, outputs are not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)",
        ),
        (culprit(error_in=4.0), "inputs differ (rel. L2 4e0), outputs by more than that explains (rel. L2 2.1e-1, 3.5e6 x the"),
        (culprit(error_in=0.3, expected=0.0, because="criterion ptdbg: cosine of output.0 is 0.5, below 0.9"),
         "inputs differ (rel. L2 3e-1), and so do outputs (rel. L2 2.1e-1); criterion ptdbg: cosine of"),
        (culprit(error_in=0.016, error_out=0.04, expected=0.13, because="it breaks sum(output.0) = 0"),
         "inputs differ (rel. L2 1.6e-2), and so do outputs (rel. L2 4e-2); it breaks sum(output.0) = 0"),
        (culprit(error_in=0.016, error_out=0.4, expected=0.13, because="it breaks sum(output.0) = 0"),
         "inputs differ (rel. L2 1.6e-2), outputs by more than that explains (rel. L2 4e-1, 3.1 x the"),
        (culprit(because="off by a factor of exactly 2"), "inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1"),
        (culprit(expected=0.0), "inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, where none is expected)"),
        (culprit(error_out=NAN, slots=BROKEN), "inputs agree (rel. L2 3e-8), outputs do not (12 NaN on one side)"),
        (culprit(slots=BROKEN[1:], error_in=0.0), "it takes no tensors, and its outputs differ (rel. L2 2.1e-1, "),
        (
            culprit(kind="region", slots=BROKEN[1:], error_in=0.0),
            "a run of calls without counterpart on the other side: nothing that goes in was compared, and its outputs differ (",
        ),
        (culprit(kind="argument"), "it was called with different arguments"),
        (
            culprit(kind="argument", slots=(TWO,)),
            "argument dim differs: 1 in the baseline, -1 in the candidate (and 1 more argument)",
        ),
        (
            culprit(kind="argument", slots=(CUT,)),
            'argument arguments differs: {"eps": 1 in the baseline, {"eps": 2 in the candidate',
        ),
        (
            culprit(kind="argument", slots=(EPSILON,)),
            "argument eps differs: 1e-05 in the baseline, 1e-06 in the candidate",
        ),
        (culprit(kind="random"), "it drew different random numbers (rel. L2 2.1e-1)"),
        (
            culprit(kind="input", slots=(slot("input.0", "deviates", 0.4),)),
            "input.0 differs (rel. L2 2.1e-1) and no captured call",
        ),
        (missing("candidate"), "exists only in the candidate; the baseline has no such call here"),
        (
            culprit(kind="overwritten", slots=(slot("input.0", "deviates", 0.4),)),
            "input.0 is not what the captured call before had written there (rel. L2 2.1e-1), and in the baseline it is: something",
        ),
        (culprit(kind="region"), "a run of calls without counterpart on the other side: inputs agree"),
    ],
)
def test_every_kind_has_words(finding: object, said: str) -> None:
    assert evidence(finding).startswith(said)  # type: ignore[arg-type]


def test_operators_of_each_level() -> None:
    assert operators(culprit()) == "torch.lstm / aten::_thnn_fused_lstm_cell_backward…"
    assert operators(culprit(level="aten", op="aten::mm", aten=(), api="torch.matmul")) == "torch.matmul / aten::mm"
    assert operators(culprit(level="module", op="LSTM", api=None, aten=("aten::mm",))) == "LSTM / aten::mm"
    assert operators(culprit(level="aten", op="aten::mm", aten=(), api=None)) == "aten::mm"


def test_foreign_text_stays_on_its_line_and_steers_nothing() -> None:
    lines = verdict_lines("deviates", [culprit(scope=HOSTILE, source=HOSTILE + "\nx")], (), (), (), {})
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_where_the_difference_first_appears_on_each_rank() -> None:
    shown = ranks()
    reduce = "rank 0 got it from rank 1: first in c10d::allreduce_, collective, step 0 (rel. L2 3.4e-2)"
    assert [one.sentence for one in shown.occurrences[:3]] == [
        reduce,
        "rank 1: first in neck.lstm, torch.lstm, backward, step 0 (rel. L2 2.1e-1), which is where it arises",
        "rank 2 got it from rank 0, where it came from rank 1: first in c10d::recv_, collective, step 1 (rel. L2 3.4e-2)",
    ]
    assert shown.occurrences[3].sentence.startswith("rank 3 got it from rank 2, and where it arose is not known: first in ")
    assert f"3 ranks got it from others; {reduce}" in shown.sentence
    alone = verdict_lines("deviates", [culprit(rank=1)], (), (), (), shown.counts, shown.occurrences[:2])
    assert alone[-1].strip() == reduce
    arises = [dataclasses.replace(shown.occurrences[1], rank=rank) for rank in (1, 4, 5)]
    both = verdict_lines("deviates", [culprit(rank=1)], (), (), (), shown.counts, arises)
    assert both[-1].strip() == "a difference arises on ranks 4, 5 too"


def test_what_else_was_looked_at_is_said() -> None:
    assert evidence(culprit(because="what the ranks gave is bitwise equal: it went wrong between them")).endswith(
        "the expected rounding error); what the ranks gave is bitwise equal: it went wrong between them"
    )
