"""Checkpoints of Keras: repaired, and loaded by Keras, which refuses a layer without its weights."""

from __future__ import annotations

from pathlib import Path

import h5py
import keras
import numpy as np
from safetensors.numpy import load_file

from trueup.migration.checkpoint import open_checkpoint, repair


def test_weights_of_a_model_within_a_model_load_into_it(tmp_path: Path) -> None:
    def net() -> keras.Model:
        layers = keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)
        return keras.Sequential([keras.Input((4,)), *layers])

    model = net()
    model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    net().save_weights(tmp_path / "like.weights.h5")
    keras.Sequential([keras.Input((4,)), model]).save_weights(tmp_path / "outer.weights.h5")
    assert "optimizer" in open_checkpoint(tmp_path / "outer.weights.h5").parts
    found = repair(tmp_path / "outer.weights.h5", tmp_path / "fixed.safetensors", like=tmp_path / "like.weights.h5")
    assert (found.exit_code, len(found.renamed)) == (0, 8)
    with h5py.File(tmp_path / "like.weights.h5", "a") as file:
        for name, array in load_file(tmp_path / "fixed.safetensors").items():
            file[name.replace(".", "/")][...] = array
    again = net()
    again.load_weights(tmp_path / "like.weights.h5")
    assert all(np.array_equal(a, b) for a, b in zip(again.get_weights(), model.get_weights(), strict=True))
