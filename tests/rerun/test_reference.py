"""References of fused operators against PyTorch's own mathematics in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trueup.recording.adapters.torch.functions import Operator
from trueup.recording.adapters.torch.reference import FOREIGN, FORMULAS, OPAQUE, RANDOM, NoReference, Reference

aten: Any = torch.ops.aten
REFERENCE = Reference(torch.device("cpu"), torch.float64)


def run(func: Any, *args: Any, actual: dict[str, torch.Tensor] | None = None, **kwargs: Any) -> dict[str, torch.Tensor]:
    call = REFERENCE.prepare(Operator.of(func), func, args, kwargs)
    return REFERENCE.run(call, actual or {})


@pytest.mark.parametrize(("masked", "causal"), [(None, False), ("bool", False), ("float", False), (None, True)])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention(masked: str | None, causal: bool, groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 4 // groups, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = {None: None, "bool": torch.ones(5, 5).tril().bool(), "float": torch.randn(5, 5, dtype=torch.float64)}[masked]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=groups > 1)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    kernel = aten._scaled_dot_product_fused_attention_overrideable
    found = run(kernel.default, query.detach(), key.detach(), value.detach(), mask, 0.0, causal)
    torch.testing.assert_close(found["output.0"], expected.detach())
    nothing = torch.empty(0)
    back = run(
        aten._scaled_dot_product_fused_attention_overrideable_backward.default, gradient, query.detach(), key.detach(),
        value.detach(), mask, [True, True, True, False], found["output.0"], found["output.1"], nothing, nothing, 5, 5, 0.0, causal,
        nothing, nothing,
    )  # fmt: skip
    for slot, tensor in zip(("output.0", "output.1", "output.2"), (query, key, value), strict=True):
        torch.testing.assert_close(back[slot], tensor.grad)


@pytest.mark.parametrize("reverse", [False, True])
def test_onednn_layer(reverse: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(3, 4, bidirectional=reverse).double()
    suffix = "_reverse" if reverse else ""
    weights = [getattr(layer, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    state = [torch.randn(1, 2, 4, dtype=torch.float64) for _ in range(2)]
    both = [s.repeat(2, 1, 1) if reverse else s for s in state]
    output, (h, c) = layer(x, tuple(both))
    output, h, c = (output[..., 4:], h[1:], c[1:]) if reverse else (output, h, c)
    gradient = torch.randn_like(output)
    found = run(
        aten.mkldnn_rnn_layer.default, x.detach(), *[w.detach() for w in weights], *state, reverse, [], 2, 4, 1, True, False, False,
        True,
    )  # fmt: skip
    for slot, expected in (("output.0", output), ("output.1", h), ("output.2", c)):
        torch.testing.assert_close(found[slot], expected.detach())
    expected = torch.autograd.grad(output, [x, *weights], gradient)
    back = run(
        aten.mkldnn_rnn_layer_backward.default, x.detach(), *[w.detach() for w in weights], *state, output.detach(), h.detach(),
        c.detach(), gradient, None, None, reverse, 2, 4, 1, True, True, False, [], False, torch.empty(0),
    )  # fmt: skip
    for k, tensor in enumerate(expected):
        torch.testing.assert_close(back[f"output.{k}"], tensor)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_fused_cells(cell: str) -> None:
    torch.manual_seed(0)
    kind = nn.LSTMCell if cell == "lstm" else nn.GRUCell
    model, x, h = kind(3, 4).double(), torch.randn(2, 3).double(), torch.randn(2, 4).double()
    to_input, to_hidden = x @ model.weight_ih.t(), h @ model.weight_hh.t()
    c = torch.randn(2, 4).double()
    expected = model(x, (h, c)) if cell == "lstm" else (model(x, h),)
    name = f"aten::_thnn_fused_{cell}_cell"
    arguments = {"input_gates": to_input, "hidden_gates": to_hidden, "cx": c, "hx": h, "input_bias": model.bias_ih,
                 "hidden_bias": model.bias_hh}  # fmt: skip
    found = FORMULAS[name](arguments, {})
    assert found is not None
    for k, tensor in enumerate(expected):
        torch.testing.assert_close(found[f"output.{k}"], tensor)


def test_convolutions_of_other_libraries() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    found = run(aten.cudnn_convolution.default, x, weight, [1, 1], [2, 2], [1, 1], 1, False, False, False)
    torch.testing.assert_close(found["output.0"], F.conv2d(x.double(), weight.double(), stride=2, padding=1))
    other = run(
        aten.cudnn_convolution_transpose.default, x, weight.transpose(0, 1).contiguous(), [1, 1], [0, 0], [2, 2], [1, 1], 1, False,
        False, False,
    )  # fmt: skip
    expected = F.conv_transpose2d(x.double(), weight.transpose(0, 1).double(), stride=2, padding=1)
    torch.testing.assert_close(other["output.0"], expected)


def test_inputs_are_copied_before_they_are_written() -> None:
    x, y = torch.ones(3), torch.full((3,), 2.0)
    func = aten.add_.Tensor
    call = REFERENCE.prepare(Operator.of(func), func, (x, y), {})
    x.add_(100)
    assert REFERENCE.run(call, {})["output.0"].tolist() == [3, 3, 3]
    assert REFERENCE.run(call, {})["output.0"].tolist() == [3, 3, 3]  # again: a call may be run with other inputs later
    assert x.tolist() == [101, 101, 101]


def test_numbers_are_compared_in_the_dtype_of_the_tensor() -> None:
    x = torch.tensor([0.1])
    assert run(aten.gt.Scalar, x, 0.1)["output.0"].tolist() == (x > 0.1).tolist() == [False]


@pytest.mark.parametrize(
    ("func", "args", "why"),
    [
        (aten.bernoulli.p, (torch.ones(3), 0.5), RANDOM),
        (aten.native_dropout.default, (torch.ones(3), 0.5, True), RANDOM),
        (aten.add.Tensor, (torch.ones(3).to_sparse(), torch.ones(3)), "a tensor that is not a plain array"),
    ],
)
def test_what_cannot_be_computed_again(func: Any, args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(NoReference, match=why):
        run(func, *args)


def test_foreign_and_opaque_operators() -> None:
    assert REFERENCE.why_not(Operator("npu::rms", True, (), False), aten.add.Tensor) == FOREIGN
    assert REFERENCE.why_not(Operator("higher_order::cond", True, (), False, opaque=True), None) == OPAQUE
    mine = Reference(torch.device("cpu"), torch.float64, {"npu::rms": lambda _a, _o: {}})
    assert mine.why_not(Operator("npu::rms", True, (), False), aten.add.Tensor) is None
