"""Facts of operators that hold whatever they are given: a call that fails them is a culprit behind a larger one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from trueup.comparison.verdict.locate import rank_culprits
from trueup.comparison.verdict.origins import Origins
from trueup.foundation.facts.functions import FUNCTIONS, SLOPES, steepest
from trueup.foundation.words.reasons import joined
from verdict.captures import Array, Recording, changed, judged, located, normal

SHAPE = (32, 24)
Kernel = Callable[[Array], Array]


def first(run: Recording, error: float, size: float = 1.0) -> Array:
    """Record a product that is wrong by so much, and return it."""
    x, w = normal(*SHAPE, seed=1), normal(SHAPE[1], SHAPE[1], seed=2)
    made = (changed((x @ w).astype(np.float32), error, seed=3) * np.float32(size)).astype(np.float32)
    run.call("aten::mm", [x, w], [made])
    return made


def culprits(*runs: Recording) -> list[tuple[str, str]]:
    found = rank_culprits(located(*runs).suspects)
    return [(s.judged.call.candidate.op.removeprefix("aten::"), joined(s.because)) for s in found]


def unary(run: Recording, op: str, kernel: Kernel, error: float) -> None:
    x = first(run, error, 0.15)  # where the functions bend
    run.call(op, [x], [kernel(x).astype(np.float32)])


def gelu(x: Array) -> Array:
    return FUNCTIONS["gelu"](x.astype(float))


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize(
    ("op", "right", "wrong"),
    [
        ("aten::gelu", gelu, tanh_gelu),
        ("torch.nn.functional.gelu", gelu, tanh_gelu),
        ("aten::tanh", np.tanh, lambda x: np.tanh(x) * 0.999),
        ("aten::exp", lambda x: np.exp(x / 8), lambda x: np.exp(x / 8)),
    ],
)
def test_the_largest_element_is_the_functions_of_the_largest_input(op: str, right: Kernel, wrong: Kernel) -> None:
    runs = Recording(), Recording()
    unary(runs[0], op, right, 0.0)
    unary(runs[1], op, wrong, 0.3)
    found = culprits(*runs)
    assert found[0][0] == "mm"
    if wrong is tanh_gelu or op == "aten::tanh":
        assert [name for name, _ in found[1:]] == [op.removeprefix("aten::")]
        assert "element is off by" in found[1][1]
    else:  # a function that is another one in the baseline, too, is none that is known
        assert len(found) == 1


@pytest.mark.parametrize("op", sorted(FUNCTIONS))
@pytest.mark.parametrize("error", [0.01, 0.3, 1.5])
def test_a_right_function_passes_on_what_it_gets(op: str, error: float) -> None:
    runs = Recording(), Recording()
    for run, wrong in zip(runs, (0.0, error), strict=True):
        x = first(run, wrong, 0.15)
        if op == "sqrt":
            given, x = x, np.abs(x)
            run.call("aten::abs", [given], [x])
        run.call(f"aten::{op}", [x], [FUNCTIONS[op](x.astype(float)).astype(np.float32)])
    assert [name for name, _ in culprits(*runs)] == ["mm"]


def test_of_an_infinite_range_no_slope_is_known() -> None:
    """In float16 both runs overflow alike."""
    with np.errstate(all="ignore"):
        for ends in ((-np.inf, np.inf), (0.0, np.inf), (np.nan, np.nan)):
            assert steepest(np.tanh, np.array(ends)) == (np.inf, np.inf)


def test_of_a_range_too_far_out_to_have_points_no_slope_is_known() -> None:
    """A running maximum begins at -1e38, where a number and its neighbours are one in float64."""
    with np.errstate(all="ignore"):
        assert steepest(FUNCTIONS["exp"], np.array([-1e38, -1e38])) == (math.inf, math.inf)


def test_a_number_that_is_added_is_added_to_the_smallest_element() -> None:
    def adam(run: Recording, error: float, *, inside: bool) -> None:
        x = first(run, error, 1e-3)
        root = np.abs(x)
        run.call("aten::abs", [x], [root])
        made = np.sqrt(root.astype(float) ** 2 + 1e-6) if inside else root + 1e-6
        run.call("aten::add_", [root], [made.astype(np.float32)], arguments={"1": 1e-6}, phase="optimizer")

    for inside, names in ((True, ["mm", "add_"]), (False, ["mm"])):
        runs = Recording(), Recording()
        adam(runs[0], 0.0, inside=False)
        adam(runs[1], 0.3, inside=inside)
        assert [name for name, _ in culprits(*runs)] == names


def slope_of(op: str) -> Kernel:
    known = SLOPES.get(f"{op}_backward")
    return known or (lambda x: (FUNCTIONS[op](x + 1e-4) - FUNCTIONS[op](x - 1e-4)) / 2e-4)


def backward(run: Recording, op: str, error: float, slope: Kernel) -> None:
    """Record a gradient that comes in wrong by so much, and the backward of a function."""
    gradient, x = first(run, error), normal(*SHAPE, seed=7)
    result = gradient * slope(x.astype(float))
    run.call(f"aten::{op}_backward", [gradient, x], [result.astype(np.float32)], phase="backward")


@pytest.mark.parametrize("op", ["gelu", "silu", "mish", "tanh", "sigmoid"])
@pytest.mark.parametrize("error", [0.01, 0.3, 1.5])
def test_a_gradient_is_off_by_the_steepest_slope_at_most(op: str, error: float) -> None:
    runs = Recording(), Recording()
    backward(runs[0], op, 0.0, slope_of(op))
    backward(runs[1], op, error, slope_of(op))
    assert [name for name, _ in culprits(*runs)] == ["mm"]


def test_a_gradient_that_is_off_by_more_is_wrong_by_itself() -> None:
    runs = Recording(), Recording()
    backward(runs[0], "silu", 0.0, slope_of("silu"))
    backward(runs[1], "silu", 0.05, lambda x: 1 / (1 + np.exp(-x)))
    found = culprits(*runs)
    assert [name for name, _ in found] == ["mm", "silu_backward"]
    assert found[1][1].startswith("its inputs' errors can make ")
    assert found[1][1].endswith(" of its error at most, by its slope")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_is_zero_where_the_activation_is(wrong: bool) -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.5), strict=True):
        gradient, result = first(run, error), np.maximum(normal(*SHAPE, seed=7), 0)
        passes = gradient if wrong and error else gradient * (result > 0)
        run.call("aten::threshold_backward", [gradient, result], [passes.astype(np.float32)], phase="backward")
    found = culprits(*runs)
    assert [name for name, _ in found] == ["mm", "threshold_backward"][: 1 + wrong]
    assert not wrong or "elements of an input are zero, 0 of the result" in found[1][1]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_is_zero_where_the_result_of_its_function_is(wrong: bool) -> None:
    """The backward of a function reads no result; its forward made it."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.5), strict=True):
        x = first(run, error)
        result = np.maximum(x, 0)
        seq = run.call("torch.relu", [x], [result], level="api")
        gradient = changed(normal(*SHAPE, seed=8), error, seed=9)
        passes = gradient if wrong and error else gradient * (result > 0)
        slots = {"grad_output.0": gradient}, {"grad_input.0": passes.astype(np.float32)}
        run.call("torch.relu", *slots, level="api", phase="backward", forward=seq)
    assert [name for name, _ in culprits(*runs)] == ["mm", "torch.relu"][: 1 + wrong]


