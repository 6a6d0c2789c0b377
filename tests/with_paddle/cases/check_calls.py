"""What a call of an operator or a Layer looks like in a capture."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle._C_ops import tanh as held_by_name
from paddle.base import core
from paddle.nn import functional as F
from recording import Record, Row, notes_of, rows_of

import models
import trueup
from trueup.foundation.model import TrueupError


def calls(rows: list[Row], **like: Any) -> dict[str, list[Row]]:
    """Return the rows of calls with these columns, by scope and operator."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if all(row[name] == value for name, value in like.items()):
            found.setdefault(f"{row['scope']}/{row['op']}", []).append(row)
    return found


def test_an_operator_has_inputs_arguments_outputs_and_a_line_of_the_users(record: Record) -> None:
    x = paddle.ones([2, 3])

    def run() -> None:
        paddle.matmul(x, paddle.full([4, 3], 2.0), transpose_y=True)

    rows = record(run)
    product = {row["slot"]: row for row in rows if row["op"] == "paddle._C_ops.matmul"}
    assert list(product) == ["input.0", "input.1", "arguments", "output.0"] or set(product) >= {"input.0", "output.0"}
    assert product["output.0"]["shape"] == [2, 4]
    assert product["output.0"]["mean"] == 6.0
    assert "true" in product["arguments"]["value"]
    full = next(row for row in rows if row["op"] == "paddle._C_ops.full" and row["slot"] == "output.0")
    assert product["input.1"]["producer_seq"] == full["seq"]
    assert product["input.1"]["digest"] == full["digest"]


