"""What rounding explains: two right ways to compute stay below 1, a wrong one is far above 10."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.comparison.verdict import judge
from trueup.comparison.verdict.judged import Judged
from trueup.foundation.facts.slots import TF32
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.store.declared import Precision, precision_of
from verdict.captures import CRITERION, Array, Recording, Slot, changed, judged, normal

F = np.float32
Kernel = Callable[..., Array]


def ratio(op: str, inputs: Any, first: Any, second: Any, **options: Any) -> float:
    return judge_one(op, inputs, first, second, **options).ratio


def judge_one(
    op: str, inputs: Any, first: Any, second: Any, *, others: Any = None, precision: Precision | None = None, **call: Any
) -> Judged:
    """Judge one call with these inputs (``others`` on the candidate) and these two results."""
    runs = Recording(), Recording()
    for run, given_, result in zip(runs, (inputs, inputs if others is None else others), (first, second), strict=True):
        run.call(op, given_, result if isinstance(result, (list, dict)) else [result], **call)
    return judged(*runs, precision)[0]


# ---------------------------------------------------------------- kernels, each computed in several right ways
def sequential(x: Array, axis: int) -> Array:
    return np.asarray(np.cumsum(x, axis=axis, dtype=F).take(-1, axis=axis))


SUMS: dict[str, Kernel] = {
    "sequential": lambda x: sequential(x, 0),
    "reversed": lambda x: sequential(x[::-1], 0),
    "pairwise": lambda x: np.ascontiguousarray(x.T).sum(axis=1, dtype=F),
    "blocked": lambda x: sum((sequential(part, 0) for part in np.array_split(x, min(7, len(x)))), np.zeros(x.shape[1], F)),
    "float64": lambda x: x.astype(np.float64).sum(axis=0).astype(F),
}


def by_rank_one(a: Array, b: Array) -> Array:
    out = np.zeros((a.shape[0], b.shape[1]), F)
    for k in range(a.shape[1]):
        out += a[:, k : k + 1] * b[k : k + 1]
    return out


PRODUCTS: dict[str, Kernel] = {
    "blas": lambda a, b: a @ b,
    "float64": lambda a, b: (a.astype(np.float64) @ b).astype(F),
    "rank one": by_rank_one,
    "reversed": lambda a, b: np.ascontiguousarray(a[:, ::-1]) @ np.ascontiguousarray(b[::-1]),
}


def softmax(x: Array, dtype: Any = F, *, shift: bool = True) -> Array:
    y = x.astype(dtype)
    e = np.exp(y - y.max(-1, keepdims=True) if shift else y)
    return np.asarray((e / e.sum(-1, keepdims=True)).astype(F))


def layer_norm(x: Array, dtype: Any = F, *, one_pass: bool = False, eps: float = 1e-5) -> Array:
    y = x.astype(dtype)
    mean = y.mean(-1, keepdims=True, dtype=dtype)
    if one_pass:
        variance = np.square(y).mean(-1, keepdims=True, dtype=dtype) - mean * mean
    else:
        variance = np.square(y - mean).mean(-1, keepdims=True, dtype=dtype)
    return np.asarray(((y - mean) / np.sqrt(variance + dtype(eps))).astype(F))


def erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x.astype(np.float64))


def gelu(x: Array) -> Array:
    return (x.astype(np.float64) * 0.5 * (1 + erf(x / math.sqrt(2)))).astype(F)


def gelu_float32(x: Array) -> Array:
    return np.asarray(x * F(0.5) * (F(1) + erf(x * F(math.sqrt(0.5))).astype(F)))


def gelu_tanh(x: Array) -> Array:
    return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).astype(F)


SEEDS = st.integers(0, 10_000)
SIZES = st.integers(1, 300)
RIGHT = settings(max_examples=25, deadline=None)


# ---------------------------------------------------------------- rounding is explained
@RIGHT
@given(SEEDS, st.integers(2, 4000), SIZES, st.floats(-3, 3), st.sampled_from(list(SUMS)), st.sampled_from(list(SUMS)))
def test_sums_in_any_order(seed: int, rows: int, columns: int, mean: float, first: str, second: str) -> None:
    x = normal(rows, min(columns, 40), seed=seed) + F(mean)
    assert ratio("aten::sum", [x], SUMS[first](x), SUMS[second](x), arguments={"dim": 0}) < 1
    assert ratio("aten::mean", [x], SUMS[first](x) / F(rows), SUMS[second](x) / F(rows)) < 1


@RIGHT
@given(SEEDS, SIZES, st.integers(1, 600), SIZES, st.sampled_from(list(PRODUCTS)), st.sampled_from(list(PRODUCTS)))
def test_products_in_any_order(seed: int, m: int, k: int, n: int, first: str, second: str) -> None:
    a, b = normal(min(m, 60), k, seed=seed), normal(k, min(n, 60), seed=seed + 1)
    assert ratio("aten::mm", [a, b], PRODUCTS[first](a, b), PRODUCTS[second](a, b)) < 1
    bias = normal(b.shape[1], seed=seed + 2)
    results = [PRODUCTS[kernel](a, b) + bias for kernel in (first, second)]
    assert ratio("aten::addmm", [bias, a, b], *results) < 1
    inputs = {"input.0": a, "input.weight": np.ascontiguousarray(b.T), "input.bias": bias}
    assert ratio("torch.nn.functional.linear", inputs, *results, level="api") < 1


@RIGHT
@given(SEEDS, SIZES, st.integers(2, 500), st.floats(0.1, 8))
def test_softmax_and_its_logarithm(seed: int, rows: int, columns: int, scale: float) -> None:
    x = normal(min(rows, 50), columns, seed=seed) * F(scale)
    right = softmax(x, np.float64)
    assert ratio("aten::_softmax", [x], right, softmax(x)) < 1
    assert ratio("aten::_softmax", [x], right, softmax(x, shift=False)) < 1
    shifted = x - x.max(-1, keepdims=True)
    other = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True, dtype=F))
    assert ratio("aten::_log_softmax", [x], np.log(softmax(x, np.float64).astype(np.float64) + 1e-300).astype(F), other) < 5


@RIGHT
@given(SEEDS, SIZES, st.integers(8, 800), st.floats(-1, 1))
def test_layer_norm_in_one_pass_or_two(seed: int, rows: int, columns: int, mean: float) -> None:
    x = normal(min(rows, 50), columns, seed=seed) + F(mean)
    assert ratio("aten::native_layer_norm", [x], layer_norm(x, np.float64), layer_norm(x)) < 1
    assert ratio("aten::native_layer_norm", [x], layer_norm(x), layer_norm(x, one_pass=True)) < 1


@RIGHT
@given(SEEDS, st.integers(16, 300))  # a single element of the tail cancels more
def test_gelu(seed: int, size: int) -> None:
    x = normal(size, seed=seed)
    assert ratio("aten::gelu", [x], gelu(x), gelu_float32(x)) < 1


@RIGHT
@given(SEEDS, SIZES, st.floats(-2, 2))
def test_fused_multiply_add(seed: int, size: int, alpha: float) -> None:
    x, y = normal(size, seed=seed), normal(size, seed=seed + 1)
    fused = (x.astype(np.float64) + alpha * y.astype(np.float64)).astype(F)
    assert ratio("aten::add", [x, y], x + F(alpha) * y, fused) < 1


def test_what_is_left_of_a_cancellation_is_rounding() -> None:
    x = normal(100)
    zero = np.zeros(100, F)
    left = np.spacing(x)
    assert ratio("aten::sub", [x, x], zero, left) == 0
    assert ratio("aten::sub", [x, x], zero, x * F(0.01)) == math.inf
    assert ratio("aten::relu", [x], zero, left) == math.inf


# ---------------------------------------------------------------- errors of the inputs are explained
@RIGHT
@given(SEEDS, st.floats(1e-7, 1e-2))
def test_errors_of_the_inputs_pass_through(seed: int, relative: float) -> None:
    a, b = normal(30, 40, seed=seed), normal(40, 20, seed=seed + 1)
    c = changed(a, relative, seed=seed + 2)
    assert ratio("aten::mm", [a, b], a @ b, c @ b, others=[c, b]) < 1
    assert ratio("aten::relu", [a], np.maximum(a, 0), np.maximum(c, 0), others=[c]) < 1
    assert ratio("aten::_softmax", [a], softmax(a), softmax(c), others=[c]) < 1
    assert ratio("aten::native_layer_norm", [a], layer_norm(a), layer_norm(c), others=[c]) < 1
    assert ratio("aten::gelu", [a], gelu(a), gelu(c), others=[c]) < 1
    assert ratio("aten::sum", [a], a.sum(0), c.sum(0), others=[c]) < 1
    assert ratio("aten::mul", [a, a], a * a, c * c, others=[c, c]) < 1


def test_the_error_of_a_mean_is_that_of_what_it_was_taken_of() -> None:
    """A mean next to zero is off by no more than what it is taken of, which is far more relative to it."""
    runs = Recording(), Recording()
    x = normal(16, 512)
    x -= x.mean(1, keepdims=True) - np.float32(1e-3)
    for run, off in zip(runs, (0.0, 2e-4), strict=True):
        given = x + np.float32(off)
        made = [layer_norm(given), given.mean(1, keepdims=True), 1 / given.std(1, keepdims=True)]
        run.call("aten::native_layer_norm", [given], made)
    (call,) = judged(*runs)
    assert call.slot_expected["output.1"] > call.call.slots["output.1"].relative > 0.1
    assert call.slot_expected["output.0"] < 0.02


def test_the_error_of_a_gradient_that_cancels_is_that_of_what_it_sums() -> None:
    """Before a batch norm the gradient of a bias is next to zero, and off by all of itself where rows are off by little."""
    runs = Recording(), Recording()
    x, gradient = normal(48, 32), normal(48, 32, seed=1)
    gradient -= gradient.mean(0) - np.float32(1e-7)
    for run, off in zip(runs, (0.0, 1e-3), strict=True):
        given = changed(gradient, off)
        made = [given, (given * x).sum(0), given.sum(0)]
        run.call("aten::native_layer_norm_backward", [given, x, normal(32, seed=3)], made, phase="backward")
    (call,) = judged(*runs)
    assert call.slot_expected["output.2"] > call.call.slots["output.2"].relative > 1
    assert call.slot_expected["output.1"] < 0.05


def test_a_flipped_mask_is_carried() -> None:
    x = normal(200, 200)
    y = changed(x, 1e-6)
    assert ratio("aten::gt", [x], x > 0, y > 0, others=[y]) < 1
    pooled = [z.reshape(-1, 4) for z in (x, y)]
    results = [[z.max(1), z.argmax(1)] for z in pooled]
    assert ratio("aten::max_pool2d_with_indices", [pooled[0]], *results, others=[pooled[1]]) < 1


def test_one_element_may_flip_where_none_is_expected_to() -> None:
    x, g = normal(400), normal(400, seed=1)
    y = changed(x, 1e-7)
    x[7], y[7] = 1e-8, -1e-8
    passed = [np.where(z > 0, g, 0) for z in (x, y)]
    assert 0.3 < ratio("aten::threshold_backward", [g, x], *passed, others=[g, y]) < 1


@pytest.mark.parametrize("op", ["aten::rsqrt", "aten::reciprocal"])
def test_an_inverse_is_as_wrong_as_its_smallest_elements(op: str) -> None:
    def inverse(x: Array) -> Array:
        return np.asarray(1 / np.sqrt(x) if "sqrt" in op else 1 / x)

    even, uneven = 1 + np.abs(normal(300)) / 4, np.linspace(0.01, 2, 300, dtype=F)
    for x in (even, uneven):
        y = changed(x, 1e-5)
        assert ratio(op, [x], inverse(x), inverse(y), others=[y]) < 1
    found = judge_one(op, [even], inverse(even), inverse(even) * F(1.0014), others=[changed(even, 1e-7)])
    assert found.error_out > 100 * found.expected


def attention(query: Array, key: Array, value: Array) -> Array:
    return np.asarray(softmax(query @ key.T / np.sqrt(F(query.shape[1])), F) @ value)


@pytest.mark.parametrize("size", [1, 3])
def test_errors_of_large_logits_are_amplified_by_attention(size: int) -> None:
    query, key, value = (normal(60, 16, seed=seed) * F(scale) for seed, scale in ((1, size), (2, size), (3, 1)))
    other = changed(query, 1e-3, seed=9)
    results = attention(query, key, value), attention(other, key, value)
    op = "torch.nn.functional.scaled_dot_product_attention"
    found = judge_one(op, [query, key, value], *results, others=[other, key, value], level="api")
    assert 0.02 < found.ratio < 1
    assert found.expected == pytest.approx(8e-3 * size**2, rel=0.3)
    assert (found.error_out > 1.5e-3) == (size == 3), "the errors of small logits are not amplified"
    assert ratio(op, [query, key, value], *results, level="api") > 1


def test_the_gradient_of_a_product_is_made_of_two_factors() -> None:
    """Neither what the forward returned nor its bias is in it; addmm has the bias first, where linear has it last."""
    x, w, g = normal(64, 32), normal(32, 16, seed=1), normal(64, 16, seed=2) * F(1e-3)
    bias = normal(16, seed=3)
    y = changed(x, 1e-3)
    runs = Recording(), Recording()
    for run, saved in zip(runs, (x, y), strict=True):
        seq = run.call("torch.addmm", [bias, saved, w], [bias + saved @ w], level="api")
        wrong = F(1 if saved is x else 1.05)
        gradients = {"grad_input.0": g.sum(0), "grad_input.1": g @ w.T, "grad_input.2": saved.T @ g * wrong}
        run.call("torch.addmm", {"grad_output.0": g}, gradients, level="api", phase="backward", forward=seq)
    found = judged(*runs)[1]
    assert found.worst == "grad_input.2"
    assert 2e-3 < found.expected < 2e-2
    assert found.slot_expected["grad_input.0"] < 1e-4


def test_the_gradients_of_a_convolution_sum_over_batch_positions_and_window() -> None:
    """So at each level, and as many as the matrix product sums that the convolution is."""
    x, weight, g = normal(2, 3, 34, 34), normal(16, 3, 3, 3, seed=1), normal(2, 16, 32, 32, seed=2)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3)).transpose(1, 4, 5, 0, 2, 3).reshape(27, -1)
    rows = g.transpose(1, 0, 2, 3).reshape(16, -1)
    of_weight = (rows @ windows.T).reshape(weight.shape)
    of_input = changed(x, 0.1)
    api = judge_one(
        "torch.nn.functional.conv2d", {"grad_output.0": g, "input.0": x, "input.1": weight},
        {"grad_input.0": of_input, "grad_input.1": of_weight}, {"grad_input.0": x, "grad_input.1": changed(of_weight, 1e-6)},
        level="api", phase="backward",
    ).slot_expected  # fmt: skip
    aten = judge_one(
        "aten::convolution_backward", [g, x, weight], [of_input, of_weight], [x, changed(of_weight, 1e-6)], phase="backward"
    ).slot_expected
    product = judge_one("aten::mm", [rows, windows.T], rows @ windows.T, changed(rows @ windows.T, 1e-6)).expected
    assert api["grad_input.1"] == pytest.approx(product, rel=0.3)
    assert [api["grad_input.0"], api["grad_input.1"]] == pytest.approx([aten["output.0"], aten["output.1"]], rel=0.01)


@pytest.mark.parametrize("index", [np.array([3, 4]), np.array([True, False])])
def test_another_index_or_mask_explains_everything(index: Array) -> None:
    x = normal(10)
    other = index[::-1].copy()
    found = judge_one("aten::index", [x, index], normal(2), normal(2, seed=9), others=[x, other])
    assert found.expected == math.inf
    assert found.ratio == 0


def test_nan_among_the_inputs_explains_everything() -> None:
    x, y = normal(10), normal(10)
    y[3] = np.nan
    assert ratio("aten::mul", [x, x], x * x, y * y, others=[y, y]) == 0


def test_new_nan_among_the_outputs_is_not_explained() -> None:
    x, y = normal(10), normal(10)
    y[3] = np.nan
    assert ratio("aten::mul", [x, x], x, y) == math.inf


# ---------------------------------------------------------------- gross faults are not
def faults() -> dict[str, tuple[str, list[Array], Array, Array]]:
    x, w = normal(64, 600), normal(600, 32, seed=1)
    last, tied, counted = (x @ w), np.array([1.0, 3.0, 3.0], F), np.arange(10)
    narrow = x.copy().view(np.uint32) & np.uint32(0xFFFF0000)
    return {
        "bf16 accumulation": ("aten::mm", [x, w], last, narrow.view(F) @ w),
        "K beyond 512 dropped": ("aten::mm", [x, w], last, x[:, :512] @ w[:512]),
        "tanh for erf": ("aten::gelu", [x], gelu(x), gelu_tanh(x)),
        "epsilon": ("aten::native_layer_norm", [x], layer_norm(x), layer_norm(x, eps=1e-3)),
        "scale of attention": ("aten::_softmax", [x], softmax(x), softmax(x / F(8))),
        "a tile not summed": ("aten::sum", [x], x.sum(0), x[:-8].sum(0)),
        "a shifted row": ("aten::clone", [x], x, np.roll(x, 1, 0)),
        "a stale value": ("aten::copy_", [x, x], x, changed(x, 1e-3)),
        "ties": ("aten::argmax", [tied], np.array(1), np.array(2)),
        "an index": ("aten::arange", [], counted, counted + 1),
        "the sign of a gradient": ("aten::tanh_backward", [x], x, -x),
        "a mean by n - 1": ("aten::mean", [x], x.mean(0), x.mean(0) * F(64 / 63)),
        "saturation": ("aten::sum", [np.full(100, 1e3, F)], np.array(1e5, F), np.array(65504, F)),
        "epsilon inside the root": ("aten::addcdiv_", [x, x, x], x, changed(x, 1e-3)),
    }


@pytest.mark.parametrize("name", faults())
def test_gross_faults_exceed_what_is_explained_tenfold(name: str) -> None:
    op, inputs, right, wrong = faults()[name]
    assert ratio(op, inputs, right, wrong) > 10


def test_what_is_compared_is_certainly_wrong_of_equal_numbers_alone() -> None:
    """Of numbers that nearly tie any part may tie no more, and their norms do not say how many those are."""
    a, b = normal(64, 64), normal(64, 64, seed=1)
    apart = changed(a, 1e-2)
    assert judge_one("aten::eq", [a, b], a == a, a == b).is_certain(CRITERION)
    assert not judge_one("aten::eq", [a, a], a == a, apart == a, others=[apart, a]).is_certain(CRITERION)


# ---------------------------------------------------------------- TF32 where a run declares it
def tf32(x: Array) -> Array:
    return np.asarray((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(F)


def test_tf32_is_explained_where_it_is_declared() -> None:
    a, b = normal(50, 200), normal(200, 50, seed=1)
    products = a @ b, tf32(a) @ tf32(b)
    assert ratio("aten::mm", [a, b], *products) > 10
    assert ratio("aten::mm", [a, b], *products, precision=Precision(matmul=TF32)) < 1
    assert ratio("aten::mm", [a, b], *products, precision=Precision(convolution=TF32)) > 10
    assert ratio("aten::add", [a, a], a + a, tf32(a + a), precision=Precision(TF32, TF32)) > 10
    found = judge_one("aten::mm", [a, b], products[0], changed(products[0], 5e-3), precision=Precision(matmul=TF32))
    assert found.declared == pytest.approx(2 * TF32, rel=0.2)
    assert found.is_certain(CRITERION), "the products of rounded operands are known, and need no room for devices"
    double = [x.astype(np.float64) for x in (a, b, *products)]
    assert ratio("aten::mm", double[:2], *double[2:], precision=Precision(TF32, TF32)) > 10


def test_tf32_of_an_attention_is_that_of_its_products() -> None:
    query, key, value = (normal(60, 16, seed=seed) for seed in (1, 2, 3))
    op, inputs, precision = "torch.nn.functional.scaled_dot_product_attention", [query, key, value], Precision(matmul=TF32)
    right = attention(*inputs)
    assert ratio(op, inputs, right, attention(*map(tf32, inputs)), precision=precision, level="api") < 1
    found = judge_one(op, inputs, right, right * F(1.02), precision=precision, level="api")
    assert found.is_certain(CRITERION)


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({}, "cuda:0", (0, 0)),
        ({"cuda.matmul.allow_tf32": "True"}, "cuda:0", (TF32, 0)),
        ({"cudnn.allow_tf32": "True"}, "cuda:0", (0, TF32)),
        ({"float32_matmul_precision": "high"}, "cuda:0", (TF32, 0)),
        ({"cuda.matmul.allow_tf32": "True", "cudnn.allow_tf32": "True"}, "cpu", (0, 0)),
        ({"npu.matmul.allow_hf32": "True"}, "npu:0", (TF32, 0)),
        ({"npu.conv.allow_hf32": "True"}, "npu:0", (0, TF32)),
    ],
)
def test_what_a_run_declares(environment: dict[str, str], device: str, expected: tuple[float, float]) -> None:
    found = precision_of([{}, environment], [["cpu"], [device, "cpu"]])
    assert (found.matmul, found.convolution) == expected


def test_what_is_explained_does_not_depend_on_how_a_step_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module whose insides nobody recorded may have computed in bfloat16, which another module of the step shows."""
    x, w = normal(8, 8), normal(8, 8, seed=1)
    runs = Recording(), Recording()
    for run, factor in zip(runs, (1.0, 1.001), strict=True):
        for scope in ("a", "b", "c"):
            run.call("Attention", [x, w], [(x @ w * factor).astype(np.float32)], level="module", scope=scope)
        run.call("Attention", [x, w], [(x @ w).astype(ml_dtypes.bfloat16)], level="module", scope="d")
    whole = [call.expected for call in judged(*runs)]
    monkeypatch.setattr(judge, "MANY", 1)
    assert [call.expected for call in judged(*runs)] == whole
    assert whole[0] > 2.0**-9


