"""What another right implementation may do (cast elsewhere, transpose a gradient, go backward from a sum) and its wrong twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import implementation_right
import implementations
import strangers
import trueup
from strange import AGAIN, PLAIN, STRANGERS
from strange.stranger import ANEW
from trueup import simdev
from trueup.foundation.facts.slots import LEAST, underflow
from verdict.captures import Array, Recording, changed, judged, located, normal

LEVELS = {"api": ["module", "api"], "all": None}


# ---------------------------------------------------------------- casts
def cast(run: Recording, x: Array, dtype: type) -> None:
    """Record a softmax's cast, with the dtype as its argument."""
    run.call("aten::_to_copy", [x], [x.astype(dtype)], arguments={"dtype": np.dtype(dtype).name})


@pytest.mark.parametrize(("first", "second", "kinds"), [
    (ml_dtypes.bfloat16, np.float32, []),
    (np.float32, ml_dtypes.bfloat16, ["argument"]),
])  # fmt: skip
def test_a_finer_dtype_is_no_fault_and_a_coarser_one_is(first: type, second: type, kinds: list[str]) -> None:
    runs, x = (Recording(), Recording()), normal(32, 32)
    for run, dtype in zip(runs, (first, second), strict=True):
        cast(run, x, dtype)
    assert [suspect.kind for suspect in located(*runs).suspects] == kinds


def test_a_cast_on_one_side_explains_its_rounding_and_no_more() -> None:
    """The baseline rounds to bfloat16; a candidate that keeps float32 is off by that rounding."""
    x = normal(64, 64)
    ratios = []
    for wrong in (0.0, 0.1):
        first, second = Recording(), Recording()
        first.call("aten::_to_copy", [x], [x.astype(ml_dtypes.bfloat16)])
        second.call("aten::_to_copy", [x], [changed(x, wrong)])
        ratios += [call.ratio for call in judged(first, second)]
    assert ratios[0] <= 1 < ratios[1]


def masked(run: Recording, mask: Array, off: float) -> None:
    """Record modules alone: a model, and in it a block that reads a mask which no module made."""
    ids, x = normal(4, 8, seed=1), changed(normal(32, 32, seed=2), off)
    outer = run.call("Model", [ids], [x], level="module")
    run.call("Embedding", [ids], [changed(x, 0)], level="module", parent=outer)
    run.call("Block", [changed(x, 0), mask], [changed(x, 0)], level="module", parent=outer)


@pytest.mark.parametrize(("off", "kinds"), [(1e-7, []), (0.1, ["operator"])])
def test_a_mask_of_bools_and_one_of_numbers_are_no_difference(off: float, kinds: list[str]) -> None:
    """What reads them is compared."""
    runs, seen = (Recording(), Recording()), np.tri(8, dtype=bool)
    masked(runs[0], np.where(seen, 0, -65504).astype(np.float16), 0.0)
    masked(runs[1], seen, off)
    found = located(*runs)
    assert [s.kind for s in found.suspects] == kinds
    assert found.unexplained == []


def test_one_large_number_may_be_rounded_to_two_neighbours() -> None:
    """Inputs that differ in the last bit, on two sides of a boundary: the largest number of the cast is off by a whole unit."""
    boundary, x = np.float32(4 + 2.0**-6), np.clip(normal(4096), -3, 3)
    y = x.copy()
    x[0], y[0] = np.nextafter(boundary, np.float32(0)), np.nextafter(boundary, np.float32(8))
    first, second = Recording(), Recording()
    for run, given in ((first, x), (second, y)):
        run.call("aten::_to_copy", [given], [given.astype(ml_dtypes.bfloat16)])
    (call,) = judged(first, second)
    assert call.error_out > 2.0**-5 / float(np.linalg.norm(x)) * 0.99
    assert call.ratio <= 1


# ---------------------------------------------------------------- numbers near the smallest
def test_the_smallest_numbers_are_those_of_the_dtypes() -> None:
    for name, least in LEAST.items():
        if name != "complex32":
            assert least == float(ml_dtypes.finfo(name).smallest_subnormal)
    assert (underflow("float16"), underflow("float32"), underflow(None)) == (2.0**-25, 0.0, 0.0)


def test_squares_that_underflow_are_rounded_by_more_than_their_precision() -> None:
    """Numbers of two units of the smallest in float16: half a unit more or less is rounding, and of larger ones it is not."""
    ratios = []
    for size in (2, 2**12):
        right = np.full(4096, size * 2.0**-24, np.float16)
        wrong = right.copy()
        wrong[::16] += right[0] / 2
        wrong[8::16] -= right[0] / 2
        first, second = Recording(), Recording()
        for run, result in ((first, right), (second, wrong)):
            run.call("aten::mul", [normal(4096, dtype=np.float16), normal(4096, seed=1, dtype=np.float16)], [result])
        ratios += [call.ratio for call in judged(first, second)]
    assert ratios[0] <= 1 < ratios[1]