@pytest.mark.parametrize(("weight", "named"), [(0.001, False), (1.0, True)])
def test_a_sum_is_no_larger_than_its_terms(weight: float, named: bool) -> None:
    """The second moment of Adam; of inputs that differ by more than all of them nothing else is known."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 3.0), strict=True):
        gradient = first(run, error)
        moment = np.zeros(SHAPE, np.float32)
        made = (moment + np.float32(weight if error else 0.001) * gradient**2).astype(np.float32)
        run.call("aten::addcmul_", [moment, gradient, gradient], [made], arguments={"value": 0.001}, phase="optimizer")
    assert [name for name, _ in culprits(*runs)] == ["mm", "addcmul_"][: 1 + named]


@pytest.mark.parametrize("case", ["right", "last of a row", "other indices", "zeros elsewhere"])
def test_a_gradient_by_index_is_zero_where_none_goes(case: str) -> None:
    """Half of the gradients are zero, those of words that are masked; the last one of a word is all that is left."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.5), strict=True):
        changes = error > 0
        x, w = normal(512, 8, seed=1), normal(8, 8, seed=2)
        run.call("aten::mm", [x, w], [changed((x @ w).astype(np.float32), error, seed=3)])
        gradient, indices = changed(normal(512, 8, seed=4), error, seed=5), np.arange(512) % 256
        gradient[256:] = 0
        indices = indices // 2 if case == "other indices" and changes else indices
        gradient = np.roll(gradient, 64, 0) if case == "zeros elsewhere" and changes else gradient
        made = np.zeros((300, 8), np.float32)
        np.add.at(made, indices, gradient)
        if case == "last of a row" and changes:
            made[indices[300:]] = gradient[300:]
        run.call("aten::embedding_dense_backward", [gradient, indices], [made], phase="backward")
    assert [name for name, _ in culprits(*runs)] == ["mm", "embedding_dense_backward"][: 1 + (case == "last of a row")]


