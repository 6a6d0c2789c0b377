"""What the user's own runs say: repeats of the baseline, a run in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.comparison.result.comparing import compare
from trueup.foundation.model import Result, TrueupError
from verdict.captures import Array, Recording, changed, normal

W = [normal(24, 24, seed=60 + k, dtype=np.float64) / 5 for k in range(6)]


def trained(
    wrong: dict[int, float] | None = None, *, seed: int = 0, everywhere: float = 0.0, dtype: Any = np.float32, loss: float = 1.0
) -> Recording:
    """Record a chain of products of the same inputs, in float64 but for what is added: by call, or to all."""
    run = Recording()
    truth: Array = normal(24, 24, dtype=np.float64)
    weights = [weight.astype(dtype) for weight in W]
    found = truth.astype(dtype)
    for k, weight in enumerate(W):
        truth = truth @ weight
        error = (wrong or {}).get(k, 0.0) or everywhere
        if error:
            truth = changed(truth, error, seed=100 * seed + k + 1)
        result = truth.astype(dtype)
        run.call("aten::mm", [found, weights[k]], [result])
        found = result
    run.call("torch.Tensor.backward", [np.asarray(loss, np.float32)], [], level="api")
    return run


def judged(tmp_path: Path, baseline: Recording, candidate: Recording, **others: Any) -> Result:
    number = len(list(tmp_path.iterdir()))
    paths = {name: [run.write(tmp_path / f"{number}-{name}-{k}") for k, run in enumerate(runs)] for name, runs in others.items()}
    options: dict[str, Any] = {"repeat": paths.get("repeat", ()), "reference": next(iter(paths.get("reference", ())), None)}
    return compare(baseline.write(tmp_path / f"{number}-b"), candidate.write(tmp_path / f"{number}-c"), **options)


def test_what_the_baseline_does_itself_is_explained(tmp_path: Path) -> None:
    noisy = [trained({2: 1e-3}, seed=seed) for seed in (1, 2, 3)]
    assert judged(tmp_path, noisy[0], noisy[1]).verdict == "deviates"
    result = judged(tmp_path, noisy[0], noisy[1], repeat=[noisy[2]])
    assert result.verdict == "aligned"
    assert result.calls.filter(np.array([True] * 7)).to_pylist()[2]["rule"] == "matmul and the repeats' spread"


def test_a_fault_beyond_the_spread_is_found_and_the_rule_named(tmp_path: Path) -> None:
    baseline, again = trained(everywhere=1e-4, seed=1), trained(everywhere=1e-4, seed=2)
    faulty = trained({k: 1e-4 if k != 3 else 0.05 for k in range(6)}, seed=3)
    result = judged(tmp_path, baseline, faulty, repeat=[again])
    assert result.culprit is not None
    assert (result.verdict, result.culprit.ordinal) == ("deviates", 3)
    assert result.culprit.rule == "matmul and the repeats' spread"
    assert len(result.culprits) == 1


def test_weights_that_differ_as_they_do_between_repeats_are_not_blamed(tmp_path: Path) -> None:
    runs = [Recording() for _ in range(3)]
    for seed, run in enumerate(runs):
        weight = changed(normal(8, 8, seed=5), 1e-2, seed=seed)
        run.call("aten::mm", [normal(8, 8), weight], [normal(8, 8) @ weight])
    found = judged(tmp_path, *runs[:2])
    assert found.culprit is not None
    assert found.culprit.kind == "input"
    assert judged(tmp_path, *runs[:2], repeat=[runs[2]]).verdict == "aligned"


def test_losses_may_be_as_far_apart_as_those_of_repeats(tmp_path: Path) -> None:
    baseline, candidate, again = trained(loss=1.0), trained(loss=1.1), trained(loss=0.95)
    assert judged(tmp_path, baseline, candidate).verdict == "deviates"
    assert judged(tmp_path, baseline, candidate, repeat=[again]).verdict == "aligned"
    assert judged(tmp_path, baseline, trained(loss=1.2), repeat=[again]).verdict == "deviates"


def test_a_candidate_nearer_to_the_truth_is_not_at_fault(tmp_path: Path) -> None:
    coarse, fine, truth = trained(everywhere=1e-3), trained(), trained(dtype=np.float64)
    assert judged(tmp_path, coarse, fine).verdict == "deviates"
    result = judged(tmp_path, coarse, fine, reference=[truth])
    assert result.verdict == "aligned"
    assert "in 6 calls the baseline is further from the float64 run than the candidate, first in aten::mm" in result.sentence


def test_a_candidate_further_from_the_truth_is(tmp_path: Path) -> None:
    baseline, truth = trained(everywhere=1e-6, seed=1), trained(dtype=np.float64)
    faulty = trained({k: 1e-6 if k != 2 else 1e-2 for k in range(6)}, seed=2)
    result = judged(tmp_path, baseline, faulty, reference=[truth])
    assert result.culprit is not None
    assert (result.culprit.ordinal, result.culprit.rule) == (2, "matmul and the float64 run")
    assert result.culprit.error_out == pytest.approx(1e-2, rel=0.5)


def test_a_step_that_a_repeat_lacks_is_said(tmp_path: Path) -> None:
    both = [Recording() for _ in range(3)]
    for n, run in enumerate(both):
        for step in (0, 1) if n < 2 else (0,):
            run.call("aten::mm", [normal(4, 4)], [normal(4, 4, seed=3)], step=step)
    result = judged(tmp_path, *both[:2], repeat=[both[2]])
    assert "holds nothing of rank 0 step 1, which was judged without it" in result.sentence


def test_a_repeat_of_another_framework_is_refused(tmp_path: Path) -> None:
    other = trained()
    other.framework = "paddle"
    with pytest.raises(TrueupError, match="of different frameworks"):
        judged(tmp_path, trained(), trained(), repeat=[other])
