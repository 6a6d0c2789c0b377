"""What a call is named, where it stands, what made its inputs, and which of them a user's options keep."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from adapters.subjects import WIDTH, Cube, build
from trueup.recording.adapters.torch import functions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.last(F.relu(x))


def run(path: Path, device: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with trueup.capture(path, model=model, on_error="stop", **options):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH).to(device)).square().mean().backward()
            optimizer.step()


LINEAR = {"module": "Linear", "api": "torch.nn.functional.linear", "aten": "aten::addmm"}
NORM = ("LayerNorm", "torch.nn.functional.layer_norm", "aten::native_layer_norm")
SCOPES = {"first", "norm", "last", ""}


@pytest.mark.parametrize("level", LINEAR)
def test_levels_alone(level: str, device: str, path: Path, calls) -> None:
    run(path, device, level=level)
    assert {row["level"] for row in calls()} <= {level, "api"}  # the loss is always there
    forward = calls(phase="forward", op=LINEAR[level])
    assert [(row["step"], row["scope"]) for row in forward] == [(s, n) for s in range(3) for n in ("first", "last")]
    backward = [row for row in calls(phase="backward", level=level) if row["scope"] in ("first", "last")]
    assert {row["scope"] for row in backward} == {"first", "last"}
    assert {row["scope"] for row in calls(level=level, phase="forward")} <= SCOPES
    if level != "module":
        assert calls(level=level, phase="optimizer")
    by_seq = {row["seq"]: row for row in calls()}
    linked = [row for row in backward if row["forward_seq"] is not None]
    assert len(linked) == len(backward) or level == "aten"
    for row in linked:
        if level != "aten":  # the forward call of an aten call's backward is the api call, which is not recorded here
            origin = by_seq[row["forward_seq"]]
            assert (origin["scope"], origin["op"], origin["phase"]) == (row["scope"], row["op"], "forward")
            assert origin["seq"] < row["seq"]


def test_ordinals_count_in_scope_phase_and_step(device: str, path: Path, calls) -> None:
    run(path, device)
    counted: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in calls():
        counted[tuple(row[name] for name in ("step", "phase", "level", "scope", "op"))].append(row["ordinal"])
    assert counted[0, "forward", "api", "", "torch.nn.functional.relu"] == [0, 1]
    assert counted[0, "backward", "api", "", "torch.nn.functional.relu"] == [0, 1]
    assert all(sorted(ordinals) == list(range(len(ordinals))) for ordinals in counted.values())


def test_parents_nest(device: str, path: Path, calls) -> None:
    run(path, device)
    by_seq = {row["seq"]: row for row in calls()}
    order = ("module", "api", "aten")
    for row in by_seq.values():
        if row["parent"] is not None:
            parent = by_seq[row["parent"]]
            assert parent["seq"] < row["seq"]
            assert order.index(parent["level"]) <= order.index(row["level"])
            assert row["phase"] == parent["phase"]
    addmm = next(row for row in by_seq.values() if row["op"] == "aten::addmm")
    linear = by_seq[addmm["parent"]]
    assert (linear["op"], by_seq[linear["parent"]]["op"]) == ("torch.nn.functional.linear", "Linear")
    mm = next(row for row in by_seq.values() if row["op"] == "aten::mm" and row["phase"] == "backward")
    assert by_seq[mm["parent"]]["op"] == "torch.nn.functional.linear"
    assert by_seq[by_seq[mm["parent"]]["parent"]]["op"] == "Linear"


@pytest.mark.parametrize("level", [*LINEAR, "all"])
def test_producers_come_earlier(level: str, device: str, path: Path, rows) -> None:
    run(path, device, level=level)
    by_seq: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in rows():
        by_seq[row["seq"]][row["slot"]] = row
    linked = [row for row in rows() if row["producer_seq"] is not None]
    assert linked
    for row in linked:
        made = by_seq[row["producer_seq"]][row["producer_slot"]]
        assert made["seq"] < row["seq"]
        assert not made["slot"].startswith(("input", "grad_output", "arguments"))
    (norm, *_) = [row for row in rows(phase="forward", scope="norm") if row["slot"] == "input.0" and row["op"] in NORM]
    made = by_seq[norm["producer_seq"]][norm["producer_slot"]]
    assert (made["scope"], made["digest"]) == ("first", norm["digest"])


@pytest.mark.parametrize("level", ["api", "aten"])
def test_view_is_no_producer(level: str, device: str, path: Path, rows) -> None:
    x = torch.ones(4, 4).to(device)
    with trueup.capture(path, level=level, on_error="stop"):
        y = x * 2
        y.view(16)[4:].t().exp()
        y.view(2, 8).mul_(3)
        y.reshape(16).log()
    found = {(row["op"].rpartition(".")[2].removeprefix("aten::"), row["slot"]): row for row in rows()}
    mul = found["mul" if level == "aten" else "__mul__" if ("__mul__", "output.0") in found else "mul", "output.0"]["seq"]
    assert found["exp", "input.0"]["producer_seq"] == mul
    assert found["log", "input.0"]["producer_seq"] == found["mul_", "output.0"]["seq"]
    assert found["log", "input.0"]["producer_slot"] == "output.0"


def test_producer_that_was_left_out_is_none(path: Path, rows) -> None:
    with trueup.capture(path, level="api", exclude="*mul*", on_error="stop"):
        x = torch.ones(3).exp()
        x.mul_(2)
        x.log()
    (row,) = [row for row in rows(op="torch.Tensor.log") if row["slot"] == "input.0"]
    assert row["producer_seq"] is None


def test_sites_point_into_the_users_file(device: str, path: Path, calls) -> None:
    from trueup.foundation.store import open_capture

    run(path, device)
    sites = open_capture(path).sites(0)
    for row in calls():
        if row["phase"] in ("forward", "optimizer", "recompute"):
            frames, _ = sites[row["site"]]
            assert frames[0].startswith(__file__), row
    relu = next(row for row in calls(op="aten::relu"))
    frames, line = sites[relu["site"]]
    assert frames[0].endswith(" in forward")
    assert line == "x = F.relu(self.norm(self.first(x)))"
    backward = next(row for row in calls(op="torch.nn.functional.relu", phase="backward"))
    assert sites[backward["site"]][1] == "return self.last(F.relu(x))"


def test_values_are_json_without_addresses(path: Path, rows) -> None:
    class Opaque:
        pass

    class Takes(nn.Module):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x + 1

    loop: dict[str, Any] = {"x": torch.ones(1)}
    loop["self"] = loop
    with trueup.capture(path, on_error="stop"):
        torch.nn.functional.softmax(torch.ones(2, 2), dim=-1, dtype=torch.float64)
        Takes()(torch.ones(1), Opaque(), lambda: 0, {Opaque(): 1}, [1.5, float("nan"), 2j], slice(1, None), name="é", deep=loop)
        Takes()(torch.ones(1), list(range(64)) * 64, ["long" * 5000])
    values = [(row["op"], json.loads(row["value"])) for row in rows() if row["slot"] == "arguments"]
    (softmax,) = (value for op, value in values if op == "torch.nn.functional.softmax")
    assert (softmax["dim"], softmax["dtype"]) == (-1, "torch.float64")
    first, second = (value for op, value in values if op == "Takes")
    assert {key: first[key] for key in "123456" if key in first} == {
        "1": "Opaque", "2": "function", "3": {"Opaque": 1}, "4": [1.5, "nan", "2j"], "5": "1:None:None",
    }  # fmt: skip
    assert first["name"] == "é"
    assert set(second) == {"length", "xxh3"}
    assert not any("0x" in json.dumps(value) for _, value in values)
    assert len([row for row in rows(op="Takes") if row["slot"].startswith("input.deep")]) < 20


def test_custom_function_is_an_api_call(device: str, path: Path, calls, rows) -> None:
    training = build("custom", device)
    with trueup.capture(path, model=training.model, on_error="stop"):
        training.step()
    name = f"{Cube.__module__}.{Cube.__qualname__}.apply"
    forward, backward = calls(op=name)
    assert (forward["phase"], backward["phase"], backward["forward_seq"]) == ("forward", "backward", forward["seq"])
    assert {row["slot"] for row in rows(op=name)} == {"input.0", "arguments", "output.0", "grad_output.0", "grad_input.0"}
    (inner,) = calls(op="torch.Tensor.pow")
    assert (inner["parent"], inner["phase"]) == (forward["seq"], "forward")
    (square,) = calls(op="torch.square")
    assert (square["parent"], square["phase"], square["forward_seq"]) == (backward["seq"], "backward", forward["seq"])
    assert square["seq"] in {row["parent"] for row in calls(op="aten::pow", phase="backward")}


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


doubled = Doubled.apply  # as Megatron's and Apex's modules do when they are imported


@pytest.mark.parametrize("call", [doubled, Doubled.apply, torch.func.vmap(doubled)], ids=["by name", "by class", "within vmap"])
def test_a_function_taken_by_name_before_is_a_call(call: Any, path: Path, rows) -> None:
    x = torch.ones(3, requires_grad=True)
    with trueup.capture(path, on_error="stop"):
        call(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert {row["ordinal"] for row in rows() if row["op"].endswith("Doubled.apply") and row["phase"] == "forward"} == {0}


def test_functions_have_the_names_that_pytorch_gives_them() -> None:
    theirs: Any = torch.overrides._get_overridable_functions  # what an earlier capture replaced is in neither's memory
    assert functions._public.__wrapped__() == theirs.__wrapped__()[1]
    assert functions.full_name(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert functions.full_name(len) is None


def test_function_apply_is_put_back(path: Path) -> None:
    function, single = torch.autograd.Function, torch.autograd.function._SingleLevelFunction
    before = vars(function)["apply"], nn.Module.__call__, torch.autograd._engine_run_backward, "apply" in vars(single)
    with trueup.capture(path):
        assert vars(function)["apply"] is not before[0]
        assert "apply" in vars(single)
        torch.ones(1).add(1)
    assert (vars(function)["apply"], nn.Module.__call__, torch.autograd._engine_run_backward, "apply" in vars(single)) == before


def test_results_of_kernels_past_the_dispatcher_are_measured(path: Path, rows) -> None:
    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out.numpy()[:] = 3.0
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            out = torch.empty_like(grad)
            out.numpy()[:] = 5.0
            return out

    with trueup.capture(path, on_error="stop"):
        Outside.apply(torch.ones(2, requires_grad=True)).sum().backward()
    maxima = {row["slot"]: row["max"] for row in rows() if row["op"].endswith("Outside.apply")}
    assert (maxima["output.0"], maxima["grad_input.0"]) == (3.0, 5.0)


@pytest.mark.parametrize("level", ["api", "aten"])
def test_uninitialised_memory_is_not_measured(level: str, device: str, path: Path, rows) -> None:
    with trueup.capture(path, level=level, on_error="stop"):
        x = torch.empty(4, device=device)
        x.fill_(2.0)
        x.exp()
    found = {(row["op"].rpartition(".")[2].removeprefix("aten::"), row["slot"]): row["max"] for row in rows()}
    assert found["fill_", "input.0"] is None
    assert found["fill_", "output.0"] == found["exp", "input.0"] == 2.0


FILTERS: dict[str, tuple[dict[str, Any], Any]] = {
    "steps": ({"steps": [1]}, lambda row: row["step"] == 1),
    "steps as text": ({"steps": "0,2:"}, lambda row: row["step"] in (0, 2)),
    "scope glob": ({"include": "norm"}, lambda row: row["scope"] == "norm"),
    "scope regex": ({"include": "/^(first|last)$/"}, lambda row: row["scope"] in ("first", "last")),
    "op glob": ({"include": "*relu*"}, lambda row: "relu" in row["op"]),
    "op regex": ({"include": r"/::add(mm)?$/"}, lambda row: row["op"] in ("aten::add", "aten::addmm")),
    "both": ({"include": "first/aten::*"}, lambda row: row["scope"] == "first" and row["level"] == "aten"),
    "exclude": ({"exclude": ["torch.*", "*::*"]}, lambda row: row["level"] == "module"),
    "exclude wins": (
        {"include": "first", "exclude": "Linear"},
        lambda row: row["scope"] == "first" and row["level"] != "module",
    ),
    "forward": ({"phase": "forward"}, lambda row: row["phase"] == "forward"),
    "backward": ({"phase": "backward"}, lambda row: row["phase"] == "backward"),
    "optimizer": ({"phase": ["optimizer"]}, lambda row: row["phase"] == "optimizer"),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_the_rest_as_it_was(name: str, path: Path, calls) -> None:
    from trueup.foundation.store import open_capture

    options, keeps = FILTERS[name]
    everything = path.with_name("everything")
    run(everything, "cpu")
    run(path, "cpu", **options)
    columns = ["step", "phase", "level", "scope", "op", "ordinal"]

    def named(directory: Path) -> set[tuple[Any, ...]]:
        found = open_capture(directory).records(columns).to_pylist()
        return {tuple(row.values()) for row in found if row["op"] != "torch.Tensor.backward" and keeps(row)}

    kept = [row for row in calls() if row["op"] != "torch.Tensor.backward"]
    assert kept
    assert all(keeps(row) for row in kept)
    assert {tuple(row[c] for c in columns) for row in kept} == named(everything)


@pytest.mark.parametrize(("rank", "kept"), [("0", False), ("3", True)])
def test_rank_filter(rank: str, kept: bool, path: Path, monkeypatch, capsys) -> None:
    from trueup.foundation.store import open_capture

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    run(path, "cpu", ranks=[3])
    said = capsys.readouterr().err
    if kept:
        assert list(open_capture(path).ranks) == [3]
    else:
        assert said == f"trueup: nothing was captured into {path}: this rank is not among the ranks selected\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"steps": [9]}, "steps 9 selected nothing: the run had 4 steps, 0 to 3"),
        (
            {"include": "nowhere"},
            "include 'nowhere' matched none of 16 calls; no scopes seen (no module ran); "
            "operators seen: aten::add, aten::ones, torch.Tensor.add, torch.ones",
        ),
    ],
)
def test_nothing_captured_is_said(options: dict[str, Any], why: str, path: Path, capsys) -> None:
    with trueup.capture(path, **options) as capture:
        for _ in range(4):
            torch.ones(1).add(1)
            capture.step()
    assert capsys.readouterr().err == f"trueup: nothing was captured into {path}: {why}\n"


def test_structures_in_and_out(device: str, path: Path, rows) -> None:
    @dataclass
    class Out:
        first: Tensor
        rest: dict[str, list[Tensor]]

    class Holds(nn.Module):
        def forward(self, *, batch: dict[str, Any]) -> Out:
            return Out(batch["x"][0] + 1, {"b": [batch["y"]["z"] * 2]})

    one = torch.ones(2).to(device).requires_grad_()
    with trueup.capture(path, model=Holds(), level="module", on_error="stop") as capture:
        out = Holds()(batch={"x": [one], "y": {"z": one * 1}})
        (out.first + out.rest["b"][0]).sum().backward()
        capture.step()
    slots = {row["slot"] for row in rows(level="module")}
    assert slots >= {
        "input.batch.x.0", "input.batch.y.z", "output.first", "output.rest.b.0", "grad_output.first", "grad_output.rest.b.0",
        "grad_input.batch.x.0", "grad_input.batch.y.z",
    }  # fmt: skip


@pytest.mark.parametrize("level", ["api", "aten"])
def test_running_statistics_are_outputs(level: str, device: str, path: Path, rows) -> None:
    model = nn.BatchNorm1d(3).to(device)
    with trueup.capture(path, model=model, level=level, on_error="stop"):
        model(torch.randn(5, 3).to(device)).sum().backward()
    found = {row["slot"]: row for row in rows(phase="forward") if "batch_norm" in row["op"]}
    assert found["output.running_mean"]["l2"] == pytest.approx(float(model.running_mean.cpu().norm()))
    assert found["output.running_var"]["l2"] == pytest.approx(float(model.running_var.cpu().norm()))
    if level == "api":
        assert found["input.1"]["l2"] == 0.0


def test_layers_of_torch_have_all_gradients(device: str, path: Path, rows) -> None:
    training = build("sequences", device)
    with trueup.capture(path, model=training.model, level=("module", "api"), on_error="stop"):
        training.step()
    for scope in ("lstm", "gru", "attention", "encoder"):
        slots = {row["slot"] for row in rows(level="module", phase="backward", scope=scope)}
        assert {"grad_output.0", "grad_input.0"} - ({"grad_input.0"} if scope == "lstm" else set()) <= slots, scope
    lstm = {row["slot"] for row in rows(op="torch.lstm", phase="backward")}
    assert "grad_output.0" in lstm
    assert len([slot for slot in lstm if slot.startswith("grad_input.2.")]) == 16  # weights: 2 layers, 2 directions, 4 each


def test_gradients_of_an_in_place_residual(device: str, path: Path, rows) -> None:
    training = build("in-place", device)
    with trueup.capture(path, model=training.model, level="api", on_error="stop"):
        training.step()
    for op in ("torch.nn.functional.conv2d", "torch.nn.functional.batch_norm", "torch.nn.functional.relu", "torch.Tensor.add_"):
        slots = {row["slot"] for row in rows(op=op, phase="backward")} | {
            row["slot"] for row in rows(op="torch.Tensor.__iadd__", phase="backward") if op == "torch.Tensor.add_"
        }
        assert {"grad_output.0", "grad_input.0"} <= slots, op


def test_gradients_are_those_of_the_run(device: str, path: Path, rows) -> None:
    training = build("tied", device)
    training.micro = 1
    with trueup.capture(path, model=training.model, level="api", on_error="stop"):
        training.step()
    embedding = [row for row in rows(op="torch.nn.functional.embedding", phase="backward") if row["slot"] == "grad_input.1"]
    linear = [row for row in rows(op="torch.nn.functional.linear", phase="backward") if row["slot"] == "grad_input.1"]
    total = training.model.embed.weight.grad.cpu()
    assert len(embedding) == len(linear) == 1  # each call's own gradient, not their sum
    assert embedding[0]["sketch"] is not None
    assert float(total.double().norm()) <= embedding[0]["l2"] + linear[0]["l2"]


def test_a_tensor_used_twice_sums_its_gradients(path: Path, rows) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with trueup.capture(path, level="api", on_error="stop"):
        for _ in range(2):  # the second time the compiled way knows the call
            torch.mul(x, x).sum().backward()
    gradients = [row for row in rows(op="torch.mul", phase="backward") if row["slot"].startswith("grad_input")]
    assert [(row["slot"], row["max"]) for row in gradients] == [("grad_input.0", 6.0)] * 2
