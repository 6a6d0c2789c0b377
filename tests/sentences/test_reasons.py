"""Every reason has words, and its facts stand in them."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

from trueup.comparison.result.comparing import Assembly
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import CallKey
from trueup.foundation.words.reasons import LATER, NEXT, WORDS, in_words, joined, what_and_next

CALL = CallKey(0, 1, "forward", "aten", "layer.2", "aten::mm", 3)

SAID = [
    (Why.SHAPES("(2, 5)", "(5, 2)"), "shapes differ: (2, 5) and (5, 2)"),
    (Why.ONE_SIDED("output.1, output.2"), "only one side has output.1, output.2"),
    (Why.MODULE_GONE(CALL, None),
     f"aten::mm ({CALL}) runs inside a call of outside any module, and the module around it is not there"),
    (Why.LAW("sum(output.0) = 0", 1, 1e-7), "it breaks sum(output.0) = 0 that it keeps in the baseline (to 1e-7)"),
    (Why.LAW("sum(output.0) = 0", 12, 0.0),
     "it breaks sum(output.0) = 0 that all 12 calls of its kind keep in the baseline (to 0)"),
    (Why.TOO_LARGE(150.5), "its norm is 150 times the largest that its inputs can make"),
    (Why.SCATTERED(1024.0, 2048.0), "of the same indices 2,048 elements are zero, in the baseline 1,024"),
    (Why.ZEROS(1024.0, 0.0), "1,024 elements of an input are zero, 0 of the result"),
    (Why.DIVIDED(32.0, 26.0), "it is divided by 32.0, and 26 of its targets are not ignored"),
    (Why.ALIKE(0.114, "smaller", 4),
     "its results are 11% smaller beside its inputs than in the baseline, alike in all 4 calls of its kind"),
    (Why.REORDERED(), "the same numbers in another order"),
    (Why.FACTOR("1/3", 1 / 3), "off by a factor of exactly 1/3"),
    (Why.FACTOR("", 1 / 3), "all elements are off by the same factor, 0.33333"),
    (Why.LIMIT("mine", (Why.FIGURE("cosine", "output.0", 0.5, "below", 0.9), Why.FIGURE("mean", "output.0", 2.0, "above", 1.0))),
     "criterion mine: cosine of output.0 is 0.5, below 0.9 and mean of output.0 is 2, above 1"),
    (Why.GENERATOR("cpu", Why.SINCE_STEP(0, None)),
     "the state of the generator (cpu) is another one when step 0 begins: the difference begins in the random state, "
     "not in the call"),
    (Why.SINCE_CALL(CALL, Why.ONE_SIDE_DREW(CALL, "baseline")),
     "from aten::mm (layer.2) on, after aten::mm (layer.2), which only the baseline has, drew"),
    (Why.WEIGHT("exp_avg", False, "fc.weight", None), "what the optimizer made of state exp_avg of fc.weight"),
    (Why.WEIGHT(None, True, "fc.weight", 1), "what the optimizer made of what it adds to fc.weight and of 1 more parameter"),
    (Why.RUNS_INSTEAD(("a", "b", "c", "d", "e"), tuple("abcdefgh")),
     "the candidate runs a, b, c, d and 4 more where the baseline runs a, b, c, d, e"),
    (Why.RUNS_ALONE("candidate", (Why.TIMES_RUN("aten::mul_", 2), Why.TIMES_RUN("aten::add_", 1))),
     "only the candidate runs aten::mul_ (2 times), aten::add_ (1 time)"),
    (Why.MOVED_TIMES(4, 2.0),
     "all 4 weights were moved 2.00 times as far, the same way: another learning rate, or gradients clipped or scaled"),
    (Why.GIVEN(None), "what the ranks gave is bitwise equal: it went wrong between them"),
    (Why.GIVEN(2e-8), "what the ranks gave agrees (rel. L2 2e-8): it went wrong between them"),
    (Why.FRAGMENT("baseline", 0, "it was killed", 2),
     "the baseline is a fragment that ends in step 0: it was killed (and 2 more): record that run again, to its end"),
    (Why.FILTERS((Why.FILTER("--phase", "forward"), Why.FILTER("--exclude", None)), (Why.FILTER("--phase", None),), 1),
     "the runs were recorded through different filters (baseline --phase forward, without --exclude, candidate without --phase), "
     "and 1 call exists in one run only: record both with the same --phase, --include and --exclude"),
    (Why.TWICE("run", "output.0", CALL),
     f"run: output.0 of aten::mm ({CALL}) is recorded twice: records of rank 0 step 1 were copied over others"),
    (Why.UNSEEN("input.0", CALL, 0.25, Why.SHOWS_BETWEEN(Why.LEVEL_API())),
     f"input.0 of {CALL} differs (rel. L2 0.25) and no compared call made that difference: compare at level api too, which both "
     "captures hold, where calls between modules show"),
    (Why.COULD_ROUND("fc", "aten::mm", 3.14, ""), "fc (aten::mm) is off by 3.1 x what is explained, which could be rounding"),
    (Why.UNREAD(CALL), f"what aten::mm ({CALL}) computes differs and no recorded call reads it; what is read agrees"),
    (Why.REWRITTEN(1), "1 call is written another way in the candidate; what they compute together agrees"),
    (Why.FIRST_SHAPE(CALL, Why.SHAPES("1", "2")),
     "the first result that has another shape is that of layer.2, forward, step 1 (aten::mm): shapes differ: 1 and 2"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "said"), SAID, ids=[reason.why.name for reason, _ in SAID])
def test_the_words(reason: Reason, said: str) -> None:
    assert in_words(reason) == said


@pytest.mark.parametrize("why", Why)
def test_no_reason_lacks_words_or_says_more_facts_than_it_has(why: Why) -> None:
    """Facts are counted where they are listed: in the comments of the enum, of which the source is the only place."""
    numbers = {int(number) for template in (WORDS[why], NEXT.get(why, "")) for number in re.findall(r"{(\d)", template)}
    assert numbers == set(range(len(numbers)))


def test_what_to_do_is_said_apart() -> None:
    missing = Why.MISSING("run", Why.NO_FORWARD(CALL))
    what, then = what_and_next(missing)
    assert what == in_words(missing)
    assert then.startswith("record that run again")
    assert not NEXT.keys() & LATER.keys()


def test_nothing_is_said_of_nothing_and_text_as_it_is() -> None:
    assert in_words(None) == ""
    assert joined([None, "a {0}", Why.UNMEASURED()]) == "a {0}; not measured"


def test_braces_in_what_was_captured_are_text() -> None:
    assert in_words(Why.PROBLEM("{0}", "{1:sci}|{")) == "{0}: {1:sci}|{"


def test_a_reason_is_found_beside_another() -> None:
    reason = Why.NOT_COMPARED(1, Why.UNRECORDED("ptdbg"), CALL)
    assert reason.involves(Why.UNRECORDED)
    assert not reason.involves(Why.INPUTS)


@pytest.mark.parametrize(("ratio", "size"), [(math.inf, ""), (3.14, " by 3.1 x what is explained"), (0.04, ""), (0.0, "")])
def test_a_size_that_would_be_written_as_none_is_left_out(ratio: float, size: str) -> None:
    suspect = SimpleNamespace(because=())
    finding = SimpleNamespace(slots=(), ratio=ratio, name="fc", op="aten::mm", because="")
    (note,) = Assembly._with_suspect(SimpleNamespace(findings={id(suspect): finding}), [], suspect)  # type: ignore[arg-type]
    assert in_words(note) == f"fc (aten::mm) is off{size}, which could be rounding"