def test_the_source_is_the_users_line(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    with trueup.capture(tmp_path / "capture", model=net):
        net(paddle.ones([1, 3])).sum().backward()
    result = trueup.open_capture(tmp_path / "capture")
    frames = {number: site[0] for number, site in result.sites(0).items()} if callable(getattr(result, "sites", None)) else {}
    rows = rows_of(tmp_path / "capture")
    linear = next(row for row in rows if row["op"] == "paddle._C_ops.linear" and row["phase"] == "forward")
    backward = next(row for row in rows if row["op"] == "paddle._C_ops.linear" and row["phase"] == "backward")
    assert linear["site"] is not None
    assert linear["site"] == backward["site"]
    for number in {linear["site"]} & set(frames):
        assert "check_calls.py" in frames[number][0]


def test_operators_that_were_bound_by_name_are_seen(record: Record) -> None:
    x = paddle.ones([3])
    assert {row["op"] for row in record(lambda: held_by_name(x))} == {"paddle._C_ops.tanh"}


@pytest.mark.parametrize(
    ("op", "compute"),
    [
        ("paddle.Tensor.__add__", lambda x: x + x), ("paddle.Tensor.__rsub__", lambda x: 1.0 - x),
        ("paddle.Tensor.__matmul__", lambda x: x @ x), ("paddle.Tensor.__getitem__", lambda x: x[1:]),
        ("paddle.Tensor.__lt__", lambda x: x < 2), ("paddle.Tensor.__pow__", lambda x: x**2),
        ("paddle.Tensor.clone", lambda x: x.clone()), ("paddle._C_ops.cast", lambda x: x.astype("float64")),
        ("paddle._C_ops.concat", lambda x: paddle.concat([x, x])), ("paddle._C_ops.gelu", lambda x: F.gelu(x)),
    ],
)  # fmt: skip
def test_an_operator_is_one_call(record: Record, op: str, compute: Any) -> None:
    x = paddle.ones([3, 3])
    rows = record(lambda: compute(x))
    assert {(row["seq"], row["op"]) for row in rows} == {(0, op)}
    assert {"input.0", "output.0"} <= {row["slot"].replace("0.0", "0") for row in rows}


def test_layers_have_paths_parameters_buffers_and_enclose_operators(tmp_path: Path) -> None:
    net = nn.Sequential(("first", nn.Linear(3, 4)), ("norm", nn.BatchNorm1D(4)))
    with trueup.capture(tmp_path / "capture", model=net):
        net(paddle.rand([5, 3]))
    rows = rows_of(tmp_path / "capture")
    found = calls(rows, phase="forward")
    assert {"/Sequential", "first/Linear", "norm/BatchNorm1D", "first/paddle._C_ops.linear"} <= set(found)
    assert {row["slot"] for row in found["first/Linear"]} == {"input.0", "param.weight", "param.bias", "output.0"}
    assert {"output.buffer._mean", "output.buffer._variance"} <= {row["slot"] for row in found["norm/BatchNorm1D"]}
    assert found["first/paddle._C_ops.linear"][0]["parent"] == found["first/Linear"][0]["seq"]


def test_a_kernel_that_writes_what_it_was_given_is_believed(record: Record) -> None:
    norm = nn.BatchNorm1D(4)
    x = paddle.rand([5, 4])
    rows = record(lambda: (norm(x), norm(x)))
    means = [row["mean"] for row in rows if row["slot"] == "output.buffer._mean"]
    seen = [row["mean"] for row in rows if row["op"].endswith("batch_norm") and row["slot"] == "input.1"]
    assert len(set(means)) == 2
    assert seen == pytest.approx([0.0, means[0]])


def test_writes_in_place_are_outputs_and_are_read_anew(record: Record) -> None:
    x = paddle.zeros([4])

    def run() -> None:
        x.add_(paddle.ones([4]))
        x[0] = 5.0
        x.sum()

    rows = record(run)
    written = next(row for row in rows if row["op"] == "paddle.Tensor.__setitem__" and row["slot"] == "output.written.0")
    total = next(row for row in rows if row["op"] == "paddle._C_ops.sum" and row["slot"] == "input.0")
    assert (written["max"], total["max"], total["mean"]) == (5.0, 5.0, 2.0)
    assert total["producer_seq"] == written["seq"]


def test_an_optimizer_reads_gradients_and_writes_weights(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=net.parameters())
    with trueup.capture(tmp_path / "capture", model=net):
        for _ in range(2):
            net(paddle.ones([1, 3])).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
    rows = rows_of(tmp_path / "capture")
    assert {row["step"] for row in rows} == {0, 1}
    update = [row for row in rows if row["op"] == "paddle._C_ops.adamw_" and row["step"] == 0]
    assert {row["phase"] for row in update} == {"optimizer"}
    before, after = (next(r for r in update if r["slot"] == slot) for slot in ("input.0", "output.0"))
    assert before["digest"] != after["digest"]
    later = next(r for r in rows if r["step"] == 1 and r["slot"] == "param.weight")
    assert later["digest"] == after["digest"]
    gradient = next(r for r in update if r["slot"] == "input.1")
    made = next(r for r in rows if r["seq"] == gradient["producer_seq"] and r["slot"] == gradient["producer_slot"])
    assert (made["op"], made["phase"], made["digest"]) == ("paddle._C_ops.linear", "backward", gradient["digest"])


def test_filters_steps_and_details(record: Record) -> None:
    x = paddle.ones([3])

    def run() -> None:
        F.relu(F.tanh(x))

    assert {row["op"] for row in record(run, include="*tanh")} == {"paddle._C_ops.tanh"}
    assert {row["op"] for row in record(run, exclude="*tanh")} == {"paddle._C_ops.relu"}
    digests = record(run, detail="digest")
    assert all(row["mean"] is None and row["digest"] for row in digests)
    assert all(row["payload_key"] for row in record(run, detail="tensor") if row["slot"] != "arguments")


def test_recorded_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    x = paddle.to_tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    with trueup.capture(tmp_path / "capture", detail="tensor", level="api"):
        y = x.transpose([1, 0])[1:] * 2.0
    capture = trueup.open_capture(tmp_path / "capture")
    rows = capture.records().to_pylist()
    row = next(r for r in rows if r["op"] == "paddle.Tensor.__mul__" and r["slot"] == "output.0")
    assert (row["min"], row["max"], row["shape"]) == (float(y.min()), float(y.max()), [3, 3])
    before = next(r for r in rows if r["op"] == "paddle.Tensor.__mul__" and r["slot"] == "input.0")
    assert (before["max"], before["strides"]) == (11.0, [1, 4])


DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "complex64", "complex128")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_those_that_numpy_finds(record: Record, dtype: str) -> None:
    values = np.array([[0.0, 1.5, 0.5], [2.0, 3.0, 0.25]])
    x = paddle.to_tensor(values, dtype="float32").cast(dtype)
    row = record(lambda: x.reshape([3, 2]), level="api")[0]
    exact = values.astype("int64") if dtype in ("int32", "int64", "uint8") else (values != 0) * 1 if dtype == "bool" else values
    assert (row["dtype"], row["shape"]) == (dtype, [2, 3])
    assert (row["max"], row["l2"]) == (exact.max(), pytest.approx(float(np.linalg.norm(exact))))


def test_tensors_without_elements_or_dimensions(record: Record) -> None:
    rows = record(lambda: (paddle.to_tensor(3.0) * 2.0, paddle.zeros([0, 3]) * 2.0), level="api")
    shapes = [row["shape"] for row in rows if row["op"] == "paddle.Tensor.__mul__" and row["slot"] == "output.0"]
    assert shapes == [[], [0, 3]]


def test_a_thread_that_prepares_data_is_left_alone(tmp_path: Path) -> None:
    def prepare() -> None:
        (paddle.ones([3]) * 2.0).exp()

    def train() -> None:
        nn.Linear(3, 2)(paddle.ones([1, 3]))

    with trueup.capture(tmp_path / "capture"):
        for work in (prepare, train):
            thread = threading.Thread(target=work, name=work.__name__)
            thread.start()
            thread.join()
    assert {row["op"] for row in rows_of(tmp_path / "capture")} == {"Linear", "paddle._C_ops.linear"}
    assert notes_of(tmp_path / "capture") == [
        "thread train runs Layers; what it executes is recorded in whatever step is under way"
    ]


