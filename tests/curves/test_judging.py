"""The verdict over runs: windows, pairs, what is no matter of chance, and what stands beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from curves.made import losses, made
from trueup.analysis.curves import statistics
from trueup.analysis.curves.judging import judge
from trueup.analysis.curves.run import Run, Series
from trueup.analysis.recipes.recipe import load
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.words.wording import percent

BASE = [made(seed) for seed in range(5)]


def of(values: list[float], name: str = "one", series: str = "loss") -> Run:
    return Run(name, {series: Series.of(enumerate(values, 1))})


def test_healthy_repeats_are_equivalent() -> None:
    found = judge(BASE, [made(seed, own=9) for seed in range(5)])
    assert (found.word, found.exit_code, found.pairing) == ("equivalent", 0, "paired by seed")
    lines = found.sentence.splitlines()
    assert lines[0].startswith("EQUIVALENT  loss of steps 361 to 400: ")
    assert lines[0].endswith(", within 0.5 %")
    assert lines[1].strip() == "5 runs against 5 runs, paired; each run is one sample: its mean over these steps"
    assert lines[2].strip().startswith("control: halves of the baseline against each other, 10 splits: ")
    assert found.seen.alarms == pytest.approx(1 / 6)


def test_two_percent_off_is_different() -> None:
    found = judge(BASE, [made(seed, off=0.02, own=9) for seed in range(5)])
    assert (found.word, found.exit_code) == ("different", 1)
    assert all(one.tested.difference == pytest.approx(0.02, abs=0.004) for one in found.windows)
    assert [one.name for one in found.rules if not one.passes] == ["several steps", "early loss", "first fifth", "end"]
    assert found.seen.lag is not None
    assert found.seen.lag.steps > 100


def test_what_is_better_is_not_said_to_be_within_the_margin() -> None:
    found = judge(BASE[:3], [made(seed, off=0.02, own=9) for seed in range(3)], better="higher")
    line = found.sentence.splitlines()[0]
    assert line.startswith("EQUIVALENT  loss of steps 361 to 400: ")
    assert line.endswith("); higher is better: not worse by 0.5 %")


def test_a_fault_that_sets_in_is_placed() -> None:
    found = judge(BASE, [made(seed, off=0.03, since=200, own=9) for seed in range(5)])
    assert found.word == "different"
    beyond = [one.beyond for one in found.seen.partings]
    assert all(step is not None and 200 < step < 260 for step in beyond)
    assert any(abs(step - 200) <= 10 for step in found.seen.changes)


def test_what_heals_until_the_end_was_different() -> None:
    base = [made(seed) for seed in range(6)]
    cand = [of((losses(seed, own=9) * np.where(np.arange(400) < 300, 1.03, 1.0)).tolist(), f"seed{seed}") for seed in range(6)]
    found = judge(base, cand)
    assert found.word == "different"
    assert found.windows[-1].tested.word in ("equivalent", "different inside the margin")
    assert "at the end (steps 361 to 400) the two are " in found.sentence


def test_one_run_a_side_tells_nothing_and_says_what_would() -> None:
    found = judge([made(1)], [made(1, own=3, off=0.001)])
    assert (found.word, found.exit_code) == ("could not tell", 2)
    assert "one run a side says nothing of chance: record 3 a side with other seeds" in found.sentence
    assert judge([made(1)], [made(1, own=3)], spread=0.001).word == "equivalent"


def test_few_repeats_say_how_many_are_needed() -> None:
    found = judge([made(seed, run=0.004) for seed in (1, 2)], [made(seed, run=0.004, own=1) for seed in (3, 4)])
    assert found.word == "could not tell"
    tested = found.windows[-1].tested
    assert tested.needed is not None
    assert f"{tested.needed} repeats a side would in 80 % of cases" in found.sentence
    assert f"these repeats would show it in {percent(tested.power)} of cases" in found.sentence


def test_the_same_numbers_are_equivalent_by_themselves() -> None:
    found = judge([made(1)], [made(1)])
    assert found.word == "equivalent"
    assert "the same number at each step in both runs (400 steps)" in found.sentence


def test_a_run_again_number_for_number_is_no_sample() -> None:
    found = judge([made(1, "a"), made(1, "b")], [made(2, "c"), made(2, "d")])
    assert found.word == "could not tell"
    assert "b is a number for number and counts once: repeats need other seeds" in found.notes


def test_nan_is_no_matter_of_chance() -> None:
    values = losses(1, own=2).tolist()
    bad = of([*values[:300], *[math.nan] * 100])
    found = judge([made(1)], [bad])
    assert found.word == "different"
    assert "NaN or Inf in 1 of the candidate's 1 run, first at step 301, and in no run of the baseline" in found.sentence
    assert judge([bad], [made(1)]).word == "could not tell"


def test_other_names_lengths_and_steps() -> None:
    cand = Run("cand", {"lm loss": Series.of(enumerate(losses(1, 300, own=2).tolist(), 1))})
    found = judge([made(1)], [cand])
    assert found.names == ("loss", "lm loss")
    assert any("judged up to step 300" in note for note in found.notes)
    with pytest.raises(TrueupError, match="expected: one series acc"):
        judge([made(1)], [cand], "loss=acc")
    far = Run("far", {"loss": Series.of([(5000, 1.0)])})
    with pytest.raises(TrueupError, match="no step in common"):
        judge([made(1)], [far])
    with pytest.raises(UsageError, match="--paired needs as many runs"):
        judge(BASE, BASE[:2], paired=True)
    with pytest.raises(UsageError, match="--window holds no step"):
        judge(BASE, BASE, window=(900, 950))
    assert judge(BASE, [made(seed, own=9) for seed in range(5)], window=(100, 200)).windows[-1].last == 200


def test_lines_without_steps_take_the_others_in_order() -> None:
    values = losses(1, 40).tolist()
    stepped = Run("state", {"loss": Series.of((10 * n, value) for n, value in enumerate(values, 1))})
    counts = Run("log", {"loss": Series.of(enumerate(values, 1))}, counted={"loss": [n / 10 for n in range(1, 41)]})
    found = judge([stepped], [counts])
    assert (found.word, found.steps.tolist()) == ("equivalent", list(range(10, 410, 10)))
    assert "log: its lines have no step, and take the steps of the other runs in their order" in found.notes
    oftener = Run("oftener", {"loss": Series.of(enumerate(values, 1))}, counted={"loss": [n / 20 for n in range(1, 41)]})
    with pytest.raises(TrueupError, match=r"not of the same steps.\n.*\n.*\n  got:      0.1 and 0.05 in line 1"):
        judge([counts], [oftener])
    epochs = Series.of((n, n / 20) for n in range(1, 41))
    with pytest.raises(TrueupError, match=r"0.1 and 0.05 in line 1"):
        judge([counts], [Run("state", {"loss": Series.of(enumerate(values, 1)), "epoch": epochs})])


def test_a_negative_curve_is_compared_as_it_is() -> None:
    base = [of((-losses(seed)).tolist(), f"seed{seed}") for seed in range(5)]
    cand = [of((-losses(seed, own=9)).tolist(), f"seed{seed}") for seed in range(5)]
    found = judge(base, cand)
    assert not found.logarithmic
    assert found.word == "equivalent"


def test_limits_of_the_guides_are_those_of_the_recipe() -> None:
    steps = {step.name: step for step in load("paddle").steps}
    limits = {one.name: one.limit for one in judge([made(1)], [made(2)]).rules}
    assert limits["first step"] == steps["forward"].loss
    assert limits["several steps"] == steps["several steps"].limit
    assert limits["end"] == steps["final metric"].limit


def test_spikes_and_slopes() -> None:
    values = np.log(losses(1))
    values[[200, 201, 300]] += 0.5
    assert statistics.spikes(values) == [200, 300]
    assert statistics.spikes(np.log(losses(2))) == []
    steps = np.arange(100)
    assert statistics.slope(steps, -0.002 * steps) == pytest.approx(-2.0)
    assert math.isnan(statistics.slope(steps[:40], -0.002 * steps[:40]))


def test_a_healthy_run_leaves_the_band_as_rarely_as_is_said() -> None:
    left = 0
    for trial in range(40):
        runs = np.log([losses(100 * trial + k, 200) for k in range(6)])
        left += statistics.leaves(runs[5], statistics.band(runs[:5])) is not None
    assert left / 40 <= 1 / 6 + 3 * math.sqrt(1 / 6 * 5 / 6 / 40)


def test_the_later_curve_is_said_by_steps() -> None:
    steps = np.arange(1, 1001)
    curve = 2 + 3 * np.exp(-steps / 300)
    found = statistics.lag(steps, [curve], [2 + 3 * np.exp(-steps / 330)])
    assert found is not None
    assert found.steps == pytest.approx(91, abs=2)
    assert found.there == pytest.approx(909, abs=2)
    assert statistics.lag(steps, [curve], [curve[::-1]]) is None


def test_runs_that_count_from_0_and_from_1_are_told_and_not_shifted() -> None:
    values = losses(1, 60).tolist()
    ours, theirs = Run("ours", {"loss": Series.of(enumerate(values))}), Run("theirs", {"loss": Series.of(enumerate(values, 1))})
    found = judge([ours], [theirs], spread=0.001)
    line = next(one.strip() for one in found.sentence.splitlines() if "counts its steps" in one)
    assert line.startswith("the baseline counts its steps from 0, the candidate from 1: the same numbers in that order, ")
    assert line.endswith(" apart by the step's number, as compared here; --shift 1 lines them up")
    assert found.steps[0] == 1
    shifted = judge([ours], [theirs], spread=0.001, shift=1)
    assert shifted.sentence.startswith("EQUIVALENT  the same number at each step in both runs (60 steps)")
    assert "steps: number +1 of the candidate stands for number 0 of the baseline, as asked (--shift 1)" in shifted.sentence
    back = judge([theirs], [ours], spread=0.001)
    assert "the baseline counts its steps from 1, the candidate from 0: " in back.sentence
    assert "--shift -1 lines them up" in back.sentence


def test_what_is_no_shift_is_not_told_of_one() -> None:
    other = Run("other", {"loss": Series.of(enumerate(losses(2, 60, own=3).tolist(), 1))})
    assert "counts its steps" not in judge([Run("one", {"loss": Series.of(enumerate(losses(1, 60).tolist()))})], [other]).sentence
    assert "counts its steps" not in judge(BASE, [made(seed, own=9) for seed in range(5)]).sentence


def test_steps_of_which_none_is_common_are_lined_up_where_their_numbers_are_near() -> None:
    values = losses(1, 60)
    base = Run("base", {"loss": Series.of(zip(range(0, 600, 10), values.tolist(), strict=True))})
    near = Run("near", {"loss": Series.of(zip(range(1, 601, 10), (1.001 * values).tolist(), strict=True))})
    with pytest.raises(TrueupError, match=r"or line up step 0 and step 1: --shift 1"):
        judge([base], [near])
    assert judge([base], [near], shift=1, spread=0.001).word == "equivalent"
    far = Run("far", {"loss": Series.of(zip(range(600, 1200, 10), (0.5 * values).tolist(), strict=True))})
    with pytest.raises(TrueupError, match=r"or the same ones, on both sides$"):
        judge([base], [far])
