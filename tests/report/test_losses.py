"""What a comparison says of the losses of its two captures along the steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from curves.made import losses
from report.results import result
from trueup.doors.report.result_view import StepRow, coincide, loss_remark, sameness

SINCE = "the numbers are the same before step 30; from step 30 on they are further apart"
TELL = "Repeats with other seeds tell whether that is chance: trueup curves BASE... -- CAND..."


@pytest.mark.parametrize(("count", "factor", "since", "expected"), [
    (9, 1.0, 0, ""),
    (40, 1.0, 0, "all 40 losses are the same number"),
    (40, 1.5, 30, f"{SINCE} than the baseline's own noise from step to step; the last tenth is +5e-1 off. {TELL}"),
    (40, 1.0001, 0, f"the numbers differ from the first step on; the last tenth is +1e-4 off. {TELL}"),
])  # fmt: skip
def test_along_the_steps(count: int, factor: float, since: int, expected: str) -> None:
    before = losses(3, count)
    after = np.where(np.arange(count) >= since, before * factor, before)
    sides = [tuple(enumerate(side.tolist())) for side in (before, after)]
    found = result()
    runs = [dataclasses.replace(run, losses=side) for run, side in zip((found.baseline, found.candidate), sides, strict=True)]
    assert loss_remark(dataclasses.replace(found, baseline=runs[0], candidate=runs[1])) == expected


NONE = "at no step have both runs a finite number of their own, so no difference is drawn"


@pytest.mark.parametrize(
    ("candidate", "said", "drawn"),
    [
        ((1.0, 2.0), "the same number in both runs at each step", False),
        ((1.0, 2.0001), "", True),
        ((1.0, 3.0), "", False),
        ((1.0, float("nan")), NONE, False),
        ((1.0, None), NONE, False),
    ],
)
def test_curves_that_look_like_one(candidate: tuple[float | None, ...], said: str, *, drawn: bool) -> None:
    rows = [StepRow(step, before, after) for step, (before, after) in enumerate(zip((1.0, 2.0), candidate, strict=True))]
    assert (sameness(rows), coincide(rows)) == (said, drawn)
