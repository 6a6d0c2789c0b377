"""A model of Keras in TensorFlow, in an eager loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import trueup
from setting_changes.data import CLASSES, LENGTH, PADDING, TOKENS, padded, samples
from setting_changes.options import Options

WIDTH = 16


def model_of(options: Options) -> Any:
    """Return two blocks of attention over token numbers, and a head."""
    layers = keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    there = layers.Lambda(lambda x: tf.cast(x != PADDING, "float32")[..., None], name="there")(tokens)
    mask = layers.Lambda(lambda x: (x != PADDING)[:, None, :], name="mask")(tokens) if options.masks else None
    embedding = layers.Embedding(TOKENS, WIDTH, name="tokens")
    x = embedding(tokens)
    for at in range(2):
        y = layers.LayerNormalization(epsilon=options.norm_eps, name=f"norm1_{at}")(x)
        y = layers.MultiHeadAttention(options.heads, WIDTH // options.heads, name=f"attention_{at}")(y, y, attention_mask=mask)
        x = layers.Add()([x, layers.Dropout(options.dropout, name=f"drop_{at}")(y)])
        y = layers.LayerNormalization(epsilon=options.norm_eps, name=f"norm2_{at}")(x)
        y = layers.Dense(2 * WIDTH, activation="tanh" if options.approximate else "gelu", name=f"up_{at}")(y)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"down_{at}")(y)])
    x = layers.Multiply()([layers.LayerNormalization(epsilon=options.norm_eps, name="norm")(x), there])
    x = layers.Lambda(lambda x: tf.reduce_sum(x, 1), name="sum")(x)
    start = keras.initializers.RandomNormal(stddev=options.deviation) if options.deviation else "glorot_uniform"
    scores = layers.Dense(CLASSES, kernel_initializer=start, dtype="float32", name="head")(x)
    model = keras.Model(tokens, scores)
    if options.checkpoint:
        numbers = np.random.RandomState(options.checkpoint)
        for one in model.trainable_variables:
            if len(one.shape) > 1:
                one.assign(0.1 * numbers.randn(*one.shape))
    if options.frozen:
        embedding.trainable = False
    return model


def optimizer_of(options: Options) -> Any:
    """Return the optimizer with its schedule."""
    steps = keras.optimizers.schedules.ExponentialDecay(options.lr, 1, 0.9**options.schedule_steps)
    clip = {"global_clipnorm": options.clip} if options.clip else {}
    if options.optimizer == "sgd":
        return keras.optimizers.SGD(steps, momentum=0.9, nesterov=options.nesterov, **clip)
    kind = keras.optimizers.AdamW if options.optimizer == "adamw" else keras.optimizers.Adam
    made = kind(steps, beta_2=options.beta2, epsilon=options.eps, weight_decay=options.decay, **clip)
    if not options.decays_biases:
        made.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return made


def train(options: Options) -> None:
    """Train for an epoch."""
    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy("mixed_bfloat16" if options.autocast else "bfloat16" if options.half else "float32")
    tf.config.experimental.enable_tensor_float_32_execution(options.precision != "highest")
    model, updates = model_of(options), optimizer_of(options)
    entropy = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=options.smoothing,
        reduction="sum" if options.reduction == "sum" else "sum_over_batch_size",
    )  # fmt: skip

    def step(tokens: Any, labels: Any) -> None:
        total: list[Any] = []
        for some, their in zip(tf.split(tokens, options.micro), tf.split(labels, options.micro), strict=True):
            with tf.GradientTape() as tape:
                lost = entropy(their, model(some, training=options.trains))
                if options.divides and options.micro > 1:
                    lost = lost / options.micro
                if options.scale != 1:
                    lost = lost * options.scale
            made = [tf.convert_to_tensor(one) for one in tape.gradient(lost, model.trainable_variables)]
            total = [a + b for a, b in zip(total, made, strict=True)] if total else made
        if options.clip_by_hand:
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.cast(one, "float32") ** 2) for one in total]))
            total = [one * options.clip_by_hand / norm for one in total]
        updates.apply(total, model.trainable_variables)

    kept = samples()
    tokens = np.array([padded(one, options) for one, _ in kept], "int32")
    labels = np.eye(CLASSES, dtype="float32")[[label for _, label in kept]]
    batches = tf.data.Dataset.from_tensor_slices((tokens, labels)).shuffle(len(kept), seed=options.order)
    if options.draws:
        tf.random.normal([options.draws])
    for some, their in batches.batch(options.batch, drop_remainder=options.drop_last):
        step(some, their)


def record(options: Options, into: Path) -> None:
    """Train under capture."""
    with trueup.capture(into, on_error="stop"):
        train(options)