class Scaled(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.exp(self.inner(x))


def twice(x: paddle.Tensor) -> paddle.Tensor:
    return paddle.tanh(x) * 2


def compiled(what: str | None, *, full_graph: bool = True) -> Any:
    """Return what trains two steps, some of it given to to_static."""
    paddle.seed(0)
    net, function = Scaled(), twice
    if what == "model":
        net = paddle.jit.to_static(net, full_graph=full_graph)
    elif what == "layer":
        net.inner = paddle.jit.to_static(net.inner, full_graph=full_graph)
    elif what == "function":
        function = paddle.jit.to_static(twice, full_graph=full_graph)
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())

    def train() -> list[float]:
        losses = []
        for k in range(2):
            loss = function(net(paddle.full([2, 3], k + 1.0))).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
        return losses

    return train


INSIDE = {"model": {"Linear", "paddle._C_ops.exp"}, "layer": {"Linear", "paddle._C_ops.relu"}, "function": {"paddle._C_ops.tanh"}}
NAMED = {"model": "Layer Scaled", "layer": "Layer inner", "function": "function twice"}


@pytest.mark.parametrize("what", INSIDE)
@pytest.mark.parametrize("full_graph", [True, False])
def test_what_to_static_compiles_is_one_program_or_runs_as_python(what: str, full_graph: bool, tmp_path: Path) -> None:
    plain = compiled(None)()
    train = compiled(what, full_graph=full_graph)
    with trueup.capture(tmp_path / "capture", steps=[1]):
        captured = train()
    assert captured == (pytest.approx(plain, rel=1e-5) if full_graph else plain)
    rows = rows_of(tmp_path / "capture")
    ops = {row["op"] for row in rows}
    assert {"Scaled", "Sequential"} - ops == ({"Sequential"} if full_graph and what == "model" else set())
    boundaries = {(row["phase"], row["slot"]) for row in rows if row["op"] == ("Sequential" if what == "layer" else "Scaled")}
    assert {("forward", "input.0"), ("forward", "output.0"), ("backward", "grad_output.0")} <= boundaries
    if full_graph:
        assert "paddle._C_ops.run_program" in ops
        assert not INSIDE[what] & ops
        said = f"{NAMED[what]} runs as a program that to_static made"
    else:
        assert ops >= INSIDE[what]
        said = f"{NAMED[what]} was given to to_static without full_graph"
    assert [note for note in notes_of(tmp_path / "capture") if note.startswith(said)]
    train()  # without the capture, where it is compiled again


def test_levels_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="level aten is not there for PaddlePaddle"):
        trueup.capture(tmp_path / "capture", level="aten")
    with pytest.raises(TrueupError, match="compile=through is not there"):
        trueup.capture(tmp_path / "capture", compile="through")


KERNELS = {
    "linear": ("matmul_v2", "elementwise_add"), "matmul": ("matmul_v2",), "__add__": ("elementwise_add",),
    "__truediv__": ("elementwise_div",), "divide": ("elementwise_div",), "maximum": ("elementwise_max",),
    "multiply_": ("elementwise_mul",), "embedding": ("lookup_table_v2",), "full": ("fill_constant",), "mean_all": ("mean",),
    "mean": ("reduce_mean",), "sum": ("reduce_sum",), "transpose": ("transpose2",), "unsqueeze": ("unsqueeze2",),
    "squeeze": ("squeeze2",), "cross_entropy_with_softmax": ("softmax_with_cross_entropy",), "hardswish": ("hard_swish",),
    "flatten": ("flatten_contiguous_range",), "__ne__": ("fill_constant", "not_equal"),
}  # fmt: skip
"""What Paddle's own list of operators (FLAGS_low_precision_op_list) calls ours, where it differs."""


@pytest.mark.parametrize("name", ["transformer", "lstm", "ctc"])
def test_no_operator_of_paddles_own_list_is_missed(tmp_path: Path, name: str) -> None:
    def listed(run: Any) -> dict[str, int]:
        paddle.set_flags({"FLAGS_low_precision_op_list": 1})
        core.clear_low_precision_op_list()
        run()
        found = {op: sum(map(int, counts.split(","))) for op, counts in core.get_low_precision_op_list().items()}
        paddle.set_flags({"FLAGS_low_precision_op_list": 0})
        return found

    training = models.build(name)
    found: list[dict[str, int]] = []
    with trueup.capture(tmp_path / "capture", model=training.model, level="api"):
        losses: list[paddle.Tensor] = []
        found.append(listed(lambda: losses.append(training.loss(0))))
        losses[0].backward()
        found.append(listed(training.optimizer.step))
    rows = rows_of(tmp_path / "capture")
    for phase, kernels in zip(("forward", "optimizer"), found, strict=True):
        seen: dict[str, int] = {}
        scaled = {r["seq"] for r in rows if r["op"] == "paddle.Tensor.__mul__" and r["value"] is not None}
        for seq, op in {(row["seq"], row["op"]) for row in rows if row["phase"] == phase}:
            if op == "paddle.Tensor.backward":
                continue
            last = op.rpartition(".")[2]
            if last == "__mul__":
                last = "scale" if seq in scaled else "elementwise_mul"
            for kernel in KERNELS.get(last, (last,)):
                seen[kernel] = seen.get(kernel, 0) + 1
        assert seen == kernels, json.dumps([phase, seen, kernels])
