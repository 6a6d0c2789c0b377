"""Tensors that are not plain arrays: their parts are slots of their own, and a fault in them is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import trueup

pytestmark = pytest.mark.filterwarnings("ignore")

VALUES = [1.0, 2.0, 4.0]


def coo() -> Tensor:
    """Not coalesced: one place holds two values."""
    return torch.sparse_coo_tensor([[0, 0, 2], [1, 1, 0]], VALUES, (3, 3), check_invariants=False)


def dense() -> Tensor:
    out = torch.zeros(4, 4)
    out[0, 1], out[2, 0], out[3, 3] = VALUES
    return out


def ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.tensor(VALUES[:1]), torch.tensor(VALUES[1:])], layout=layout)


NUMBER = {"values": max(VALUES)}
MADE_OF: dict[str, tuple[Callable[[], Tensor], dict[str, float]]] = {
    "coo": (coo, NUMBER | {"indices": 2}),
    "csr": (lambda: dense().to_sparse_csr(), NUMBER | {"crow_indices": 3, "col_indices": 3}),
    "csc": (lambda: dense().to_sparse_csc(), NUMBER | {"ccol_indices": 3, "row_indices": 3}),
    "bsr": (lambda: dense().to_sparse_bsr((2, 2)), NUMBER | {"crow_indices": 3, "col_indices": 1}),
    "nested": (lambda: ragged(torch.strided), NUMBER | {"sizes": 2}),
    "jagged": (lambda: ragged(torch.jagged), NUMBER | {"offsets": 3}),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.tensor(VALUES), 0.5, 3, torch.qint8),
        {"int_repr": 11, "scale": 0.5, "zero_point": 3},
    ),
    "quantised by channel": (
        lambda: torch.quantize_per_channel(
            torch.tensor([VALUES, VALUES]), torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 0, torch.qint8
        ),
        {"int_repr": 8, "scale": 1, "zero_point": 1},
    ),
    "wrapper": (lambda: TwoTensor(torch.tensor(VALUES), torch.full((3,), 7.0)), {"a": max(VALUES), "b": 7}),
    "wrapper of wrappers": (
        lambda: TwoTensor(TwoTensor(torch.ones(2), torch.zeros(2)), TwoTensor(torch.ones(2), torch.full((2,), 9.0))),
        {"a.a": 1, "a.b": 0, "b.a": 1, "b.b": 9},
    ),
}  # fmt: skip


@pytest.mark.parametrize("detail", ["stats", "tensor", "digest"])
@pytest.mark.parametrize("kind", MADE_OF)
def test_parts_are_slots(kind: str, detail: str, path: Path, rows, notes) -> None:
    make, expected = MADE_OF[kind]
    tensor = make()
    before = tensor.is_coalesced() if tensor.layout is torch.sparse_coo else None
    with trueup.capture(path, detail=detail, level="module", on_error="stop"):
        nn.Identity()(tensor)
    for prefix in ("input.0.", "output.0."):
        found = {row["slot"].removeprefix(prefix): row for row in rows() if row["slot"].startswith(prefix)}
        assert list(found) == list(expected)
        for name, row in found.items():
            assert row["digest"] is not None
            assert detail == "digest" or row["max"] == expected[name], name
            assert (row["payload_key"] is not None) == (detail == "tensor")
    assert notes() == []
    if before is not None:
        assert tensor.is_coalesced() == before


CHANGED = {
    "coo": lambda v: torch.sparse_coo_tensor([[0, 2], [1, 0]], [2.0, v], (3, 3)),
    "csr": lambda v: torch.diag(torch.tensor([2.0, v, 3.0])).to_sparse_csr(),
    "jagged": lambda v: torch.nested.nested_tensor([torch.tensor([2.0]), torch.tensor([v, 3.0])], layout=torch.jagged),
    "quantised": lambda v: torch.quantize_per_tensor(torch.tensor([2.0, v]), 0.5, 0, torch.qint8),
    "wrapper": lambda v: TwoTensor(torch.tensor([2.0, v]), torch.tensor([2.0, v])),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_number_inside_is_compared(kind: str, path: Path) -> None:
    class Faulty(nn.Module):
        """Receives the same on both sides and returns another tensor."""

        number = 1.0

        def forward(self, same: Tensor) -> Tensor:
            return CHANGED[kind](self.number)

    for side, number in (("baseline", 1.0), ("candidate", 1.5)):
        with trueup.capture(path / side, level="module", on_error="stop"):
            Faulty.number = number
            Faulty()(torch.ones(2))
    result = trueup.compare(path / "baseline", path / "candidate")
    assert result.verdict == "deviates"
    assert result.culprits[0].op == "Faulty"


def test_a_faulty_sparse_product_is_the_culprit(path: Path) -> None:
    """A kernel that is wrong inside its sparse result, with what follows as its victim."""

    class Scale(nn.Module):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            out = x * 2
            out._values()[0] *= self.factor
            return out

    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x, torch.eye(3))

    for side, factor in (("baseline", 1.0), ("candidate", 1.01)):
        model = nn.Sequential(Scale(), Tail())
        model[0].factor = factor
        with trueup.capture(path / side, level="module", model=model, on_error="stop"):
            model(coo().coalesce())
    result = trueup.compare(path / "baseline", path / "candidate")
    assert (result.verdict, result.culprits[0].scope) == ("deviates", "Sequential.0")
    assert "Sequential.1" not in [finding.scope for finding in result.culprits]


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize("kind", ["coo", "wrapper"])
def test_parts_are_read_again_after_a_write(kind: str, level: str, path: Path, rows) -> None:
    x = MADE_OF[kind][0]()
    with trueup.capture(path, level=level, on_error="stop"):
        for _ in range(3):
            x.mul_(2)
    part = {"coo": "values", "wrapper": "a"}[kind]
    maxima = [row["max"] for row in rows() if "mul_" in row["op"] and row["slot"] == f"output.0.{part}"]
    assert maxima == [8.0, 16.0, 32.0]


@pytest.mark.parametrize("level", ["api", "aten"])
def test_parts_have_producers(level: str, path: Path, rows) -> None:
    x = coo().coalesce()
    with trueup.capture(path, level=level, on_error="stop"):
        y = x * 3
        torch.sparse.sum(y, 0)
    found = rows()
    (made, *_) = [row for row in found if row["op"].rpartition(".")[2].rpartition(":")[2] in ("mul", "__mul__")]
    taken = [row for row in found if "sum" in row["op"] and row["slot"] == "input.0.values"]
    assert taken[0]["producer_slot"] == "output.0.values"
    assert taken[0]["producer_seq"] == made["seq"]


DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.uint16,
    torch.float16, torch.bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("detail", ["stats", "tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_are_measured(dtype: torch.dtype, detail: str, path: Path, rows) -> None:
    tensor = torch.tensor([[1, 0, 3], [1, 1, 1]]).to(dtype)
    with trueup.capture(path, level="module", detail=detail, on_error="stop"):
        nn.Identity()(tensor)
    row = next(row for row in rows() if row["slot"] == "input.0")
    assert row["dtype"] == str(dtype).removeprefix("torch.")
    assert row["max"] == (1 if dtype is torch.bool else 3)
    assert (row["payload_key"] is not None) == (detail == "tensor")


SHAPES: dict[str, tuple[Callable[[], Tensor], list[int], list[int]]] = {
    "channels last": (
        lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last), [1, 2, 3, 4], [24, 1, 8, 2],
    ),
    "transposed": (lambda: torch.arange(6.0).view(2, 3).t(), [3, 2], [1, 3]),
    "strided": (lambda: torch.arange(10.0)[::3], [4], [3]),
    "expanded": (lambda: torch.arange(3.0).view(3, 1).expand(3, 4), [3, 4], [1, 0]),
    "scalar": (lambda: torch.tensor(9.0), [], []),
    "empty": (lambda: torch.empty(0, 3), [0, 3], [3, 1]),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_shapes_are_measured(kind: str, device: str, path: Path, rows) -> None:
    make, shape, strides = SHAPES[kind]
    tensor = make()
    with trueup.capture(path, detail="tensor", level="module", on_error="stop"):
        nn.Identity()(tensor.to(device))
    row = next(row for row in rows() if row["slot"] == "input.0")
    assert (row["shape"], row["numel"]) == (shape, tensor.numel())
    assert row["strides"] == strides or device == "npu"
    if tensor.numel():
        assert (row["max"], row["l2"]) == (float(tensor.max()), pytest.approx(float(tensor.double().norm())))
        kept = trueup.open_capture(path).payload(0, row["payload_segment"], row["payload_key"])
        assert kept.reshape(-1).tolist() == tensor.reshape(-1).tolist()  # in logical order
    else:
        assert row["digest"] is not None


def test_meta_tensors_have_no_parts(path: Path, rows) -> None:
    with trueup.capture(path, level="module", on_error="stop"):
        nn.Identity()(torch.ones(2, 2, device="meta"))
    assert [(row["slot"], row["l2"]) for row in rows()] == [("input.0", None), ("output.0", None)]