@pytest.mark.parametrize(("op", "level"), [("aten::addmm", "aten"), ("torch.nn.functional.linear", "api")])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_product_of_float32_has_no_elements_of_bfloat16(wrong: bool, op: str, level: str) -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w = first(run, error), normal(SHAPE[1], SHAPE[1], seed=9)
        made = (x @ w).astype(np.float32)
        if wrong and error:
            made = (made.view(np.uint32) & 0xFFFF0000).view(np.float32)
        run.call(op, [x, w], [made], level=level)
    found = culprits(*runs)
    assert [name for name, _ in found] == ["mm", op.removeprefix("aten::")][: 1 + wrong]
    assert not wrong or found[1][1] == "its elements are rounded to bfloat16, the baseline's are not"


@pytest.mark.parametrize("wrong", [False, True])
def test_nor_has_it_less_a_bias_of_few_elements(wrong: bool) -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w, bias = first(run, error), normal(SHAPE[1], 8, seed=9), normal(8, seed=10)
        made = (x @ w).astype(np.float32)
        if wrong and error:
            made = (made.view(np.uint32) & 0xFFFF0000).view(np.float32)
        run.call("aten::addmm", [bias, x, w], [made + bias])
    found = culprits(*runs)
    assert [name for name, _ in found] == ["mm", "addmm"][: 1 + wrong]
    assert not wrong or found[1][1] == "its elements are rounded to bfloat16, the baseline's are not"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_sum_of_rows_is_off_by_no_more_than_they_can_make(wrong: bool) -> None:
    """All words are one: what comes in is as large as what the last of them leaves, and the whole sum is much larger."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.2), strict=True):
        first(run, error)
        gradient = changed(1 + normal(128, 8, seed=4) / 8, error, seed=5).astype(np.float32)
        made = np.zeros((2, 8), np.float32)
        made[0] = gradient[-1] if wrong and error else gradient.sum(0)
        run.call("aten::embedding_dense_backward", [gradient, np.zeros(128, np.int64)], [made], phase="backward")
    assert [name for name, _ in culprits(*runs)] == ["mm", "embedding_dense_backward"][: 1 + wrong]


@pytest.mark.parametrize("wrong", [False, True])
def test_probabilities_move_by_half_of_what_logits_do(wrong: bool) -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.1), strict=True):
        logits = first(run, error, 0.05)
        targets = np.arange(SHAPE[0]) % SHAPE[1]
        op = "torch.nn.functional.cross_entropy"
        p = np.exp(logits.astype(float))
        p /= p.sum(1, keepdims=True)
        loss = np.array(-np.log(p[np.arange(SHAPE[0]), targets]).mean(), np.float32)
        seq = run.call(op, [logits, targets], [loss], level="api")
        p[np.arange(SHAPE[0]), targets] -= 1
        back = {"grad_input.0": (p / SHAPE[0] * (0.7 if wrong and error else 1)).astype(np.float32)}
        run.call(op, {"grad_output.0": np.ones((), np.float32)}, back, level="api", phase="backward", forward=seq)
    found = culprits(*runs)
    assert [name for name, _ in found] == ["mm", "torch.nn.functional.cross_entropy"][: 1 + wrong]


def test_what_is_left_of_terms_that_cancel_has_few_digits() -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w = first(run, error), normal(SHAPE[1], SHAPE[1], seed=9)
        left = np.full(SHAPE, 2.0**-26 if error else 3e-9, np.float32)
        left[0] = -left[0] * 2
        run.call("aten::bmm", [x, w], [left])
    assert [name for name, _ in culprits(*runs)] == ["mm"]


def test_what_copies_rounded_elements_rounds_nothing() -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x = first(run, error)
        if error:
            x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        run.call("aten::mul", [x], [x])
        run.call("aten::mm", [x, np.eye(SHAPE[1], dtype=np.float32)], [x.copy()])
    assert [name for name, _ in culprits(*runs)][1:] != ["mm"]


# ---------------------------------------------------------------- what all calls of a kind have in common
WIDE = (96, 144)


def layers(run: Recording, op: str, errors: list[float], kernel: Callable[[Array, Array], Array], scope: str = "layer.{}") -> None:
    """Record calls that get a tensor wrong by so much, each its own, and a right one."""
    first(run, max(errors))
    for layer, error in enumerate(errors):
        given, other = changed(normal(*WIDE, seed=20 + layer), error, seed=40 + layer), normal(*WIDE, seed=60 + layer)
        run.call("aten::mul", [given, given], [given])
        result = kernel(given.astype(float), other.astype(float)).astype(np.float32)
        phase = "backward" if op.endswith("_backward") else "forward"
        run.call(op, [given, other.T if phase == "forward" else other], [result], phase=phase, scope=scope.format(layer))


KERNELS: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]]] = {
    "aten::silu_backward": (lambda g, x: g * slope_of("silu")(x), lambda g, x: g / (1 + np.exp(-x))),
    "aten::bmm": (lambda a, b: a @ b.T, lambda a, b: a[:, :108] @ b[:, :108].T),
}
"""A right kernel, and one that is wrong by less than what comes in."""


@pytest.mark.parametrize("op", sorted(KERNELS))
@pytest.mark.parametrize(("errors", "wrong"), [([0.3, 0.35, 0.4, 0.3], True), ([0.3] * 3, True), ([0.3, 0.5, 0.9, 0.4], False)])
def test_an_operator_is_wrong_in_the_same_way_in_all_layers(op: str, errors: list[float], wrong: bool) -> None:
    runs = Recording(), Recording()
    layers(runs[0], op, [0.0] * len(errors), KERNELS[op][0])
    layers(runs[1], op, errors, KERNELS[op][int(wrong)])
    found = [because for name, because in culprits(*runs) if f"aten::{name}" == op]
    assert len(found) == (4 if wrong and len(errors) == 4 else 0)
    assert all(why.endswith(" smaller beside its inputs than in the baseline, alike in all 4 calls of its kind") for why in found)


@pytest.mark.parametrize(("apart", "named"), [(0.001, 4), (0.4, 0)])
def test_weights_that_differ_by_as_much_explain_that_all_layers_are_off_alike(apart: float, named: int) -> None:
    """An optimizer with another rate turns the weights of all layers towards what they are given."""
    runs = Recording(), Recording()
    for run, error, moved, kernel in zip(runs, (0.0, 0.3), (0.0, apart), KERNELS["aten::bmm"], strict=True):
        first(run, error)
        for layer in range(4):
            given = changed(normal(*WIDE, seed=20 + layer), error, seed=40 + layer)
            weight = changed(normal(*WIDE, seed=60 + layer), moved, seed=80 + layer)
            run.call("aten::mul", [given, given], [given])
            run.call("aten::bmm", [given, weight.T], [kernel(given, weight).astype(np.float32)], scope=f"layer.{layer}")
    assert len([name for name, _ in culprits(*runs) if name == "bmm"]) == named


@pytest.mark.parametrize(("size", "wrong"), [(30.0, False), (1.0, True)])
def test_a_bias_that_grew_is_no_product_that_did(size: float, wrong: bool) -> None:
    """A bias that is most of the result grows in all layers of the candidate; a small one hides no wrong product."""
    op, runs = "aten::addmm", (Recording(), Recording())
    for run, errors, grown in zip(runs, ([0.0] * 4, [0.3, 0.35, 0.4, 0.3]), (1.0, 1.0 if wrong else 1.5), strict=True):
        first(run, max(errors))
        for layer, error in enumerate(errors):
            given, other = changed(normal(*WIDE, seed=20 + layer), error, seed=40 + layer), normal(*WIDE, seed=60 + layer)
            run.call("aten::mul", [given, given], [given])
            bias = np.full(WIDE[0], grown * size, np.float32)
            result = KERNELS["aten::bmm"][int(wrong and error > 0)](given.astype(float), other.astype(float)) + bias
            run.call(op, [bias, given, other.T], [result.astype(np.float32)], scope=f"layer.{layer}")
    found = [because for name, because in culprits(*runs) if name == "addmm"]
    assert len(found) == (4 if wrong else 0)


def test_one_layer_that_is_called_again_is_no_other() -> None:
    """A weight and what came in before are the same in all its calls."""
    runs = Recording(), Recording()
    for run, wrong in zip(runs, (0, 1), strict=True):
        errors = [0.3, 0.35, 0.4, 0.3] if wrong else [0.0] * 4
        layers(run, "aten::bmm", errors, KERNELS["aten::bmm"][wrong], scope="layer")
    assert [name for name, _ in culprits(*runs)] == ["mm"]


def test_what_is_alike_is_counted_over_steps() -> None:
    op, (right, wrong) = "aten::silu_backward", KERNELS["aten::silu_backward"]
    origins, found = Origins(), []
    for _ in range(2):
        runs = Recording(), Recording()
        layers(runs[0], op, [0.0] * 2, right)
        layers(runs[1], op, [0.3, 0.4], wrong)
        found.append([s.because for s in located(*runs, origins).suspects if s.judged.call.candidate.op == op])
    assert [len(because) for because in found] == [0, 2]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_cross_entropy_is_divided_by_the_targets_it_counts(wrong: bool) -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.5), strict=True):
        logits = first(run, error).astype(float)
        targets = np.arange(SHAPE[0]) % SHAPE[1]
        counted = SHAPE[0] - 6
        divided = SHAPE[0] if wrong and error else counted
        logits[:counted][np.arange(counted), targets[:counted]] -= 12  # a target of probability near 0
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        picked = -np.log(p[np.arange(counted), targets[:counted]]).sum() / divided
        op, given = "torch.nn.functional.cross_entropy", logits.astype(np.float32)
        seq = run.call(op, [given, targets], [np.array(picked, np.float32)], level="api")
        gradient = np.zeros(SHAPE)
        gradient[:counted] = p[:counted] / divided
        gradient[np.arange(counted), targets[:counted]] -= 1 / divided
        back = {"grad_input.0": gradient.astype(np.float32)}
        run.call(op, {"grad_output.0": np.ones((), np.float32)}, back, level="api", phase="backward", forward=seq)
    found = [because for name, because in culprits(*runs) if name.endswith("cross_entropy")]
    assert found == ["it is divided by 32.0, and 26 of its targets are not ignored"][: int(wrong)]


# ---------------------------------------------------------------- what the budget knows of an operator
def loss(run: Recording, error: float, *, ignored: int) -> None:
    """Record log-probabilities that may be wrong, and a loss that is divided by how many targets it counts."""
    logits = first(run, error)
    targets = np.arange(SHAPE[0]) % SHAPE[1]
    counted = SHAPE[0] - ignored
    picked = -logits[np.arange(SHAPE[0]), targets][:counted].sum() / counted
    total = np.array(counted, np.float32)
    run.call("aten::nll_loss_forward", [logits, targets], [np.array(picked, np.float32), total])
    gradient = np.zeros(SHAPE, np.float32)
    gradient[np.arange(SHAPE[0]), targets] = -1 / counted
    its = {"input.0": np.ones((), np.float32), "input.1": logits, "input.2": targets, "input.6": total}
    run.call("aten::nll_loss_backward", its, [gradient], phase="backward")


@pytest.mark.parametrize("ignored", [0, 6])
def test_what_is_made_of_the_targets_alone_is_not_excused_by_the_logits(ignored: int) -> None:
    runs = Recording(), Recording()
    loss(runs[0], 0.0, ignored=6)
    loss(runs[1], 0.5, ignored=ignored)
    assert [name for name, _ in culprits(*runs)] == ["mm", "nll_loss_forward"][: 2 - bool(ignored)]
    forward = judged(*runs)[1]
    assert forward.slot_expected["output.1"] < 1e-5 < forward.slot_expected["output.0"]


def test_a_mean_is_off_beside_what_it_is_subtracted_from() -> None:
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 1e-3), strict=True):
        gradient, scale = normal(*SHAPE, seed=4), normal(SHAPE[1], seed=5)
        x = first(run, error)
        mean = np.full((SHAPE[0], 1), 1e-6 * (1 + 100 * error), np.float32)
        rstd = np.ones((SHAPE[0], 1), np.float32)
        inputs = {"input.0": gradient, "input.1": x, "input.3": mean, "input.4": rstd, "input.5": scale}
        run.call("aten::native_layer_norm_backward", inputs, [changed(gradient, error, seed=6)], phase="backward")
    found = judged(*runs)[1]
    assert found.error_in == pytest.approx(0.1, rel=0.01)
    assert found.expected < 0.1
