"""Every reason has words, and one for each fact that stands beside it."""

from __future__ import annotations

import pytest

from trueup.facts.why import Reason, Why
from trueup.words.reasons import WORDS, in_words

FACTS = {
    Why.SHAPES: ("(2, 5)", "(5, 2)"), Why.DTYPES: ("float32", "float64"), Why.UNRECORDED: ("ptdbg",), Why.ONE_SIDED: ("output.1",),
}  # fmt: skip


@pytest.mark.parametrize("why", Why)
def test_all_facts_are_said(why: Why) -> None:
    facts = FACTS.get(why, ())
    said = in_words(Reason(why, facts))
    assert said
    assert "{" not in said
    assert all(fact in said for fact in facts)


def test_nothing_is_said_of_nothing_and_no_two_reasons_read_alike() -> None:
    assert in_words(None) == ""
    assert len(set(WORDS.values())) == len(Why)
