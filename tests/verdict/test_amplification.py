"""What other calls of a kind make of their inputs' errors widens what is granted, and a culprit does not widen it for itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueup.comparison.measures.thresholds import QUORUM, ROOM
from trueup.comparison.verdict.evidence import KEPT, Amplification
from trueup.foundation.words.reasons import DECIDED
from verdict.captures import CRITERION, Recording, changed, judged, normal

WIDEST = CRITERION.certain_carried
RULE = "smooth-backward and the same op elsewhere in the run"


def factors(
    shares: list[float], kinds: list[int] | None = None, sure: Any = None, seen: Amplification | None = None
) -> list[float]:
    of = np.array([0] * len(shares) if kinds is None else kinds, np.uint64)
    witness = np.ones(len(shares), bool) if sure is None else ~np.array(sure)
    return list((seen or Amplification()).factors(of, np.array(shares), witness, WIDEST).tolist())


def test_the_lower_median_of_the_others_is_granted() -> None:
    assert factors([1.4, 1.6, 1.2, 1.1, 1.8]) == pytest.approx([ROOM * x for x in (1.2, 1.2, 1.4, 1.4, 1.2)])
    assert factors([2.0, 0.5, 0.4, 0.2, 0.1, 0.3]) == [1.0] * 6


def test_nobody_is_granted_more_than_the_limit_of_a_culprit() -> None:
    assert factors([5.0] * 6) == [WIDEST] * 6


def test_too_few_others_say_nothing() -> None:
    assert factors([2.0] * QUORUM) == [1.0] * QUORUM
    assert factors([2.0] * (QUORUM + 1)) == [ROOM * 2.0] * (QUORUM + 1)


def test_a_call_is_no_witness_for_itself() -> None:
    """Nor are two culprits of six."""
    assert factors([2.9, 2.8, 0.2, 0.1, 0.3, 0.2]) == [1.0] * 6


def test_certain_culprits_are_no_witnesses() -> None:
    shares, sure = [9.0, 9.0, 9.0, 9.0, 9.0, 2.0], [True] * 5 + [False]
    assert factors(shares, sure=sure) == [1.0] * 6


def test_kinds_are_kept_apart() -> None:
    assert factors([2.0] * 5 + [2.0, 0.1], kinds=[1] * 5 + [2] * 2) == [ROOM * 2.0] * 5 + [1.0] * 2


def test_what_says_nothing_is_left_alone() -> None:
    assert factors([2.0] * 5 + [float("nan")]) == [ROOM * 2.0] * 5 + [1.0]
    assert factors([]) == []


def test_earlier_steps_are_witnesses() -> None:
    seen = Amplification()
    assert factors([1.5, 1.6, 1.7, 1.8], seen=seen) == [1.0] * 4
    assert factors([2.5], seen=seen) == [ROOM * 1.6]


def test_what_is_remembered_is_bounded_and_spread() -> None:
    seen = Amplification()
    for _ in range(20):
        factors(list(np.linspace(0.0, 1.0, 500)), seen=seen)
    assert len(seen.kinds) == KEPT
    assert (seen.shares.min(), seen.shares.max()) == (0.0, 1.0)
    assert np.median(seen.shares) == pytest.approx(0.5, abs=0.05)


# ---------------------------------------------------------------- in a run
def layers(amplified: list[float], shapes: list[int] | None = None) -> Any:
    """Six backwards whose gradient is off by 1e-3, and what each makes of it."""
    runs = Recording(), Recording()
    for k, times in enumerate(amplified):
        size = 256 if shapes is None else shapes[k]
        x, y = normal(size, seed=k), normal(size, seed=k + 50)
        for run, error in zip(runs, (0.0, 1e-3), strict=True):
            given = changed(x, error, seed=k) if error else x
            result = changed(y, error * times, seed=k + 9) if error else y
            run.call("torch.nn.functional.gelu", {"grad_output.0": given}, {"grad_input.0": result}, level="api", phase="backward",
                     scope=f"layers.{k}")  # fmt: skip
    return [(call.row.name + DECIDED[call.decided], call.ratio > 1) for call in judged(*runs)]


def test_calls_of_a_kind_that_amplify_alike_explain_each_other() -> None:
    """The table grants eight times the error of the input."""
    assert layers([12.0] * 6) == [(RULE, False)] * 6


def test_one_that_amplifies_more_than_the_others_is_not_explained_by_them() -> None:
    found = layers([12.0, 0.5, 0.4, 0.6, 0.5, 0.3])
    assert found[0] == ("smooth-backward", True)
    assert not any(over for _, over in found[1:])


def test_another_shape_is_another_kind() -> None:
    assert layers([12.0] * 6, [256, 128, 64, 32, 512, 1024]) == [("smooth-backward", True)] * 6
