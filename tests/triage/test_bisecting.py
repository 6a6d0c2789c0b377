"""The fewest switches that take a difference away, for every set of guilty ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.analysis.kept_runs import fewest


@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_all_guilty_and_no_other_are_found(case: tuple[int, set[int]]) -> None:
    count, guilty = case
    assert set(fewest(range(count), lambda off: guilty <= set(off))) == guilty


@given(st.integers(1, 12), st.integers(1, 12))
def test_where_one_of_several_is_enough_one_is_named(count: int, enough: int) -> None:
    found = fewest(range(count), lambda off: any(n < enough for n in off))
    assert len(found) == 1
    assert found[0] < enough


@pytest.mark.parametrize("count", [8, 16])
def test_a_single_one_takes_few_runs(count: int) -> None:
    for guilty in range(count):
        asked: list[Sequence[int]] = []

        def enough(off: Sequence[int], guilty: int = guilty, asked: list[Sequence[int]] = asked) -> bool:
            asked.append(off)
            return guilty in off

        assert fewest(range(count), enough) == (guilty,)
        assert len(asked) <= 2 * count.bit_length()