# ---------------------------------------------------------------- nothing not measured is explained away
def test_an_input_that_was_not_measured_excuses_nothing() -> None:
    x = normal(10)
    unknown = Slot(normal(10), "")
    assert judge_one("aten::mul", [x, unknown], x, x).incomparable is None
    found = judge_one("aten::mul", [x, unknown], x, -x)
    assert found.ratio == 0
    assert found.incomparable == Reason(Why.INPUTS)


def test_fresh_memory_that_is_overwritten_does_not_matter() -> None:
    fresh, x = Slot(normal(10), ""), normal(10)
    assert ratio("aten::copy_", [fresh, x], x, -x) > 10
    assert judge_one("aten::add_", [fresh, x], x, -x).incomparable


def test_an_output_that_was_not_measured_is_incomparable() -> None:
    x = normal(10)
    assert judge_one("aten::mul", [x], Slot(x, ""), Slot(x, "")).incomparable == Reason(Why.NO_STATISTICS)
    assert judge_one("aten::mul", [x], x, normal(5, 3)).incomparable == Reason(Why.SHAPES, ("(10,)", "(5, 3)"))


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
@pytest.mark.parametrize("read", [True, False])
def test_an_output_of_one_side_is_incomparable_where_it_is_read_or_lasts(read: bool, phase: str) -> None:
    x, index = normal(10), np.arange(3)
    runs = Recording(), Recording()
    for run, outputs in zip(runs, ({"output.0": x, "output.1": index}, {"output.0": x}), strict=True):
        run.call("aten::max", [x], outputs, phase=phase)
    runs[0].call("aten::sum", [index if read else x], [normal(1)], scope="reader")
    found = judged(*runs)[0].incomparable
    assert found == (Reason(Why.ONE_SIDED, ("output.1",)) if read or phase == "optimizer" else None)


