"""What a call breaks by itself: laws that the baseline keeps, asked where inputs differ anyway; settings that the program chose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from trueup.comparison.result.summary import of_a_kind
from trueup.comparison.verdict.locate import rank_culprits
from trueup.foundation.words.reasons import joined
from verdict.captures import Array, Recording, changed, located, normal

WIDTH = 24


def softmax(x: Array) -> Array:
    found: Array = np.exp(x - x.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def softmax_backward(gradient: Array, output: Array, *, wrong: bool = False) -> Array:
    whole = gradient * output
    return (whole if wrong else whole - output * whole.sum(-1, keepdims=True)).astype(np.float32)


def attention(run: Recording, *, first: float = 0.0, wrong: bool = False, layers: int = 2) -> None:
    """Record a product that may be wrong, and softmax backwards that read it."""
    x = normal(32, WIDTH, seed=1)
    logits = changed((x @ normal(WIDTH, WIDTH, seed=2)).astype(np.float32), first, seed=9)
    run.call("aten::mm", [x, normal(WIDTH, WIDTH, seed=2)], [logits])
    for layer in range(layers):
        output = softmax(logits).astype(np.float32)
        run.call("aten::_softmax", [logits], [output])
        gradient = changed(normal(32, WIDTH, seed=20 + layer), first, seed=30 + layer)
        run.call("aten::mul", [logits, output], [gradient])
        result = softmax_backward(gradient, output, wrong=wrong)
        run.call("aten::_softmax_backward_data", [gradient, output], [result], phase="backward", scope=f"layer.{layer}")
        logits = (logits + result).astype(np.float32)
        run.call("aten::add", [logits, result], [logits])


def culprits(*runs: Recording) -> list[list[tuple[str, int]]]:
    kinds = of_a_kind(rank_culprits(located(*runs).suspects))
    return [[(s.judged.call.candidate.op, s.place) for s in kind] for kind in kinds]


def test_a_gradient_that_sums_to_zero_no_more_is_wrong_by_itself() -> None:
    runs = Recording(), Recording()
    attention(runs[0])
    attention(runs[1], first=0.3, wrong=True)
    assert culprits(*runs)[:2] == [[("aten::mm", 0)], [("aten::_softmax_backward_data", 3), ("aten::_softmax_backward_data", 7)]]
    because = [joined(s.because) for s in rank_culprits(located(*runs).suspects) if "softmax" in s.judged.call.candidate.op]
    assert because[0].startswith("it breaks sum(output.0) = 0 that all 2 calls of its kind keep in the baseline (to ")


def test_a_right_operator_keeps_its_law_whatever_it_is_given() -> None:
    runs = Recording(), Recording()
    attention(runs[0])
    attention(runs[1], first=0.3)
    assert culprits(*runs) == [[("aten::mm", 0)]]


def added(run: Recording, first: float, *, times: float, op: str = "aten::add", beside: float = 0.0) -> None:
    """Record two products, and a sum of their results that may have another weight."""
    made = []
    for n in (0, 1):
        x, w = normal(32, WIDTH, seed=n), normal(WIDTH, WIDTH, seed=10 + n)
        made.append(changed((x @ w).astype(np.float32), first, seed=n))
        run.call("aten::mm", [x, w], [made[-1]])
    result: Any = made[0] + np.float32(times) * made[1] + np.float32(beside) * made[0] ** 2
    run.call(op, made, [result.astype(np.float32)])


def mixed(run: Recording, share: float, *, second: float = 1.0) -> None:
    """Record what mixup makes of a batch: two parts of it, of which one may be next to nothing, and their sum."""
    x, other = normal(32, WIDTH, seed=1), normal(32, WIDTH, seed=2)
    parts = [(x * np.float32(share)).astype(np.float32), (other * np.float32(1 - share)).astype(np.float32)]
    run.call("aten::mm", [x, other], [parts[0]])
    run.call("aten::mm", [other, x], [parts[1]])
    run.call("aten::add", parts, [(parts[0] + np.float32(second) * parts[1]).astype(np.float32)])


def test_a_sum_tells_nothing_of_an_input_that_hardly_counts() -> None:
    """Beside what is 10^9 times as large, rounding hides by what an input is multiplied."""
    runs = Recording(), Recording()
    mixed(runs[0], 1e-9)
    mixed(runs[1], 0.7)
    assert ("aten::add", 2) not in [one for kind in culprits(*runs) for one in kind]
    runs = Recording(), Recording()
    mixed(runs[0], 0.4)
    mixed(runs[1], 0.7, second=0.9)
    assert [("aten::add", 2)] in culprits(*runs)


@pytest.mark.parametrize("op", ["aten::add", "torch.Tensor.add_"])
@pytest.mark.parametrize("candidate", [{"times": 0.9}, {"times": 1.0, "beside": 0.2}])
def test_a_sum_of_other_parts_is_wrong_by_itself(candidate: dict[str, float], op: str) -> None:
    runs = Recording(), Recording()
    added(runs[0], 0.0, times=1.0, op=op)
    added(runs[1], 0.3, op=op, **candidate)
    assert culprits(*runs) == [[("aten::mm", 0), ("aten::mm", 1)], [(op, 2)]]


def test_a_sum_of_what_differs_passes_it_on() -> None:
    runs = Recording(), Recording()
    added(runs[0], 0.0, times=1.0)
    added(runs[1], 0.3, times=1.0)
    assert culprits(*runs) == [[("aten::mm", 0), ("aten::mm", 1)]]


@pytest.mark.parametrize("lost", [False, True])
def test_a_sum_is_kept_whatever_is_chosen(lost: bool) -> None:
    runs = Recording(), Recording()
    for run, rows in zip(runs, (20, 21), strict=True):
        for n in range(3):
            x, w = normal(32, WIDTH, seed=n), normal(WIDTH, WIDTH, seed=10 + n)
            y = changed((x @ w).astype(np.float32), 0.3 * (rows - 20), seed=n)
            run.call("aten::mm", [x, w], [y])
            gradient = np.abs(normal(rows, WIDTH, seed=20 + n))
            put = np.zeros((32, WIDTH), np.float32)
            put[: rows - 8 * (lost and rows > 20)] = gradient[: rows - 8 * (lost and rows > 20)]
            run.call("aten::index_backward", [gradient, y], [put], phase="backward")
    found = [kind[0][0] for kind in culprits(*runs)]
    assert ("aten::index_backward" in found) is lost


def test_what_is_nearly_linear_where_it_is_small_has_no_law() -> None:
    runs = Recording(), Recording()
    for run, size in zip(runs, (1e-4, 3.0), strict=True):
        x = normal(32, WIDTH, seed=1)
        small = (normal(32, WIDTH, seed=2) * np.float32(size)).astype(np.float32)
        run.call("aten::mm", [x, x], [small])
        run.call("aten::tanh", [small], [np.tanh(small)])
    assert culprits(*runs) == [[("aten::mm", 0)]]


def test_a_number_that_was_too_small_to_show_is_no_law() -> None:
    runs = Recording(), Recording()
    for run, size in zip(runs, (1.0, 1e-8), strict=True):
        x = normal(32, WIDTH, seed=1)
        root = (np.abs(normal(32, WIDTH, seed=2)) * np.float32(size)).astype(np.float32)
        run.call("aten::mm", [x, x], [root])
        run.call("aten::add_", [root], [root + np.float32(1e-8)], arguments={"other": 1e-8})
    assert culprits(*runs) == [[("aten::mm", 0)]]


# ---------------------------------------------------------------- settings
def norms(run: Recording, epsilons: tuple[float, float], *, first: float = 0.0, read_out: bool = False) -> None:
    """Record a product, maybe a number read out of it, and two norms in a row with an epsilon each."""
    x, w = normal(32, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
    y = changed((x @ w).astype(np.float32), first, seed=3)
    run.call("aten::mm", [x, w], [y])
    if read_out:
        run.call("aten::_local_scalar_dense", [y], [])
    for n, epsilon in enumerate(epsilons):
        z = (y / np.sqrt((y**2).mean(-1, keepdims=True) + np.float32(epsilon))).astype(np.float32)
        run.call("torch.rms_norm", [y], [z], level="api", scope=f"norm{n}", arguments={"eps": epsilon})
        y = z


def test_an_epsilon_changed_twice_is_named_twice() -> None:
    runs = Recording(), Recording()
    norms(runs[0], (1e-6, 1e-6))
    norms(runs[1], (0.5, 0.5))
    assert culprits(*runs) == [[("torch.rms_norm", 1), ("torch.rms_norm", 2)]]


def test_a_number_that_nothing_was_read_out_for_is_the_programs_choice() -> None:
    runs = Recording(), Recording()
    norms(runs[0], (1e-6, 1e-6))
    norms(runs[1], (1e-6, 0.5), first=0.1)
    assert culprits(*runs) == [[("aten::mm", 0)], [("torch.rms_norm", 2)]]


def test_a_cast_reads_nothing_out() -> None:
    runs = Recording(), Recording()
    for run, (first, epsilon) in zip(runs, ((0.0, 1e-6), (0.1, 0.5)), strict=True):
        x, w = normal(32, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
        y = changed((x @ w).astype(np.float32), first, seed=3)
        run.call("aten::mm", [x, w], [y])
        run.call("torch.Tensor.float", [y], [y], level="api")
        z = (y / np.sqrt((y**2).mean(-1, keepdims=True) + np.float32(epsilon))).astype(np.float32)
        run.call("torch.rms_norm", [y], [z], level="api", arguments={"eps": epsilon})
    assert culprits(*runs) == [[("aten::mm", 0)], [("torch.rms_norm", 2)]]


def resized(run: Recording, first: float, *, weights: Array) -> None:
    """Record a product, and pairs of its elements taken together with some weights."""
    for n in range(3):
        x, w = np.abs(normal(32, WIDTH, seed=n)), np.abs(normal(WIDTH, WIDTH, seed=10 + n))
        y = changed((x @ w).astype(np.float32), first, seed=n)
        run.call("aten::mm", [x, w], [y])
        run.call("aten::avg_pool2d", [y], [(y.reshape(-1, 2) @ weights).reshape(32, -1).astype(np.float32)])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_mean_is_kept_where_elements_are_taken_together(wrong: bool) -> None:
    runs = Recording(), Recording()
    resized(runs[0], 0.0, weights=np.array([0.5, 0.5]))
    resized(runs[1], 0.3, weights=np.array([0.5, 0.45] if wrong else [0.5, 0.5]))
    assert [kind[0][0] for kind in culprits(*runs)] == ["aten::mm", "aten::avg_pool2d"][: 1 + wrong]
    if wrong:
        because = [joined(s.because) for s in rank_culprits(located(*runs).suspects) if "pool" in s.judged.call.candidate.op]
        assert because[0].startswith("it breaks mean(output.0) = mean(input.0) that all 3 calls of its kind keep")


def test_a_number_that_may_have_been_read_out_of_a_tensor_is_none() -> None:
    runs = Recording(), Recording()
    norms(runs[0], (1e-6, 1e-6), read_out=True)
    norms(runs[1], (1e-6, 0.5), first=0.1, read_out=True)
    assert culprits(*runs) == [[("aten::mm", 0)]]


@pytest.mark.parametrize(("op", "named"), [("torch.softmax", True), ("torch.nn.functional.ctc_loss", False), ("aten::", False)])
def test_what_a_function_saved_for_its_backward_is_its_own(op: str, named: bool) -> None:
    """An operator's backward, or a loss, is given probabilities that another call made, which may sum to 1.00005."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w = normal(32, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
        logits = changed((x @ w).astype(np.float32), error, seed=9)
        run.call("aten::mm", [x, w], [logits])
        output = (softmax(logits) * (1.00005 if error else 1)).astype(np.float32)
        gradient = np.abs(changed(normal(32, WIDTH, seed=20), error, seed=30))
        if op == "aten::":
            run.call("aten::_softmax_backward_data", [gradient, output], [softmax_backward(gradient, output)], phase="backward")
        else:
            seq = run.call(op, [logits], [output], level="api")
            back = {"grad_output.0": gradient}, {"grad_input.0": softmax_backward(gradient, output)}
            run.call(op, *back, level="api", phase="backward", forward=seq)
    assert len(culprits(*runs)) == 1 + named


