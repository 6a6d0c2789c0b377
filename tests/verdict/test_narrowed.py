"""Calls that round to a 16-bit dtype in the candidate alone, and whether a policy is the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from verdict.captures import Array, Recording, compared, located, normal

WIDTH = 64
HALF, SINGLE = np.float16, np.float32


def layers(run: Recording, kinds: Sequence[type], *, given: type = SINGLE) -> None:
    """Record ``x * weight`` layer by layer, each in a dtype; what is read is cast first, or comes as it is."""
    x = normal(WIDTH, WIDTH, seed=0).astype(given)
    run.call("aten::embedding", [normal(WIDTH, WIDTH, seed=1).astype(given)], [x])
    for n, kind in enumerate(kinds):
        weight = normal(WIDTH, WIDTH, seed=2 + n).astype(HALF)
        wide = weight.astype(kind)
        scope = {"scope": f"layer.{n}"}
        if kind is SINGLE:
            run.call("aten::_to_copy", [weight], [wide], **scope)
        if kind is HALF:
            x = cast(run, x, kind, **scope)
        made: Array = (x.astype(SINGLE) * wide.astype(SINGLE)).astype(kind)
        run.call("aten::mul", [x, wide], [made], **scope)
        x = cast(run, made, SINGLE, **scope)


def cast(run: Recording, x: Array, kind: type, **scope: str) -> Array:
    found = x.astype(kind)
    run.call("aten::_to_copy", [x], [found], **scope)
    return found


def runs(candidate: Sequence[type], given: type = SINGLE) -> tuple[Recording, Recording]:
    found = Recording(), Recording()
    layers(found[0], [SINGLE] * len(candidate))
    layers(found[1], candidate, given=given)
    return found


def test_one_call_of_an_operator_that_rounds_more_is_not_aligned(tmp_path: Path) -> None:
    result = compared(tmp_path, *runs([SINGLE, HALF, SINGLE]))
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert result.notes[0] == (
        "aten::mul (rank 0 step 0 forward aten layer.1/aten::mul#0) makes float16 in the candidate and float32 in the baseline, "
        "which no precision policy explains: cast there as the baseline does, or compare with a run that does not"
    )
    assert "next: cast there as the baseline does" in result.sentence


@pytest.mark.parametrize("candidate", [[HALF] * 3, [SINGLE] * 3], ids=["policy", "same"])
def test_a_policy_for_all_calls_of_an_operator_is_no_reason(candidate: Sequence[type]) -> None:
    assert located(*runs(candidate)).narrowed is None


def test_a_run_of_another_precision_is_no_reason() -> None:
    assert located(*runs([SINGLE, HALF, SINGLE])).narrowed is not None
    assert located(*runs([SINGLE, HALF, SINGLE], given=HALF)).narrowed is None
