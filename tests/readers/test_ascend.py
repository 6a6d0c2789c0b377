from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from trueup.exchange.readers import ascend
from trueup.exchange.readers.ascend import told_statistics


@pytest.mark.parametrize(
    ("kind", "api", "expected"),
    [
        ("Functional", "linear", ("torch.nn.functional.linear", "api", "forward")),
        ("Functional", "sigmoid", ("torch.Tensor.sigmoid", "api", "forward")),
        ("Tensor", "__add__", ("torch.Tensor.add", "api", "forward")),
        ("Tensor", "view", ("torch.Tensor.view", "api", "forward")),
        ("Torch", "softmax", ("torch.softmax", "api", "forward")),
        ("VF", "lstm", ("torch.lstm", "api", "forward")),
        ("NPU", "npu_rms_norm", ("torch_npu.npu_rms_norm", "api", "forward")),
        ("Aten", "mm", ("aten::mm", "aten", "forward")),
        ("Distributed", "all_reduce", ("torch.distributed.all_reduce", "api", "collective")),
        ("Strange", "thing", ("Strange.thing", "api", "forward")),
    ],
)
def test_operators(kind: str, api: str, expected: tuple[str, str, str]) -> None:
    assert ascend.operator(kind, api) == expected


def test_mindspore_has_names_of_its_own() -> None:
    assert ascend.operator("Mint", "matmul", "mindspore")[0] == "mindspore.mint.matmul"
    assert ascend.operator("Tensor", "__add__", "mindspore")[0] == "mindspore.Tensor.__add__"


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str | None, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((resolve_name(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dunder", sorted(ascend.table()["tensor"]))
def test_the_table_of_operators_is_what_pytorch_calls(dunder: str) -> None:
    value: Any = torch.ones(2, 2, dtype=torch.int64 if dunder in ("__rand__", "__ror__", "__rxor__") else torch.float32)
    arguments = () if dunder in ("__neg__", "__pos__", "__abs__") else (value.clone(),)
    with Seen() as seen:
        getattr(value.clone(), dunder)(*arguments)
    assert f"torch.Tensor.{ascend.table()['tensor'][dunder]}" in [name for name, *_ in seen.calls]


def test_the_table_of_arguments_is_what_pytorch_passes_on() -> None:
    x, w = torch.ones(2, 3, 4), torch.ones(4)
    with Seen() as seen:
        torch.nn.functional.layer_norm(x, (4,), w, w, 1e-3)
        torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), x[0], None, None, 2.0)
        torch.nn.functional.cross_entropy(x[0], torch.zeros(3, dtype=torch.int64), w)
    given = {name: kwargs for name, _, kwargs in seen.calls if name is not None and name.startswith("torch.nn.functional.")}
    assert given["torch.nn.functional.layer_norm"]["weight"] is w
    assert ascend.argument("torch.nn.functional.layer_norm", "2") == "weight"
    assert ascend.argument("torch.nn.functional.cross_entropy", "2") == "weight"
    assert ascend.argument("torch.nn.functional.embedding", "4") == "norm_type"
    assert ascend.argument("torch.nn.functional.embedding", "1") == "1"
    assert ascend.argument("torch.nn.functional.linear", "2") == "2"
    assert ascend.argument("torch.layer_norm", "2") == "2"


@pytest.mark.parametrize("function", sorted(ascend.table()["functional"]))
def test_names_of_arguments_are_those_of_the_signature(function: str) -> None:
    """The names stand at their positions; boolean_dispatch hides the signature of the pooling functions."""
    first, *known = ascend.table()["functional"][function]
    found = getattr(torch.nn.functional, function)
    found = getattr(torch.nn.functional, f"_{function}", found) if "kwargs" in inspect.signature(found).parameters else found
    parameters = list(inspect.signature(found).parameters)
    assert parameters[first : first + len(known)] == known


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("torch.float32", "float32"), ("paddle.bfloat16", "bfloat16"), ("Float32", "float32"), ("torch.half", "float16"),
        ("VarType.FP32", "fp32"), ("", None), (None, None), (7, None),
    ],
)  # fmt: skip
def test_dtypes(told: Any, expected: str | None) -> None:
    assert ascend.dtype(told) == expected


def test_leaves_keep_their_paths() -> None:
    tensor = {"type": "torch.Tensor", "shape": []}
    nested = [1, [], {"a": [tensor, {"b": None}], "c": {}}, [[2]]]
    assert list(ascend.leaves(nested)) == [
        (("0",), 1), (("2", "a", "0"), tensor), (("2", "a", "1", "b"), None), (("3", "0", "0"), 2),
    ]  # fmt: skip
    assert list(ascend.leaves(tensor)) == [((), tensor)]
    assert list(ascend.leaves(None)) == [((), None)]


def test_sizes() -> None:
    assert ascend.sizes([]) == ()
    assert ascend.sizes([2, 3]) == (2, 3)
    assert [ascend.sizes(odd) for odd in (None, "2", [2.0], [-1], [True], [2**63], [1] * 65)] == [None] * 7


def test_statistics_that_mean_the_same() -> None:
    columns, told = told_statistics((3, -1, 0.5, 9.0), "float32", (4,))
    assert (columns["max"], columns["min"], columns["mean"], columns["l2"], columns["n_nan"], told) == (3, -1, 0.5, 9.0, 0, None)
    assert told_statistics((-2.0, -2.0, -2.0, -2.0), "float32", ())[0]["l2"] == 2.0  # of a scalar the value is given
    assert told_statistics((True, False, None, None), "bool", (3,))[0]["max"] == 1.0
    assert told_statistics((None,) * 4, "float32", (0,)) == ({}, None)


def test_of_masks_the_numbers_are_kept_beside() -> None:
    """The largest finite number is left out of our statistics, and no tool leaves it out."""
    lowest = -3.4028234663852886e38
    columns, told = told_statistics((0.0, lowest, lowest / 2, math.inf), "float32", (4,))
    assert columns == {}
    assert json.loads(told or "")["min"] == lowest
    assert told_statistics((65504.0, 0.0, 1.0, 70000.0), "float16", (4,))[0]["max"] == 65504.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, "nan", "inf"])
def test_statistics_of_what_is_not_finite_are_kept_beside(odd: Any) -> None:
    columns, told = told_statistics((odd, -1.0, odd, odd), "float32", (4,))
    assert columns == {}
    assert '"min": -1.0' in str(told)
    columns, told = told_statistics((1.0, -1.0, 0.5, odd), "float16", (4,))  # the norm overflowed, no element did
    assert (columns["max"], columns["n_posinf"], columns.get("l2")) == (1.0, 0, None)
    assert told is not None


def test_statistics_of_complex_numbers_are_of_magnitudes() -> None:
    assert told_statistics((5.0, 1.0, 2.0, None), "complex64", (3,)) == ({}, '{"max": 5.0, "min": 1.0, "mean": 2.0}')


def test_a_number_that_no_float_holds() -> None:
    assert told_statistics((10**400, 1, 1, 1), "int64", (3,))[0] == {}