@pytest.mark.parametrize(
    ("forward", "backward", "named"),
    [(False, False, ""), (True, False, "torch.softmax"), (False, True, "aten::_softmax_backward_data")],
)
def test_a_function_is_asked_though_its_operators_were_recorded(forward: bool, backward: bool, named: str) -> None:
    """Its backward's law tells of its forward what no operator inside does; where one of these breaks it, that one says it."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w = normal(32, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
        logits = changed((x @ w).astype(np.float32), error, seed=9)
        run.call("aten::mm", [x, w], [logits])
        output = (softmax(logits) * (1.00005 if error and forward else 1)).astype(np.float32)
        seq = run.call("torch.softmax", [logits], [output], level="api")
        run.call("aten::_softmax", [logits], [output], parent=seq)
        gradient = np.abs(changed(normal(32, WIDTH, seed=20), error, seed=30))
        made = softmax_backward(gradient, output, wrong=error > 0 and backward)
        back = {"grad_output.0": gradient}, {"grad_input.0": made}
        around = run.call("torch.softmax", *back, level="api", phase="backward", forward=seq)
        run.call("aten::_softmax_backward_data", [gradient, output], [made], phase="backward", parent=around)
    assert [kind[0][0] for kind in culprits(*runs)] == ["aten::mm", named][: 2 if named else 1]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_law_that_is_known_need_not_be_learnt(wrong: bool) -> None:
    """A single gradient in bfloat16 sums to zero within a hundredth, as one in a hundred would by chance."""
    runs = Recording(), Recording()
    for run, error in zip(runs, (0.0, 0.3), strict=True):
        x, w = normal(32, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
        logits = changed((x @ w).astype(np.float32), error, seed=9)
        run.call("aten::mm", [x, w], [logits])
        output, gradient = softmax(logits).astype(np.float32), np.abs(changed(normal(32, WIDTH, seed=20), error, seed=30))
        made = gradient * output if wrong and error else softmax_backward(gradient, output)
        made = made.astype(bfloat16)
        run.call("aten::_softmax_backward_data", [gradient, output], [made], phase="backward")
    assert [kind[0][0] for kind in culprits(*runs)] == ["aten::mm", "aten::_softmax_backward_data"][: 1 + wrong]


def cross_entropy(run: Recording, width: int, *, half: bool) -> None:
    """Record a loss and its gradient; ``half``: the sum under its logarithm is taken in float16."""
    logits = normal(64, width, seed=1)
    run.call("aten::mm", [logits], [logits := logits.copy()])
    total = np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    logs = (logits - np.log(total.astype(np.float16).astype(np.float64) if half else total)).astype(np.float32)
    loss = -logs[:, :1].mean(dtype=np.float64).astype(np.float32).reshape(())
    seq = run.call("torch.nn.functional.cross_entropy", [logits], [loss], level="api")
    gradient = np.exp(logs)
    gradient[:, 0] -= 1
    slots = {"grad_output.0": np.ones((), np.float32)}, {"grad_input.0": gradient / np.float32(64)}
    run.call("torch.nn.functional.cross_entropy", *slots, level="api", phase="backward", forward=seq)


@pytest.mark.parametrize("width", [24, 384, 16384])
def test_a_logarithm_of_a_coarse_sum_is_no_rounding_however_little_it_is(width: int) -> None:
    """A norm tells of few columns, for the loss is no reason for what its gradient is off by; of many columns a sum."""
    runs = Recording(), Recording()
    for run, half in zip(runs, (False, True), strict=True):
        cross_entropy(run, width, half=half)
    found = located(*runs).suspects
    assert any(s.certain and "cross_entropy" in s.judged.call.candidate.op for s in found)
    assert not located(runs[0], runs[0]).suspects


def indexed(run: Recording, first: float, *, lost: bool) -> None:
    """Record gradients of slices, and one of rows by index of which repeated ones may be lost."""
    x, w = normal(64, WIDTH, seed=1), normal(WIDTH, WIDTH, seed=2)
    run.call("aten::mm", [x, w], [changed((x @ w).astype(np.float32), first, seed=9)])
    op, rows = "torch.Tensor.__getitem__", np.arange(64) % 16
    for n, indices in enumerate((np.arange(64), np.arange(64), rows)):
        given = normal(16 if indices is rows else 64, WIDTH, seed=10 + n)
        seq = run.call(op, [given], [given[indices]], level="api")
        gradient = changed(1 + normal(64, WIDTH, seed=20 + n), first, seed=30 + n)
        made = np.zeros(given.shape, np.float32)
        np.add.at(made, indices, gradient)
        if lost and indices is rows:
            made = gradient[-16:]
        slots = {"grad_output.0": gradient}, {"grad_input.0": made.astype(np.float32)}
        run.call(op, *slots, level="api", phase="backward", forward=seq)


@pytest.mark.parametrize("lost", [False, True])
def test_one_call_of_another_size_shows_which_sums_a_kind_keeps(lost: bool) -> None:
    runs = Recording(), Recording()
    indexed(runs[0], 0.0, lost=False)
    indexed(runs[1], 0.4, lost=lost)
    assert [kind[0][0] for kind in culprits(*runs)] == ["aten::mm", "torch.Tensor.__getitem__"][: 1 + lost]
