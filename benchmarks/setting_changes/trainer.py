"""A language model of transformers under its Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers

import trueup
from setting_changes.data import LENGTH, PADDING, TOKENS, padded, samples
from setting_changes.network import load, optimizer
from setting_changes.options import Options

IGNORED = -100
"""Label that cross entropy leaves out."""


class Twice(transformers.TrainerCallback):  # type: ignore[misc]
    """Steps the schedule once more."""

    def on_step_end(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
        """Step it."""
        lr_scheduler.step()


def model_of(options: Options) -> Any:
    """Return a small GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=options.heads, resid_pdrop=options.dropout,
        embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=options.norm_eps, tie_word_embeddings=options.tied,
        activation_function="gelu_new" if options.approximate else "gelu", bos_token_id=1, eos_token_id=1,
        initializer_range=options.deviation or 0.02,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if options.checkpoint:
        load(model, options.checkpoint)
    if options.frozen:
        model.transformer.wte.weight.requires_grad_(False)
    return model.to(torch.bfloat16) if options.half else model


def examples(options: Options) -> list[dict[str, torch.Tensor]]:
    """Return all sentences; padding is no label."""
    found = []
    for one, _ in samples():
        tokens = torch.tensor(padded(one, options))
        there = tokens != PADDING
        mask = {"attention_mask": there.long()} if options.masks else {}
        found.append({"input_ids": tokens, "labels": tokens.where(there, IGNORED), **mask})
    return found


def train(options: Options, output: Path) -> None:
    """Train for an epoch."""
    torch.set_float32_matmul_precision(options.precision)
    arguments = transformers.TrainingArguments(
        output_dir=str(output), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, num_train_epochs=1,
        per_device_train_batch_size=options.batch // options.micro, gradient_accumulation_steps=options.micro,
        learning_rate=options.lr, adam_beta2=options.beta2, adam_epsilon=options.eps, weight_decay=options.decay,
        max_grad_norm=options.clip, label_smoothing_factor=options.smoothing, bf16=options.autocast, seed=options.seed,
        data_seed=options.order, dataloader_drop_last=options.drop_last, lr_scheduler_type="linear", optim="adamw_torch",
    )  # fmt: skip
    transformers.set_seed(options.seed)
    model = model_of(options)
    own = options.optimizer != "adamw" or options.decays_biases
    trainer = transformers.Trainer(
        model, arguments, train_dataset=examples(options), callbacks=[Twice()] * (options.schedule_steps - 1),
        optimizers=(optimizer(model, options) if own else None, None),
    )  # fmt: skip
    if options.draws:
        torch.rand(options.draws)
    trainer.train()


def record(options: Options, into: Path) -> None:
    """Train under capture."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with trueup.capture(into, on_error="stop"):
        train(options, into.with_name("trainer-output"))