# ---------------------------------------------------------------- memory read through another view
def test_a_square_matrix_read_transposed_is_not_overwritten() -> None:
    first, second = Recording(), Recording()
    made = normal(16, 16)
    for run in (first, second):
        run.call("aten::mm", [normal(16, 16, seed=1)], [made])
        read = made if run is first else np.ascontiguousarray(made.T)
        run.made[id(read)] = run.made[id(made)]
        run.call("aten::add", [read], [read + np.float32(1)])
        run.kept.append(read)
    assert "overwritten" not in [suspect.kind for suspect in located(first, second).suspects]


# ---------------------------------------------------------------- real trainings
def trained(into: Path, slope: Callable[[nn.Module, Tensor], Tensor], active: Callable[[Tensor], Tensor]) -> Path:
    """Train on the slope of a network along its input, as physics-informed losses do."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 1)
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(2, 32, 8, generator=torch.Generator().manual_seed(1))
    with trueup.capture(into, model=model, detail="stats") as capture:
        for batch in batches:
            optimizer.zero_grad()
            x = batch.requires_grad_()
            slope(lambda given: second(active(first(given))), x).square().mean().backward()
            optimizer.step()
            capture.step()
    return into


def by_ones(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = model(x)
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def by_sum(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def by_sum_and_a_dead_end(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = model(x)
    (y * 1.5).sum()
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("slope", "verdict"), [(by_sum, "aligned"), (by_sum_and_a_dead_end, "inconclusive")])
def test_a_sum_that_a_backward_starts_from_is_no_dead_end(
    levels: str, slope: Callable[..., Tensor], verdict: str, tmp_path: Path
) -> None:
    runs = [trained(tmp_path / one.__name__, one, torch.tanh) for one in (by_ones, slope)]
    assert trueup.compare(*runs, level=LEVELS[levels]).verdict == verdict


@pytest.mark.parametrize(("name", "level"), [("state-space", "api"), ("neural-field", "aten")])
def test_sums_of_gradients_and_square_weights_of_strangers_are_not_blamed(name: str, level: str, tmp_path: Path) -> None:
    """Under autocast a scan by einsum differs before autograd adds two gradients up; a square weight's is read transposed."""
    for form in (PLAIN, AGAIN):
        strangers.run(STRANGERS[name], form, "bfloat16", tmp_path / form)
    result = trueup.compare(tmp_path / PLAIN, tmp_path / AGAIN, level=implementations.LEVELS[level])
    assert result.culprit is None, result.sentence


@pytest.mark.parametrize(("name", "precision", "form", "wrong"), [
    ("fourier-operator", "float32", ANEW, "weights-conjugated"),  # complex numbers in one run, pairs of real ones in the other
    ("codebook", "float32", ANEW, "not-straight-through"),  # the places of minima, whose values nobody reads
    ("graph-attention", "bfloat16", AGAIN, "shares-of-what-leaves"),  # one run copies what the other views
    ("retention", "bfloat16", AGAIN, "features-by-relu"),  # a pair is read before the products that explain it
    ("retention", "float32", ANEW, "divisor-does-not-fade"),  # the last memory is read by nobody
    ("latents", "float32", AGAIN, "scaled-by-width"),  # factors change places, in a later step and in its backward, too
    ("sharpness", "float32", AGAIN, "radius-squared"),  # a forward reads weights between two updates of the step
    ("codebook", "float32", AGAIN, "commitment-not-detached"),  # a function returns a gradient more, which only a sum reads
])  # fmt: skip
def test_a_formula_written_another_way_is_aligned_and_a_wrong_one_blamed(
    name: str, precision: str, form: str, wrong: str, tmp_path: Path
) -> None:
    for each in (PLAIN, form, wrong):
        strangers.run(STRANGERS[name], each, precision, tmp_path / each)
    result = trueup.compare(tmp_path / PLAIN, tmp_path / form)
    assert result.verdict == "aligned", result.sentence
    assert trueup.compare(tmp_path / PLAIN, tmp_path / wrong).verdict == "deviates"


@pytest.mark.parametrize(("name", "precision", "form", "wrong"), [
    ("forces", "float32", AGAIN, "force-points-uphill"),  # a gradient goes to the backward of a backward
    ("made-weights", "bfloat16", AGAIN, "first-code-twice"),  # a loss goes backward from logits that differ already
])  # fmt: skip
def test_so_it_is_where_no_operator_shows(name: str, precision: str, form: str, wrong: str, tmp_path: Path) -> None:
    for each in (PLAIN, form, wrong):
        strangers.run(STRANGERS[name], each, precision, tmp_path / each)
    result = trueup.compare(tmp_path / PLAIN, tmp_path / form, level=LEVELS["api"])
    assert result.verdict == "aligned", result.sentence
    assert trueup.compare(tmp_path / PLAIN, tmp_path / wrong, level=LEVELS["api"]).verdict == "deviates"