def test_digests_tell_that_a_view_is_wrong_and_not_that_a_product_is() -> None:
    x, y = Slot(normal(4, 4), "digest"), Slot(normal(4, 4, seed=1), "digest")
    assert not judge_one("aten::t", [x], x, y).unsized
    assert judge_one("aten::t", [x], x, y).ratio == math.inf
    assert judge_one("aten::mm", [x, x], x, y).unsized
    assert judge_one("aten::t", [x], x, y, others=[y]).unsized


def test_the_backward_of_a_function_sees_what_its_forward_saved() -> None:
    x, g = normal(20), normal(20, seed=1)
    y = changed(x, 1e-3)
    runs = Recording(), Recording()
    for run, saved in zip(runs, (x, y), strict=True):
        seq = run.call("torch.Tensor.mul", [saved, saved], [saved * saved], level="api")
        gradient = {"grad_output.0": g}, {"grad_input.0": 2 * saved * g}
        run.call("torch.Tensor.mul", *gradient, level="api", phase="backward", forward=seq)
    found = judged(*runs)[1]
    assert found.error_in == pytest.approx(1e-3, rel=0.3)
    assert found.ratio < 1


def test_a_weights_gradient_is_off_as_its_input_is_beside_a_longer_bias() -> None:
    x, weight, bias, gradient = normal(2, 8, seed=1), normal(64, 8, seed=2), normal(64, seed=3), normal(2, 64, seed=4)
    far = changed(x, 0.5)
    given_ = {"grad_output.0": gradient, "input.0": x, "input.1": weight, "input.2": bias}
    results = ({"grad_input.1": gradient.T @ side} for side in (x, far))
    assert ratio("torch.nn.functional.linear", given_, *results, others=given_ | {"input.0": far}, phase="backward") <= 1
