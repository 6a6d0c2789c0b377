"""`trueup.compare` on captures on disk: the word, the fields of the result, and everything that must not be called aligned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.comparison.limits import losses_apart
from trueup.comparison.result.comparing import MAX_FINDINGS, compare
from trueup.foundation.model import TrueupError
from trueup.foundation.words.reasons import in_words
from verdict.captures import Recording, Slot, changed, compared, normal

W = normal(8, 8, seed=50)


def training(
    *, wrong: tuple[int, int, float] | None = None, steps: int = 2, ranks: int = 1, loss: float = 1.0, **run: Any
) -> Recording:
    """Record a few steps: products, then a loss. ``wrong`` is ``(step, call, relative error)``."""
    made = Recording(**run)
    for rank in range(ranks):
        for step in range(steps):
            x = normal(8, 8, seed=step)
            for k in range(4):
                y = (x @ W / np.float32(3)).astype(np.float32)
                if wrong is not None and wrong[:2] == (step, k):
                    y = changed(y, wrong[2])
                made.call("aten::mm", [x, W], [y], step=step, rank=rank, scope="net", source=f"train.py:{k} in forward")
                x = y
            made.call("torch.Tensor.backward", [np.float32([loss])], level="api", step=step, rank=rank)
    return made


def test_equal_runs_are_aligned(tmp_path: Path) -> None:
    result = compared(tmp_path, training(), training())
    assert (result.verdict, result.exit_code) == ("aligned", 0)
    assert (result.culprit, result.victims, result.unmatched, result.notes) == (None, [], [], [])
    zero = dict.fromkeys(("agrees", "inherited", "deviates", "incomparable", "unmatched", "only_baseline", "only_candidate"), 0)
    assert result.counts == {"compared": 10, "equal": 10, **zero, "steps": 2}
    assert result.criterion == "default"
    assert (result.baseline.calls, result.baseline.steps, result.baseline.ranks) == (10, 2, 1)
    assert result.baseline.losses == ((0, 1.0), (1, 1.0))


def test_a_culprit_in_full(tmp_path: Path) -> None:
    result = compared(tmp_path, training(), training(wrong=(1, 1, 0.1)))
    assert (result.verdict, result.exit_code) == ("deviates", 1)
    first = result.culprit
    assert first is not None
    assert (first.kind, first.step, first.rank, first.phase, first.level) == ("operator", 1, 0, "forward", "aten")
    assert (first.scope, first.op, first.ordinal, first.source) == ("net", "aten::mm", 1, "train.py:1 in forward")
    assert (first.seq, first.confidence, first.rule, first.victims) == ((6, 6), "high", "matmul", 2)
    assert (first.error_in, first.error_out) == (0, pytest.approx(0.1, rel=0.3))
    assert [(s.slot, s.state, s.method) for s in first.slots] == [
        ("input.0", "equal", "digest"), ("input.1", "equal", "digest"), ("output.0", "deviates", "sketch"),
    ]  # fmt: skip
    assert [v.seq for v in result.victims] == [(7, 7), (8, 8)]
    assert result.sentence.startswith("DEVIATES  first culprit: net, forward, step 1, rank 0  (aten::mm)\n")
    roles = {row["seq_candidate"]: (row["state"], row["role"]) for row in result.calls.to_pylist()}
    assert roles[6] == ("deviates", "culprit")
    assert roles[7] == ("deviates", "victim")
    assert roles[1] == ("equal", "")


@pytest.mark.parametrize(("off", "beyond"), [(0.1, 0), (0.9, 2)])
def test_victims_of_which_little_agrees_may_hide_another_fault(off: float, beyond: int, tmp_path: Path) -> None:
    first = compared(tmp_path, training(), training(wrong=(1, 1, off))).culprit
    assert first is not None
    assert (first.victims, first.beyond) == (2, beyond)


def test_victims_are_only_those_after_the_first_culprit(tmp_path: Path) -> None:
    many = MAX_FINDINGS + 50
    baseline, candidate = Recording(), Recording()
    for run, error in ((baseline, 0.0), (candidate, 2e-5)):
        x = normal(8, 8)
        y = changed(x, error / 200)
        for _ in range(many):  # an error that the inputs explain, as after many steps
            y = changed(normal(8, 8), error, seed=3)
            run.call("aten::exp2", [changed(x, error / 50, seed=2)], [y])
        z = changed(normal(8, 8, seed=6), 0.2 if error else 0.0)
        run.call("aten::mm", [x, W], [z])
        run.call("aten::relu", [z], [np.maximum(z, 0)])
    result = compared(tmp_path, baseline, candidate)
    assert [c.seq[1] for c in result.culprits] == [many]
    assert [v.seq[1] for v in result.victims] == [many + 1]


def test_levels(tmp_path: Path) -> None:
    baseline, candidate = Recording(), Recording()
    for run in (baseline, candidate):
        run.call("torch.mm", [W, W], [W @ W], level="api")
    candidate.call("aten::mm", [W, W], [W @ W])
    result = compared(tmp_path, baseline, candidate)
    assert result.verdict == "aligned"
    assert result.notes == ["only one capture holds level aten; compared at api"]
    with pytest.raises(TrueupError, match=r"^level 'atom' is unknown: expected module, api, aten$"):
        compared(tmp_path, baseline, candidate, level="atom")
    with pytest.raises(TrueupError, match=r"no level in common among aten: .* holds api, .* holds api, aten; capture both"):
        compared(tmp_path, baseline, candidate, level="aten")


# ---------------------------------------------------------------- what must not be called aligned
def test_missing_steps(tmp_path: Path) -> None:
    for sides in ((training(steps=3), training()), (training(), training(steps=3))):
        result = compared(tmp_path, *sides)
        assert (result.verdict, result.exit_code) == ("inconclusive", 2)
        assert len(result.notes) == 1
        assert result.notes[0].startswith("steps 2 are only in ")
    other = training(steps=1)
    for row in other.rows:
        row["step"] = 4
    with pytest.raises(TrueupError, match=r"no steps in common: .* holds 0, .* holds 4; capture the same steps on both"):
        compared(tmp_path, training(steps=1), other)


def test_missing_ranks(tmp_path: Path) -> None:
    result = compared(tmp_path, training(ranks=2), training())
    assert (result.verdict, result.notes[0][:20]) == ("inconclusive", "ranks 1 are only in ")


def test_a_rank_that_stopped_early(tmp_path: Path) -> None:
    candidate = training(ranks=2)
    candidate.rows = [row for row in candidate.rows if (row["rank"], row["step"]) != (1, 1)]
    result = compared(tmp_path, training(ranks=2), candidate)
    assert result.verdict == "inconclusive"
    assert result.notes[0].startswith("rank 1 step 1 is only in ")


def test_nothing_in_common(tmp_path: Path) -> None:
    candidate = training(steps=1)
    for row in candidate.rows:
        row["scope"], row["op"] = "renamed", f"other::{row['op']}"
    result = compared(tmp_path, training(steps=1), candidate)
    assert (result.verdict, result.counts["compared"]) == ("inconclusive", 0)


@pytest.mark.parametrize(("first", "second"), [("stats digest", ""), ("", "stats"), ("", ""), ("digest", "stats")])
def test_no_common_statistics(tmp_path: Path, first: str, second: str) -> None:
    result = compared(tmp_path, training(parts=first), training(parts=second))
    assert result.verdict == "inconclusive"
    assert result.counts["incomparable"] == 8


def test_equal_digests_are_enough(tmp_path: Path) -> None:
    assert compared(tmp_path, training(parts="digest"), training(parts="stats digest")).verdict == "aligned"


def test_other_digests_are_not_a_verdict(tmp_path: Path) -> None:
    result = compared(tmp_path, training(parts="digest"), training(parts="digest", wrong=(0, 1, 1e-7)))
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert result.notes[0] == (
        "the first call whose outputs differ: net, forward, step 0, rank 0: inputs agree by their checksums, outputs do not "
        "(the size of the error is not known); it could be rounding"
    )
    assert result.notes[0] in result.sentence


def test_after_equal_digests_the_first_other_one_is_named(tmp_path: Path) -> None:
    """Runs that round alike in all calls before do not round otherwise in the next: its error has no size all the same."""
    runs = Recording(parts="digest"), Recording(parts="digest")
    for side, run in enumerate(runs):
        x = normal(8, 8)
        for k in range(6):
            y = (x @ W).astype(np.float32)
            y = y + np.float32(1e-3) if side and k == 4 else y
            run.call("aten::mm", [x, W], [y])
            x = y
    result = compared(tmp_path, *runs)
    assert result.verdict == "deviates"
    (found,) = result.culprits
    assert (found.ordinal, found.confidence) == (4, "could be rounding")
    assert "the size of the error is not known" in result.sentence
    assert [row["role"] for row in result.calls.to_pylist()] == ["", "", "", "", "culprit", "victim"]


def test_no_outputs(tmp_path: Path) -> None:
    runs = Recording(), Recording()
    for run in runs:
        run.call("torch.Tensor.backward", [np.float32([1])], level="api")
    result = compared(tmp_path, *runs)
    assert (result.verdict, result.notes) == ("inconclusive", ["no output of any call was compared"])


def test_an_output_of_one_side(tmp_path: Path) -> None:
    candidate = training()
    candidate.rows = [row for row in candidate.rows if not (row["seq"] == 2 and row["slot"] == "output.0")]
    result = compared(tmp_path, training(), candidate)
    assert (result.verdict, result.counts["incomparable"]) == ("inconclusive", 1)


def test_an_unmatched_call_without_parent(tmp_path: Path) -> None:
    candidate = training()
    x = Slot(normal(3), "")
    candidate.call("aten::extra", [], [x], step=1, phase="optimizer")
    result = compared(tmp_path, training(), candidate)
    assert (result.verdict, result.counts["unmatched"]) == ("inconclusive", 1)
    assert [(f.op, f.side, f.seq) for f in result.unmatched] == [("aten::extra", "candidate", (-1, 10))]


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        (1.0, 1.04, None),
        (1.0, 1.06, "6.0% apart at step 0 (1 and 1.06), more than 5%, and no single call explains it"),
        (1.0, np.nan, "apart at step 0 (1 and nan), more than 5%"),
        (np.nan, 1.0, "apart at step 0 (nan and 1), more than 5%"),
        (1.0, np.inf, "inf% apart at step 0 (1 and inf), more than 5%"),
        (np.inf, -np.inf, "apart at step 0 (inf and -inf), more than 5%"),
        (np.nan, np.nan, None),
        (np.inf, np.inf, None),
    ],
)
def test_losses_apart(first: float, second: float, apart: str | None) -> None:
    note = losses_apart({0: first}, {0: second}, 0.05)
    if apart is None:
        assert note is None
    else:
        assert f"the losses are {apart}" in in_words(note)


@pytest.mark.parametrize("loss", [1.06, np.nan])
def test_losses_apart_without_a_culprit_are_not_aligned(tmp_path: Path, loss: float) -> None:
    runs = training(steps=1), training(steps=1)
    for run, value in zip(runs, (1.0, loss), strict=True):
        run.made.clear()
        run.rows[-1] |= {"tensor": np.float32([value]), "producer": (3, "output.0")}
    result = compared(tmp_path, *runs)
    assert (result.verdict, result.exit_code) == ("inconclusive", 2)
    assert result.notes[0].startswith("the losses are ")


def test_two_losses_that_are_nan_are_equal(tmp_path: Path) -> None:
    assert compared(tmp_path, training(loss=np.nan), training(loss=np.nan)).verdict == "aligned"


def test_a_gap_in_which_the_weights_went_apart(tmp_path: Path) -> None:
    runs = training(steps=1), training(steps=1)
    for side, run in enumerate(runs):
        weight = changed(W, 0.2 if side else 0.0)
        run.made[id(weight)] = 2, "output.0"  # an optimizer's call of a step before the gap
        x = normal(8, 8)
        run.call("aten::mm", [x, weight], [x @ weight], step=10)
    result = compared(tmp_path, *runs)
    assert result.verdict == "inconclusive"
    assert "input.1 of rank 0 step 10 forward aten aten::mm#0 differs" in result.notes[0]


def test_another_batch_in_a_later_step(tmp_path: Path) -> None:
    runs = training(steps=1), training(steps=1)
    for side, run in enumerate(runs):
        x = normal(8, 8, seed=side)
        run.call("aten::mm", [x, W], [x @ W], step=1)
    result = compared(tmp_path, *runs)
    assert result.culprit is not None
    assert (result.culprit.kind, result.culprit.step) == ("input", 1)


def test_an_optimizer_that_only_one_side_has_is_seen_in_the_next_step_or_by_what_it_wrote(tmp_path: Path) -> None:
    def run(op: str, factors: list[float]) -> Recording:
        made = Recording()
        weight = W
        for step, factor in enumerate(factors):
            x = normal(8, 8, seed=step)
            made.call("aten::mm", [x, weight], [x @ weight], step=step)
            weight = weight * np.float32(factor)
            made.call(op, [x], [weight], step=step, phase="optimizer")
        return made

    fused = run("aten::_fused_sgd_", [0.9, 0.9])
    assert compared(tmp_path, fused, run("aten::_foreach_add_", [0.9, 0.9])).verdict == "aligned"
    result = compared(tmp_path, fused, run("aten::_foreach_add_", [0.9, 0.8]))
    assert (result.verdict, result.counts["unmatched"]) == ("deviates", 0)
    assert [(f.kind, f.step, f.op) for f in result.culprits] == [("operator", 1, "optimizer.step")]


# ---------------------------------------------------------------- captures that are not whole
def test_an_interrupted_capture_is_said(tmp_path: Path) -> None:
    baseline = training().write(tmp_path / "baseline")
    candidate = training().write(tmp_path / "candidate", status="recording")
    result = compare(baseline, candidate)
    assert any("candidate: " in note for note in result.notes)


def test_a_damaged_part_is_not_aligned(tmp_path: Path) -> None:
    baseline, candidate = (training().write(tmp_path / name) for name in ("baseline", "candidate"))
    part = next((candidate / "rank-00000" / "step-000001").glob("records-*.parquet"))
    part.write_bytes(part.read_bytes()[:-10])
    result = compare(baseline, candidate)
    assert result.verdict == "inconclusive"
    assert any(part.name in note for note in result.notes)


def test_other_frameworks(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="different frameworks"):
        compared(tmp_path, training(), training(framework="jax"))


def test_tensors_are_measured_from_their_bytes(tmp_path: Path) -> None:
    wrong = training(parts="tensor digest", wrong=(0, 1, 0.1))
    result = compared(tmp_path, training(parts="tensor digest"), wrong)
    assert result.culprit is not None
    assert result.culprit.slots[-1].method == "tensor"
    assert result.culprit.slots[-1].relative_l2 == pytest.approx(0.1, rel=1e-3)


def test_a_region_in_full(tmp_path: Path) -> None:
    runs = Recording(), Recording()
    for side, run in enumerate(runs):
        x, y = normal(8, 8), changed(normal(8, 8, seed=4), 0.1 if side else 0.0)
        run.call("aten::mm", [W, W], [x], scope="net")
        run.call("aten::cell" if side else "aten::fused", [x], [y], scope="net", source=f"{side}.py:3 in forward")
        run.call("aten::mm", [y, W], [y @ W], scope="net")
    result = compared(tmp_path, *runs)
    (region,) = result.culprits
    assert (region.kind, region.op, region.aten, region.seq) == ("region", "aten::cell", ("aten::cell",), (1, 1))
    assert (region.source, region.victims) == ("1.py:3 in forward", 1)
    assert "a run of calls without counterpart on the other side: inputs" in result.sentence
    assert result.unmatched == []


def test_a_missing_call_in_full(tmp_path: Path) -> None:
    runs = Recording(), Recording()
    for side, run in enumerate(runs):
        x = normal(8, 8)
        run.call("aten::mm", [W, W], [x])
        if not side:
            y = x / np.float32(2)
            run.call("c10d::allreduce_", [x], [y], phase="collective", source="ddp.py:9 in reduce")
            x = y
        run.call("aten::mm", [x, W], [x @ W])
    (region,) = compared(tmp_path, *runs).culprits
    assert (region.kind, region.op, region.seq, region.source) == ("region", "c10d::allreduce_", (1, -1), "ddp.py:9 in reduce")


def test_findings_are_frozen(tmp_path: Path) -> None:
    result = compared(tmp_path, training(), training(wrong=(0, 0, 0.5)))
    assert dataclasses.asdict(result.culprits[0])["kind"] == "operator"


def test_memory_that_a_call_only_writes_to_is_no_difference(tmp_path: Path) -> None:
    """What lay in it before is of nobody's making, and was not measured."""
    import torch

    for name in ("one", "two"):
        torch.manual_seed(0)
        with trueup.capture(tmp_path / name):
            torch.nn.init.uniform_(torch.empty(8)).mul(2)
    result = trueup.compare(tmp_path / "one", tmp_path / "two", criterion="bitwise")
    assert (result.verdict, result.counts["agrees"]) == ("aligned", 0)
    assert result.counts["equal"] == result.counts["compared"] > 3