def test_what_is_made_of_a_result_explains_nothing_of_it(tmp_path: Path) -> None:
    """A recursion of one call without counterpart in each turn, whose turns one pair joins by chance."""
    for form in (PLAIN, "largest-for-sum"):
        strangers.run(STRANGERS["tags"], form, "float32", tmp_path / form)
    for levels in LEVELS.values():
        first = trueup.compare(tmp_path / PLAIN, tmp_path / "largest-for-sum", level=levels).culprit
        assert first is not None
        assert (first.op, first.step) == ("torch.Tensor.amax", 0)


@pytest.mark.parametrize(("off", "explained"), [(2e-4, True), (2e-2, False)])
def test_the_gradient_of_a_sure_guess_is_what_is_left_of_two_near_ones(off: float, explained: bool) -> None:
    """Of p - 1 for p = 0.999 a thousandth is left: a rounding of p is a thousand times as much of it."""
    gradient, logs = np.zeros((64, 10), np.float32), np.full((64, 10), np.log(1e-4), np.float32)
    gradient[:, 0], logs[:, 0] = -1, np.log1p(-9e-4)
    made = gradient + np.exp(logs)
    noise = np.random.default_rng(0).standard_normal(made.shape)
    runs = Recording(), Recording()
    for run, by in zip(runs, (0, off), strict=True):
        result = (made + by * np.linalg.norm(made) * noise / np.linalg.norm(noise)).astype(np.float32)
        run.call("aten::_log_softmax_backward_data", [gradient, logs], [result], phase="backward")
    (call,) = judged(*runs)
    assert (call.ratio <= 1) == explained


def test_one_element_stored_in_float32_may_be_off_by_a_unit_of_what_it_was_computed_in() -> None:
    """A linear layer under autocast gives float32 gradients back, each a number of bfloat16."""
    given = normal(32, 32, seed=1).astype(ml_dtypes.bfloat16)
    made = normal(32, 32, seed=2).astype(ml_dtypes.bfloat16)
    beside = made.copy()
    beside[3, 4] = np.nextafter(beside[3, 4], ml_dtypes.bfloat16(9))
    for wrong, ratio_over in ((beside, False), (changed_at(made), True)):
        runs = Recording(), Recording()
        for run, result in zip(runs, (made, wrong), strict=True):
            x = normal(32, 32, seed=3)
            forward = run.call("torch.nn.functional.linear", [x], [normal(32, 32, seed=4).astype(ml_dtypes.bfloat16)], level="api")
            grads = {"grad_output.0": given}, {"grad_input.0": result.astype(np.float32)}
            run.call("torch.nn.functional.linear", *grads, level="api", phase="backward", forward=forward)
        assert (judged(*runs)[-1].ratio > 1) == ratio_over


def changed_at(values: Array) -> Array:
    """Return values of which one is wrong by half of the largest."""
    found = values.copy()
    found[3, 4] += values.max() / 2
    return found


def test_a_gradient_of_which_nothing_is_left_is_not_blamed(tmp_path: Path) -> None:
    one = STRANGERS["retention"]
    strangers.run(one, PLAIN, "float32", tmp_path / "plain")
    with simdev.noise(strangers.REORDERED):
        strangers.run(one, PLAIN, "float32", tmp_path / "reordered")
    result = trueup.compare(tmp_path / "plain", tmp_path / "reordered", level=["module", "api"])
    assert result.verdict == "aligned", result.sentence


@pytest.mark.parametrize(("row", "precision", "level"), [
    ("gpt2: sdpa against eager", "float16", "api"),  # a model is given its weights too
    ("vit linear: einsum", "autocast", "module"),  # results that two dtypes hold are equal by chance
    ("linear: in float64", "autocast", "aten"),
])  # fmt: skip
def test_right_implementations_in_half_precision_are_not_blamed(row: str, precision: str, level: str, tmp_path: Path) -> None:
    bench = implementations.Bench(tmp_path)
    (chosen,) = (one for one in implementation_right.rows() if one.name == row)
    bench.record(chosen, precision, chosen.baseline, tmp_path / "baseline")
    bench.record(chosen, precision, chosen.candidate, tmp_path / "candidate")
    result = trueup.compare(tmp_path / "baseline", tmp_path / "candidate", level=implementations.LEVELS[level])
    assert result.culprit is None, result.sentence


@pytest.mark.parametrize(("row", "precision", "level"), [
    ("loss: by hand", "bfloat16", "module"),  # between modules a loss is several calls, each of which rounds
    ("bert gelu: by erf", "autocast", "module"),  # a bias of the keys that changes nothing beyond a rounding to bfloat16
    ("vit linear: as a convolution", "float16", "aten"),  # a run of calls reads what an operator inside a compared function made
])  # fmt: skip
def test_right_implementations_in_half_precision_are_aligned(row: str, precision: str, level: str, tmp_path: Path) -> None:
    bench = implementations.Bench(tmp_path)
    (chosen,) = (one for one in implementation_right.rows() if one.name == row)
    assert [cell.word for cell in bench.cells(chosen, precision, "right", [level])] == ["aligned"]
