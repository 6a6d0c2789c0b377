"""Layers of the table: converted weights give the same outputs and gradients, both ways, and come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import nn as pnn
from torch import nn

import trueup
from trueup.recording.adapters.models import adapter_of


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def index(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 6, shape)


LAYERS: dict[str, tuple[Any, Any, np.ndarray]] = {
    "linear, square": (lambda: nn.Linear(5, 5), lambda: pnn.Linear(5, 5), normal(3, 5)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), lambda: pnn.Linear(5, 3, bias_attr=False), normal(3, 5)),
    "embedding, square": (lambda: nn.Embedding(6, 6), lambda: pnn.Embedding(6, 6), index(2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, groups=2), lambda: pnn.Conv1D(4, 6, 3, 2, 1, groups=2), normal(2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, dilation=2), lambda: pnn.Conv2D(4, 4, 3, dilation=2), normal(2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: pnn.Conv3D(2, 3, 2), normal(2, 2, 4, 5, 4)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2), lambda: pnn.Conv1DTranspose(4, 6, 3, 2), normal(2, 4, 5)),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), lambda: pnn.Conv2DTranspose(4, 6, 3, 2, 1, groups=2),
        normal(2, 4, 5, 5),
    ),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: pnn.Conv3DTranspose(2, 3, 2), normal(2, 2, 3, 3, 3)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(5), lambda: pnn.BatchNorm1D(5), normal(6, 5)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), lambda: pnn.BatchNorm2D(3), normal(4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), lambda: pnn.LayerNorm(5), normal(3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: pnn.GroupNorm(2, 4), normal(3, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), lambda: pnn.InstanceNorm2D(3), normal(2, 3, 4, 4)),
    "lstm": (
        lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), lambda: pnn.LSTM(4, 5, 2, "bidirect"), normal(2, 6, 4)
    ),
    "lstm, square": (lambda: nn.LSTM(5, 5, batch_first=True), lambda: pnn.LSTM(5, 5), normal(2, 6, 5)),
    "gru": (lambda: nn.GRU(4, 5, 2, batch_first=True), lambda: pnn.GRU(4, 5, 2), normal(2, 6, 4)),
    "rnn": (lambda: nn.RNN(4, 5, batch_first=True), lambda: pnn.SimpleRNN(4, 5), normal(2, 6, 4)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), lambda: pnn.LSTMCell(4, 5), normal(2, 4)),
    "gru cell": (lambda: nn.GRUCell(4, 5), lambda: pnn.GRUCell(4, 5), normal(2, 4)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), lambda: pnn.MultiHeadAttention(6, 2), normal(2, 5, 6)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), lambda: pnn.TransformerEncoderLayer(6, 2, 8, 0.0),
        normal(2, 5, 6),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True), lambda: pnn.TransformerDecoderLayer(6, 2, 8, 0.0),
        normal(2, 5, 6),
    ),
    "prelu": (lambda: nn.PReLU(4), lambda: pnn.PReLU(4), normal(3, 4, 5)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda: pnn.Bilinear(4, 4, 3), normal(3, 4)),
}  # fmt: skip


def run(model: Any, array: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    adapter = adapter_of(model)
    x = adapter.tensor(array)
    if array.dtype == np.float32:
        if isinstance(x, torch.Tensor):
            x.requires_grad_()
        else:
            x.stop_gradient = False
    kind = type(model).__name__
    times = {"Bilinear": 2, "MultiheadAttention": 3, "MultiHeadAttention": 3, "TransformerDecoderLayer": 2}
    out = model(*[x] * times.get(kind, 1))
    while isinstance(out, (tuple, list)):
        out = out[0]
    (out * out).sum().backward()
    gradient = x.grad
    return out.detach().numpy(), None if gradient is None else np.asarray(gradient.numpy())


@pytest.mark.parametrize("name", LAYERS)
def test_a_converted_layer_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    paddle.seed(0)
    there, here, array = LAYERS[name]
    for source, target in ((there(), here()), (here(), there())):
        found = trueup.convert_weights(source, target)
        assert found.is_whole
        assert not found.unsure
        (first, first_gradient), (second, second_gradient) = run(source, array), run(target, array)
        np.testing.assert_allclose(second, first, rtol=2e-5, atol=2e-5)
        if first_gradient is not None:
            assert second_gradient is not None
            np.testing.assert_allclose(second_gradient, first_gradient, rtol=1e-4, atol=1e-4)
        back = type_again(source, there, here)
        trueup.convert_weights(target, back)
        held = adapter_of(source).state(source)
        for key, value in adapter_of(back).state(back).items():
            if "num_batches" not in key and "running" not in key and key not in ("_mean", "_variance"):
                np.testing.assert_array_equal(value, held[key], err_msg=key)


def type_again(source: Any, there: Any, here: Any) -> Any:
    return there() if isinstance(source, nn.Module) else here()


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    class Port(pnn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed = pnn.Embedding(6, 4)

    class Untied(pnn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = pnn.Embedding(6, 4), pnn.Linear(4, 6, bias_attr=False)

    tied, port, untied = Tied(), Port(), Untied()
    assert trueup.convert_weights(tied, port).is_whole
    np.testing.assert_array_equal(port.embed.weight.numpy(), tied.embed.weight.detach().numpy())
    assert trueup.convert_weights(port, Tied()).is_whole
    assert trueup.convert_weights(tied, untied).is_whole
    np.testing.assert_array_equal(untied.head.weight.numpy(), tied.head.weight.detach().numpy().T)
    untied.head.weight.set_value(untied.head.weight * 2)
    with pytest.raises(trueup.TrueupError, match="in the source the two differ"):
        trueup.convert_weights(untied, Tied())


def test_what_cannot_be_converted_is_named_and_nothing_is_written() -> None:
    source, target = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), pnn.Sequential(pnn.Linear(3, 4), pnn.Linear(4, 5))
    before = target[0].weight.numpy()
    with pytest.raises(trueup.TrueupError, match=r"1\.weight.*shape.*\n.*next:"):
        trueup.convert_weights(source, target)
    np.testing.assert_array_equal(target[0].weight.numpy(), before)
    found = trueup.convert_weights(source, target, partly=True)
    assert len(found.state) == 2
    assert len(found.missing) == 2


def test_a_square_matrix_of_an_unknown_class_is_unsure() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

    class OwnPort(pnn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([3, 3])

    found = trueup.convert_weights(Own(), OwnPort())
    assert "nothing says whether it is to be transposed" in found.unsure[0]
    assert trueup.map_models(Own(), OwnPort()).unsure
