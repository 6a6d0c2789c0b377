"""The backward of calls: the gradients that a capture shows are those that Paddle computes, each with its own call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from recording import Record, Row, notes_of, rows_of

import models
import trueup
from trueup.recording.adapters.paddle.gradients import LISTS, is_safe


def tensor(*shape: int, seed: int = 0) -> paddle.Tensor:
    """Return a leaf that takes a gradient."""
    made = paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))
    made.stop_gradient = False
    return made


def backward(rows: list[Row], op: str) -> dict[str, Row]:
    """Return the slots of the backward of the first call of an operator."""
    found = [row for row in rows if row["phase"] == "backward" and row["op"].rpartition(".")[2] == op]
    return {row["slot"]: row for row in found if row["seq"] == found[0]["seq"]} if found else {}


def l2(value: Any) -> Any:
    return pytest.approx(float(np.linalg.norm(value.numpy())), rel=1e-5)


def test_a_product_has_its_own_gradients_and_not_the_sum_over_users(record: Record) -> None:
    x, w, v = tensor(4, 3), tensor(3, 5, seed=1), tensor(4, 5, seed=2)

    def run() -> None:
        ((paddle.matmul(x, w) * v).sum() + (x * 7.0).sum()).backward()

    slots = backward(record(run, level="api"), "matmul")
    assert slots["grad_output.0"]["l2"] == l2(v)
    assert slots["grad_input.0"]["l2"] == l2(v @ w.T)  # x.grad holds 7 besides
    assert slots["grad_input.1"]["l2"] == l2(w.grad)


Case = Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]

CASES: dict[str, tuple[str, Case, tuple[str, ...]]] = {
    "linear": ("linear", lambda x, w: F.linear(x, w, tensor(4, seed=5)), ("grad_input.0", "grad_input.1", "grad_input.2")),
    "same input twice": ("__mul__", lambda x, w: x * x, ("grad_input.0", "grad_input.1")),
    "split": ("split_with_num", lambda x, w: paddle.split(x * 1.0, 2, axis=1)[1], ("grad_input.0",)),
    "in place": ("add_", lambda x, w: (x * 1.0).add_(w), ("grad_input.0", "grad_input.1")),
    "a part written": ("__setitem__", lambda x, w: _written(x, w), ()),
    "norm": ("layer_norm", lambda x, w: F.layer_norm(x, [4], w[0], w[1]), ("grad_input.0", "grad_input.1", "grad_input.2")),
    "index": ("embedding", lambda x, w: F.embedding(paddle.to_tensor([1, 1, 3]), w), ("grad_input.1",)),
    "no gradient for one": ("matmul", lambda x, w: paddle.matmul(x.detach(), w), ("grad_input.1",)),
    "cut": ("__getitem__", lambda x, w: x[1:, ::2], ("grad_input.0",)),
    "by a mask": ("__getitem__", lambda x, w: x[x > 0], ("grad_input.0",)),
    "where": ("where", lambda x, w: paddle.where(x > 0, x, w), ("grad_input.1", "grad_input.2")),
    "root": ("sqrt", lambda x, w: paddle.sqrt(paddle.abs(x)), ("grad_input.0",)),
}


def _written(x: paddle.Tensor, w: paddle.Tensor) -> paddle.Tensor:
    y = x * 1.0
    y[1] = w[0]
    return y


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_of_an_operator(record: Record, name: str) -> None:
    op, compute, made = CASES[name]
    x, w = tensor(4, 4), tensor(4, 4, seed=1)
    (compute(x, w) ** 2).sum().backward()
    plain = [None if t.grad is None else t.grad.numpy().tobytes() for t in (x, w)]
    x.clear_grad(), w.clear_grad()
    rows = record(lambda: (compute(x, w) ** 2).sum().backward(), level="api")
    assert [None if t.grad is None else t.grad.numpy().tobytes() for t in (x, w)] == plain
    slots = backward(rows, op)
    assert {slot for slot in slots if slot.startswith("grad_input")} >= set(made), list(slots)
    assert name == "a part written" or any(slot.startswith("grad_output") for slot in slots)


def test_batch_norm_and_its_frozen_weight(record: Record) -> None:
    norm, x = nn.BatchNorm2D(3), tensor(2, 3, 4, 4)
    norm.weight.stop_gradient = True
    slots = backward(record(lambda: (norm(x) ** 2).sum().backward(), level="api"), "batch_norm")
    # Paddle 3.3 computes no gradient for the bias of a batch norm without one for its weight.
    assert {slot: row["l2"] for slot, row in slots.items() if "input" in slot} == {"grad_input.0": l2(x.grad)}
    assert norm.bias.grad is None


def test_a_recurrent_layer_has_the_gradients_of_all_its_weights(record: Record) -> None:
    lstm, x = nn.LSTM(3, 4), tensor(2, 5, 3)
    rows = record(lambda: (lstm(x)[0] ** 2).sum().backward())
    slots = backward(rows, "rnn")
    weights = [row["l2"] for slot, row in slots.items() if slot.startswith("grad_input.2.")]
    assert sorted(weights) == pytest.approx(sorted(float(p.grad.norm()) for p in lstm.parameters()), rel=1e-5)
    assert slots["grad_input.0"]["l2"] == l2(x.grad)
    assert backward(rows, "LSTM")["grad_input.0"]["l2"] == l2(x.grad)


def test_a_list_of_tensors_shares_no_gradient_silently(tmp_path: Path) -> None:
    x, y = tensor(2, 3), tensor(2, 3, seed=1)
    with trueup.capture(tmp_path / "capture", level="api"):
        alone = x * 1.0
        (paddle.concat([alone, y]).sum() + (y * y).sum()).backward()
    slots = backward(rows_of(tmp_path / "capture"), "concat")
    assert set(slots) == {"grad_output.0", "grad_input.0.0"}  # of y Paddle tells the sum alone
    assert any("Paddle tells only their sum" in note for note in notes_of(tmp_path / "capture"))


def test_a_layer_adds_up_what_its_parts_make_of_an_input(record: Record) -> None:
    attention, x = nn.MultiHeadAttention(4, 2), tensor(1, 3, 4)

    class Both(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.attention(x) + x

    rows = record(lambda: (Both()(x) ** 2).sum().backward(), level="module")
    assert backward(rows, "Both")["grad_input.0"]["l2"] == l2(x.grad)


def test_a_py_layer_encloses_its_operators(record: Record) -> None:
    class Cube(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            (x,) = ctx.saved_tensor()
            return gradient * 3 * x * x

    x = tensor(3)
    rows = record(lambda: Cube.apply(x).sum().backward(), level="api")
    call = next(row for row in rows if row["op"] == "Cube.apply" and row["phase"] == "forward")
    inside = {row["seq"] for row in rows if row["op"] == "paddle.Tensor.__mul__" and row["phase"] == "forward"}
    assert len(inside) == 2
    assert {row["parent"] for row in rows if row["seq"] in inside} == {call["seq"]}
    assert backward(rows, "apply")["grad_input.0"]["l2"] == l2(x.grad)
    assert {row["phase"] for row in rows if row["op"] == "paddle.Tensor.__mul__"} == {"forward", "backward"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls_name_what_they_repeat(record: Record, reentrant: bool) -> None:
    paddle.seed(0)
    first, block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.5))
    x = tensor(3, 4)
    rows = record(lambda: recompute(block, first(x), use_reentrant=reentrant).sum().backward())
    again = {row["seq"]: row for row in rows if row["phase"] == "recompute" and row["slot"] == "output.0"}
    forward = {row["seq"]: row for row in rows if row["phase"] == "forward" and row["slot"] == "output.0"}
    assert [row["op"] for row in again.values()][:3] == ["Sequential", "Linear", "paddle._C_ops.linear"]
    assert all(row["digest"] == forward[row["forward_seq"]]["digest"] for row in again.values())
    assert {row["op"] for row in rows if row["phase"] == "backward"} >= {"paddle._C_ops.relu", "paddle._C_ops.linear"}


def test_two_passes_through_a_graph_are_two_calls(record: Record) -> None:
    x = tensor(3)

    def run() -> None:
        y = paddle.tanh(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()

    rows = record(run, level="api")
    assert len({row["seq"] for row in rows if row["op"].endswith("tanh") and row["phase"] == "backward"}) == 2


def test_the_gradient_of_a_gradient(record: Record) -> None:
    x = tensor(3)

    def run() -> None:
        (slope,) = paddle.grad((x**3).sum(), x, create_graph=True)
        (slope**2).sum().backward()

    run()
    plain = x.grad.numpy().tobytes()
    x.clear_grad()
    rows = record(run, level="api")
    assert x.grad.numpy().tobytes() == plain
    assert len({row["seq"] for row in rows if row["op"].endswith("__pow__") and row["phase"] == "backward"}) >= 2


def test_nodes_that_take_no_hook_are_known() -> None:
    taken = [is_safe(f"{name}GradNode") for name in ("Matmul", "BatchNorm", "Reshape", "Conv2dTranspose", "SquareDouble")]
    x = tensor(2, 3)
    lists = [paddle.add_n([x, x]), paddle.concat([x, x]), paddle.stack([x, x]), paddle.meshgrid(x[0], x[1])[0]]
    others = ("GradNodePyLayer_Cube", "GradNodeRunProgram", "RunCustomOpNode", "GradNodeAccumulation")
    assert all(taken)
    assert not any(is_safe(name) for name in (*(made.grad_fn.name() for made in lists), *others))


def test_the_table_of_operators_on_lists_is_complete() -> None:
    """Asks the header that comes with Paddle."""
    folder = Path(paddle.sysconfig.get_include()) / "paddle" / "phi" / "api" / "include"
    text = (folder / "api.h").read_text() + (folder / "fused_api.h").read_text()
    named = re.findall(r"PADDLE_API [^;{]*?\b(\w+)\(([^;{]*)\)", text)
    lists = {op for op, arguments in named if "const std::vector<Tensor>&" in arguments and not op.endswith("_grad")}
    no_gradient = {
        "ap_facade", "ap_variadic", "check_finite_and_unscale_", "collect_fpn_proposals", "merged_adam_", "merged_momentum_",
        "sync_comm_stream", "update_loss_scaling_", "fused_adam_", "ap_trivial_fusion_begin", "ap_trivial_fusion_end",
        "fake_channel_wise_dequantize_max_abs",
    }  # fmt: skip
    indices = {op for op in lists if op.startswith("index_")}  # integers
    missing = {op for op in lists - no_gradient - indices if op.replace("_", "") not in LISTS}
    assert len(lists) > 15
    assert missing == set()


def test_a_layer_alone_does_not_take_a_sum_for_its_own(tmp_path: Path) -> None:
    class Joined(nn.Layer):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.concat([x, x * 2.0])

    x = tensor(2, 3)
    with trueup.capture(tmp_path / "capture", level="module"):
        y = x * 1.0
        (Joined()(y).sum() + (y * 5.0).sum()).backward()
    assert set(backward(rows_of(tmp_path / "capture"), "Joined")) == {"grad_output.0"}
    assert any("Paddle tells only their sum" in note for note in notes_of(tmp_path / "capture"))


@pytest.mark.parametrize("level", ["module", "api"])
@pytest.mark.parametrize("name", ["add_n", "concat", "stack", "meshgrid", "einsum", "multi_dot", "indices"])
def test_operators_on_lists_inside_a_layer_do_no_harm(tmp_path: Path, level: str, name: str) -> None:
    at = paddle.to_tensor([0, 2]), paddle.to_tensor([1, 1])
    compute = {
        "add_n": lambda x: paddle.add_n([x, x * 2]), "concat": lambda x: paddle.concat([x, x]),
        "stack": lambda x: paddle.stack([x, x]),
        "meshgrid": lambda x: sum(paddle.meshgrid(x[0], x[1])), "einsum": lambda x: paddle.einsum("ij,kj->ik", x, x),
        "multi_dot": lambda x: paddle.linalg.multi_dot([x, x.T, x]), "indices": lambda x: x[at],
    }[name]  # fmt: skip

    class Around(nn.Layer):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return compute(x)

    def run() -> bytes:
        x = tensor(3, 4)
        (Around()(x * 1.0) ** 2).sum().backward()
        return bytes(x.grad.numpy().tobytes())

    plain = run()
    with trueup.capture(tmp_path / "capture", level=level):
        assert run() == plain


@pytest.mark.parametrize("name", ["transformer", "lstm", "ctc"])
def test_every_operator_that_takes_part_has_gradients_in_and_out(tmp_path: Path, name: str) -> None:
    """What comes to a call is what those after it made, so that nothing hides between two calls."""
    training = models.build(name)
    with trueup.capture(tmp_path / "capture", model=training.model, level="api"):
        training.loss(0).backward()
    rows = rows_of(tmp_path / "capture")
    assert notes_of(tmp_path / "capture") == []
    by_call: dict[int, set[str]] = {}
    for row in rows:
        if row["phase"] == "backward":
            by_call.setdefault(row["seq"], set()).add(row["slot"].split(".")[0])
    assert all(slots == {"grad_output", "grad_input"} for slots in by_call.values())
    read = {row["digest"] for row in rows if row["slot"].startswith("grad_output")}
    made = {row["digest"] for row in rows if row["slot"].startswith("grad_input")}
    weights = {row["digest"] for row in rows if row["slot"].startswith("grad_input") and row["digest"] not in read}
    assert len(weights) < len(made)
    gradients = [p.grad.numpy().astype(np.float64) for p in training.model.parameters() if p.grad is not None]
    held = {float(np.linalg.norm(gradient)) for gradient in gradients}
    shown = [row["l2"] for row in rows if row["slot"].startswith("grad_input")]
    assert all(any(abs(norm - one) <= 1e-4 * max(norm, 1e-6) for one in shown) for norm in held)


def test_gradients_are_let_go_of(tmp_path: Path) -> None:
    """Paddle keeps what it calls a post-hook with: without care 5 gradients of 4 MB in each of 20 steps, 400 MB."""
    x = tensor(1000, 1000)

    def step() -> None:
        y = x
        for _ in range(5):
            y = paddle.tanh(y)
        y.sum().backward()
        x.clear_gradient()
        trueup.step()

    with trueup.capture(tmp_path / "capture"):
        step()
        before = resident()
        for _ in range(20):
            step()
        assert resident() - before < 100


def resident() -> float:
    """Return MB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_a_pass_inside_another_does_not_end_its_sums(record: Record) -> None:
    def another_pass(_: Any) -> None:
        z = tensor(2)
        paddle.grad((z * z).sum(), z)

    class Several(nn.Layer):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            parts = [x * 2.0, x * 3.0, x * 4.0]
            for part in parts:
                part.register_hook(another_pass)
            return parts[0] + parts[1] + parts[2]

    x, layer = tensor(3, 4), Several()
    rows = record(lambda: layer(x).sum().backward())
    gradients = [row for row in rows if row["level"] == "module" and row["phase"] == "backward" and row["slot"] == "grad_input.0"]
    assert [row["l2"] for row in gradients] == [l2(x.grad)]
