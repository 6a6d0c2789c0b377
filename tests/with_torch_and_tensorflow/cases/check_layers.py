"""Layers of the table: converted weights give the same outputs and gradients, both ways, and come back as they were."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from keras import layers
from torch import nn

import trueup
from trueup.recording.adapters.models import adapter_of


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


NORM = {"epsilon": 1e-5}
LAYERS: dict[str, tuple[Any, Any, np.ndarray]] = {
    "dense, square": (lambda: nn.Linear(5, 5), lambda: layers.Dense(5), normal(3, 5)),
    "dense without bias": (lambda: nn.Linear(5, 3, bias=False), lambda: layers.Dense(3, use_bias=False), normal(3, 5)),
    "embedding, square": (lambda: nn.Embedding(6, 6), lambda: layers.Embedding(6, 6), np.array([[0, 2, 5], [1, 1, 3]])),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), lambda: layers.Conv1D(6, 3), normal(2, 4, 9)),
    "conv2d, square": (
        lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2), lambda: layers.Conv2D(4, 3, padding="same", dilation_rate=2),
        normal(2, 4, 9, 8),
    ),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), lambda: layers.Conv2D(6, 3, groups=2), normal(2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: layers.Conv3D(3, 2), normal(2, 2, 4, 5, 4)),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(4, 4, 3, 2), lambda: layers.Conv2DTranspose(4, 3, 2), normal(2, 4, 5, 5),
    ),
    "batch norm": (lambda: nn.BatchNorm2d(3), lambda: layers.BatchNormalization(momentum=0.9, **NORM), normal(4, 3, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(5), lambda: layers.LayerNormalization(**NORM), normal(3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: layers.GroupNormalization(2, **NORM), normal(3, 4, 5)),
    "lstm, square": (lambda: nn.LSTM(5, 5, batch_first=True), lambda: layers.LSTM(5, return_sequences=True), normal(2, 6, 5)),
    "gru": (lambda: nn.GRU(4, 5, batch_first=True), lambda: layers.GRU(5, return_sequences=True), normal(2, 6, 4)),
    "rnn": (lambda: nn.RNN(4, 5, batch_first=True), lambda: layers.SimpleRNN(5, return_sequences=True), normal(2, 6, 4)),
    "lstm, both ways": (
        lambda: nn.LSTM(4, 5, batch_first=True, bidirectional=True),
        lambda: layers.Bidirectional(layers.LSTM(5, return_sequences=True)), normal(2, 6, 4),
    ),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), lambda: layers.MultiHeadAttention(2, 3), normal(2, 5, 6)),
}  # fmt: skip
IMAGES = ("conv", "transposed", "batch norm", "group norm")


def run(model: Any, array: np.ndarray, *, images: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return what a model gives, and the gradient of what it is given; of images with the channels second."""
    times = 3 if isinstance(model, nn.MultiheadAttention) else 2 if isinstance(model, layers.MultiHeadAttention) else 1
    if isinstance(model, nn.Module):
        x = torch.from_numpy(array)
        x.requires_grad_(x.is_floating_point())
        out = model(*[x] * times)
        out = out[0] if isinstance(out, tuple) else out
        (out * out).sum().backward()
        return out.detach().numpy(), np.zeros(0) if x.grad is None else x.grad.numpy()
    x = tf.constant(np.moveaxis(array, 1, -1) if images else array)
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = model(*[x] * times)
        loss = tf.reduce_sum(out * out)
    gradient = tape.gradient(loss, x) if x.dtype.is_floating else None
    both = out.numpy(), np.zeros(0) if gradient is None else gradient.numpy()
    return (np.moveaxis(both[0], -1, 1), np.moveaxis(both[1], -1, 1)) if images else both


@pytest.mark.parametrize("name", LAYERS)
def test_a_converted_layer_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    keras.utils.set_random_seed(0)
    there, here, array = LAYERS[name]
    images = name.startswith(IMAGES)

    def built(make: Any) -> Any:
        made = make()
        if not isinstance(made, nn.Module):
            run(made, array, images=images)
        elif isinstance(made, nn.BatchNorm2d):
            made.eval()
        return made

    for source, target, again in ((there, here, there), (here, there, here)):
        source, target, again = built(source), built(target), built(again)
        found = trueup.convert_weights(source, target)
        assert found.is_whole
        assert not found.unsure
        for one, other in zip(run(source, array, images=images), run(target, array, images=images), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
        trueup.convert_weights(target, again)
        held, back = adapter_of(source).state(source), adapter_of(again).state(again)
        for key, value in back.items():
            if name.startswith(("lstm", "rnn")) and "bias" in key:  # Keras has the sum of the two
                continue
            if "num_batches" not in key:
                np.testing.assert_array_equal(value, held[key], err_msg=key)


def test_a_gru_that_computes_something_else_is_not_converted() -> None:
    port = layers.GRU(5, reset_after=False)
    port(normal(2, 6, 4))
    with pytest.raises(trueup.TrueupError, match="cannot be converted"):
        trueup.convert_weights(nn.GRU(4, 5), port)


def test_a_model_without_weights_is_said() -> None:
    with pytest.raises(trueup.TrueupError, match="is not built, so it has no weights: call the model on a batch first"):
        trueup.map_models(nn.Linear(2, 2), layers.Dense(2))
    with pytest.raises(trueup.TrueupError, match="no model of torch or paddle or tensorflow"):
        trueup.map_models(nn.Linear(2, 2), 3)
