"""Part of the planted-fault table through a shadow run; `make bench-shadow` prints all of it."""

from __future__ import annotations

import pytest

import shadow_faults

FAULTS = [
    ("vit", "attention-scale"), ("bert", "log-softmax-half-sum"), ("lstm_tagger", "argmax-ties"),
    ("resnet", "batch-norm-running-variance-biased"), ("resnet", "sgd-momentum-dampened"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "fault"), FAULTS)
def test_the_call_that_the_fault_changed_is_named_and_no_other(model: str, fault: str) -> None:
    cell = shadow_faults.check(model, fault)
    assert cell is not None
    assert cell.word == "ok", cell


@pytest.mark.parametrize(
    ("model", "noise"), [("bert", "hf32-matmul"), ("bert", "reordered-reductions"), ("resnet", None), ("resnet", "hf32-matmul")]
)
def test_noise_is_nobodys_fault(model: str, noise: str | None) -> None:
    cell = shadow_faults.check_sound(model, noise)
    assert cell.word == "aligned", cell
