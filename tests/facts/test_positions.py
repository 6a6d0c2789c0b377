"""Arguments by position have the names that PyTorch gives them, and a sentence says them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest
import torch

from trueup.foundation.facts.operators import named, says
from trueup.foundation.model import Finding, SlotComparison
from trueup.foundation.words.sentence import argument_name, evidence, named_argument

OF_TORCH = [op for op in named("positions") if not op.startswith("paddle.")]


def signatures(op: str) -> Iterator[list[str]]:
    """Yield the names of what an operator or a function takes, of all its overloads."""
    last = op.replace("::", ".").rpartition(".")[2]
    if op.startswith("torch.nn.functional.") and inspect.isfunction(getattr(torch.nn.functional, last)):
        yield list(inspect.signature(getattr(torch.nn.functional, last)).parameters)
        return
    packet = getattr(torch.ops.aten, last)
    for overload in packet.overloads():
        yield [argument.name for argument in getattr(packet, overload)._schema.arguments]


@pytest.mark.parametrize("op", [op for op in OF_TORCH if "*" not in op])
def test_the_names_are_those_of_pytorch(op: str) -> None:
    full = f"aten::{op}" if "." not in op and "::" not in op else op
    names = says(full, "positions")
    assert any(given[: len(names)] == names for given in signatures(full)), (names, list(signatures(full)))


def test_a_sentence_says_the_name_and_what_has_none_stays_a_number() -> None:
    assert argument_name("aten::nll_loss_forward", "input.2") == "weight"
    assert argument_name("torch.Tensor.clamp", "2") == "max"
    assert argument_name("torch.Tensor.clamp", "7") == "7"
    assert argument_name("torch.Tensor.view", "1") == "1"
    assert argument_name("torch.nn.functional.dropout", "p") == "p"
    given = SlotComparison("input.2", "deviates", float("nan"), "value", ("", ""), ("", ""), None, "float32 (4)")
    loss = Finding("argument", 0, 0, "forward", "aten", "", "aten::nll_loss_forward", 0, None, "", slots=(given,))
    loss = dataclasses.replace(loss, api="torch.nn.functional.cross_entropy")
    said = "weight of torch.nn.functional.cross_entropy: absent in the baseline, float32 (4) in the candidate"
    assert named_argument(loss) == said
    assert evidence(loss).startswith("argument weight differs: absent in the baseline")
