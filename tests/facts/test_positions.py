"""Arguments by position have the names that PyTorch gives them, and a sentence says them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import pytest
import torch

from trueup.foundation.facts.operators import named, says
from trueup.foundation.model import Finding, SlotComparison
from trueup.foundation.words.sentence import argument_name, evidence, given_number, named_argument
from trueup.recording.adapters.torch.environment import schemas
from trueup.recording.engine.session import Signatures, agreed

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


def test_the_framework_names_what_was_given_by_position() -> None:
    ops = ("torch.Tensor.mul_", "torch.Tensor.normal_", "torch.Tensor.split", "torch.nn.functional.max_pool2d", "aten::sum")
    found = Signatures("torch", schemas).of([*ops, "torch.Tensor.no_such", "os.path.join", "torch.Tensor.detach"])
    assert found["torch.Tensor.mul_"] == ["self", "other"]
    assert found["torch.Tensor.normal_"] == ["self", "mean", "std"]  # the generator is by keyword alone
    assert found["torch.Tensor.split"][1:] == ["split_size", "dim"]
    assert found["torch.nn.functional.max_pool2d"][1:3] == ["kernel_size", "stride"]
    assert found["aten::sum"] == ["self", "dim", "keepdim"]
    assert set(ops) <= set(found)
    assert not {"torch.Tensor.no_such", "os.path.join", "torch.Tensor.detach"} & set(found)  # nothing to tell
    assert agreed([["self", "split_size", "dim"], ["self", "split_sizes", "dim"]]) == ["self", "", "dim"]


def test_a_number_in_the_users_line_has_its_name_where_there_are_several() -> None:
    def called(op: str, positions: tuple[str, ...], before: str, after: str) -> Finding:
        given = SlotComparison("arguments", "deviates", float("nan"), "value", ("", ""), ("", ""), before, after)
        return Finding(
            "argument", 0, 0, "forward", "api", "", op, 0, "train.py:31 in train", "", slots=(given,), positions=positions,
            stack=("train.py:31 in train",),
        )  # fmt: skip

    drawn = called("torch.Tensor.normal_", ("self", "mean", "std"), '{"1": 0.0, "2": 0.02}', '{"1": 0.0, "2": 0.03}')
    assert given_number(drawn) == "torch.Tensor.normal_ at train.py:31: std = 0.02 in the baseline, 0.03 in the candidate"
    assert evidence(drawn).startswith("argument std differs: 0.02 in the baseline, 0.03 in the candidate")
    decayed = called("torch.Tensor.mul_", ("self", "other"), '{"1": 0.99}', '{"1": 0.9}')
    assert given_number(decayed) == "torch.Tensor.mul_ at train.py:31: 0.99 in the baseline, 0.9 in the candidate"
    assert evidence(decayed).startswith("argument other differs")
    decays = called("paddle._C_ops.adamw_", (), '{"14": 0.1, "15": false}', '{"14": 0.1, "15": true}')
    assert named_argument(decays) == "with_decay of paddle._C_ops.adamw_: false in the baseline, true in the candidate"
    unknown = called("torch.Tensor.mul_", (), '{"1": 0.99}', '{"1": 0.9}')  # another tool's dump
    assert evidence(unknown).startswith("argument 1 differs")
