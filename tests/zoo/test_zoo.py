"""The zoo keeps what it promises to the other tests: real shapes, finite losses, the same numbers in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zoo
from zoo import images, text

STEPS = 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    training = zoo.build(name)
    return [training.step() for _ in range(STEPS)], training.model.state_dict()


@pytest.mark.parametrize("name", zoo.MODELS)
def test_trains_the_same_twice(name: str) -> None:
    losses, state = trained(name)
    again, state_again = trained(name)
    assert torch.isfinite(torch.stack(losses)).all()
    assert torch.equal(torch.stack(losses), torch.stack(again))
    assert [key for key in state if not torch.equal(state[key], state_again[key])] == []


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_parameter_is_trained(name: str) -> None:
    training = zoo.build(name)
    before = {key: value.clone() for key, value in training.model.named_parameters()}
    for _ in range(STEPS):
        training.step()
    still = [key for key, value in training.model.named_parameters() if torch.equal(value, before[key])]
    assert still == []


@pytest.mark.parametrize("name", zoo.MODELS)
def test_loss_falls(name: str) -> None:
    training = zoo.build(name)
    losses = [training.step().item() for _ in range(5 * len(training.batches))]
    epoch = len(training.batches)
    assert sum(losses[-epoch:]) < 0.95 * sum(losses[:epoch])


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_step_is_quick(name: str) -> None:
    """Counted, not timed: so few operators and operations are 50 ms of one core, whatever else the machine does."""
    training = zoo.build(name)
    training.step()
    with Operators() as operators:
        training.step()
    with FlopCounterMode(display=False) as products:
        training.step()
    assert operators.count < 1_000
    assert products.get_total_flops() < 1e9


class Operators(TorchDispatchMode):
    """Counts the operators that are executed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_another_seed_gives_another_run() -> None:
    assert not torch.equal(zoo.build("resnet", seed=0).step(), zoo.build("resnet", seed=1).step())


def test_text_is_padded_and_labelled() -> None:
    tokens = text.padded([text.ids(sentence) for sentence in text.batches(1, 4)[0]], text.PAD)
    assert (tokens == text.PAD).any()
    assert len(text.sentences()) > 30
    assert {case for sentence in text.sentences() for case in sentence.case} == {0, 1, 2}
    assert {mark for sentence in text.sentences() for mark in sentence.mark} == set(range(len(text.MARKS)))


def test_coins_have_both_classes_and_an_ignored_edge() -> None:
    pictures, masks = images.coins(1, 4, 64)[0]
    assert masks.unique().tolist() == [images.IGNORED, 0, 1]
    assert pictures.sum(dim=(1, 2, 3)).min() > 65504
