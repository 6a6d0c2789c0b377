"""What the callbacks share, and steps that are ended by hand."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from adapters.conftest import Rows


def test_step_does_nothing_where_nothing_is_captured() -> None:
    trueup.step()
    code = "import trueup, sys; trueup.step(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_steps_without_an_optimizer(path: Path, rows: Callable[..., Rows]) -> None:
    model = nn.Linear(3, 1)
    with trueup.capture(path, steps=[0, 2], on_error="stop"):
        for k in range(3):
            model(torch.full((2, 3), float(k))).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
            trueup.step()
    inputs = {row["step"]: row["max"] for row in rows(level="module", phase="forward") if row["slot"] == "input.0"}
    assert inputs == {0: 0.0, 2: 2.0}


def test_steps_by_hand_are_not_counted_twice(path: Path, rows: Callable[..., Rows]) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trueup.capture(path, on_error="stop"):
        trueup.step()  # from here on only steps by hand; nothing ran in step 0
        for _ in range(3):
            for _ in range(2):  # two optimizer steps in one of the loop's
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            trueup.step()
    assert trueup.open_capture(path).steps == [1, 2, 3]
    assert [sum(row["step"] == k for row in rows(level="module", slot="input.0")) for k in (1, 2, 3)] == [2, 2, 2]


def train(folder: Path, *callbacks: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 6
    options = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    transformers.Trainer(model, options, train_dataset=data, callbacks=[*callbacks]).train()


def test_callback_takes_the_options_of_a_capture(path: Path, tmp_path: Path, rows: Callable[..., Rows]) -> None:
    train(tmp_path, trueup.TrainerCallback(path, steps=[1], level="module", detail="digest"))
    found = rows()
    assert {(row["step"], row["level"]) for row in found if row["op"] != "torch.Tensor.backward"} == {(1, "module")}
    assert {row["scope"] for row in found} >= {"", "transformer.h.0.attn"}
    assert all(row["l2"] is None for row in found)


def test_callback_checks_its_options_before_the_training() -> None:
    with pytest.raises(trueup.TrueupError, match="detail 'everything' is unknown: expected digest, stats, tensor"):
        trueup.TrainerCallback("anywhere", detail="everything")
    with pytest.raises(trueup.TrueupError, match="level 'kernel' is unknown: expected module, api, aten"):
        trueup.LightningCallback("anywhere", level="kernel")


def test_callback_leaves_a_running_capture_alone(path: Path, tmp_path: Path) -> None:
    with trueup.capture(path, level="module", on_error="stop"):
        train(tmp_path, trueup.TrainerCallback(tmp_path / "another"))
    assert trueup.open_capture(path).steps == [0, 1, 2]
    assert not (tmp_path / "another").exists()


def test_training_that_raises_keeps_what_was_recorded(path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    callback = trueup.TrainerCallback(path, level="module")
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, callback, Stop())
    finally:
        callback._end()  # as at the exit of the process
    assert trueup.open_capture(path).steps == [0, 1]


def test_callbacks_are_classes_that_another_process_finds() -> None:
    pytest.importorskip("transformers")
    assert trueup.TrainerCallback is trueup.TrainerCallback
    assert pickle.loads(pickle.dumps(trueup.TrainerCallback)) is trueup.TrainerCallback  # as a launcher by spawn hands it on
