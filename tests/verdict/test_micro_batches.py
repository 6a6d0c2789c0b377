"""One batch against micro-batches of it: no call has a counterpart, what accumulates has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueup
from trueup.comparison.layout.pieces import Piece
from trueup.comparison.result.micro_batches import _alone, lost, with_lost
from trueup.comparison.verdict.judged import Tree
from trueup.comparison.verdict.optimizer_updates import passes
from trueup.foundation.store import open_capture
from verdict.captures import Recording, normal, part

LEVELS = {"api": ["module", "api"], "all": None}


def trained(into: Path, pieces: int, divided: float, *, cleared: bool = False) -> Path:
    """Train two steps on batches of 32, in equal pieces whose losses are divided by a number; ``cleared``: gradients are set to
    None before each piece."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(2, 32, 20, generator=torch.Generator().manual_seed(1))
    with trueup.capture(into, model=model, detail="stats") as capture:
        for batch in batches:
            optimizer.zero_grad()
            for piece in batch.chunk(pieces):
                if cleared:
                    optimizer.zero_grad()
                (F.mse_loss(model(piece[:, :16]), piece[:, 16:]) / divided).backward()
            optimizer.step()
            capture.step()
    return into


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "whole", 1, 1.0)


@pytest.mark.parametrize("levels", LEVELS)
def test_one_batch_and_micro_batches_of_it_are_aligned_by_what_accumulates(levels: str, whole: Path, tmp_path: Path) -> None:
    result = trueup.compare(whole, trained(tmp_path / "pieces", 4, 4.0), level=LEVELS[levels])
    assert result.verdict == "aligned", result.sentence
    assert (
        "step 0 goes backward 1 time in the baseline and 4 times in the candidate, as with micro-batches: its calls are no "
        "counterparts and nobody is blamed; the gradients that the optimizer reads and what it makes of them agree"
    ) in result.notes


def test_modules_alone_cannot_tell_and_say_which_level_can(whole: Path, tmp_path: Path) -> None:
    result = trueup.compare(whole, trained(tmp_path / "pieces", 4, 4.0), level="module")
    assert result.verdict == "inconclusive"
    first, *_, last = result.sentence.splitlines()
    assert first == "COULD NOT TELL  because no output of any module was compared"
    assert last.strip() == (
        "next: compare at level api too, which both captures hold, where gradients and the optimizer show which"
    )


def step(run: Recording, pieces: int, off: float) -> None:
    """Record an optimizer that reads a gradient of float16, all of whose elements are off alike."""
    gradient = (normal(64, 64) * (1 + off)).astype(np.float16)
    for _ in range(pieces):
        run.call("torch.Tensor.backward", [normal(1)], level="api", phase="backward")
    run.call("aten::add_", [normal(64, 64, seed=1), gradient], [normal(64, 64, seed=2)], phase="optimizer")


@pytest.mark.parametrize(("before", "sure"), [(0.0, False), (2e-3, True)])
def test_what_gradients_were_off_by_has_a_direction_a_step_later(before: float, sure: bool) -> None:
    """Weights that were moved by a little more change the next gradients all alike; without such a reason it is a wrong divisor.
    Sketches say roughly how much."""
    runs = Recording(), Recording()
    step(runs[0], 1, 0.0)
    step(runs[1], 4, 3e-3)
    found = part(*runs)
    compared = passes(Tree(found.verdicts, found.alignment), before)
    assert compared is not None
    assert (compared.sure, round(compared.worst, 3)) == (sure, 0.003)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_divisor_that_is_off_by_little_is_not_aligned(levels: str, whole: Path, tmp_path: Path) -> None:
    result = trueup.compare(whole, trained(tmp_path / "pieces", 4, 4.0 * (1 + 1e-5)), level=LEVELS[levels])
    assert result.verdict == "inconclusive", result.sentence
    assert any("agree but for a part of the difference that all elements share" in note for note in result.notes)


@pytest.mark.parametrize("levels", LEVELS)
def test_gradients_that_do_not_agree_are_blamed(levels: str, whole: Path, tmp_path: Path) -> None:
    result = trueup.compare(whole, trained(tmp_path / "pieces", 4, 3.0), level=LEVELS[levels])
    assert result.verdict == "deviates", result.sentence


@pytest.mark.parametrize("levels", LEVELS)
def test_as_many_pieces_on_both_sides_are_compared_call_by_call(levels: str, tmp_path: Path) -> None:
    first, second = (trained(tmp_path / str(divided), 4, divided) for divided in (4.0, 3.0))
    result = trueup.compare(first, second, level=LEVELS[levels])
    assert result.culprit is not None
    assert "div" in result.culprit.op


def test_gradients_of_micro_batches_that_are_lost_are_named(whole: Path, tmp_path: Path) -> None:
    """Against one batch, and against micro-batches that are added up; their sum is no multiple of one of them."""
    lost = trained(tmp_path / "lost", 4, 4.0, cleared=True)
    for baseline in (whole, trained(tmp_path / "pieces", 4, 4.0)):
        result = trueup.compare(baseline, lost)
        assert result.verdict == "deviates"
        assert result.sentence.splitlines()[0].endswith(
            "the gradients of 0.weight, 0.bias, 2.weight that the optimizer is given are those of micro-batch 4 of 4 alone: those "
            "of the others are lost, as where gradients are set to zero between micro-batches"
        ), result.sentence
    turned = trueup.compare(lost, tmp_path / "pieces")
    assert "alone: those of the others are lost" not in turned.sentence


@pytest.mark.parametrize(
    ("read", "terms", "found"),
    [
        ((1, 1), (1, 1), -1),  # the sum
        ((0, 3), (1, 1), 1),  # off by a factor, besides
        ((0, 1), (0.1, 1), None),  # what is lost is small
        ((0, 1), (0, 1), None),
    ],
)
def test_a_gradient_that_is_one_term(read: tuple[float, ...], terms: tuple[float, ...], found: int | None) -> None:
    directions = [normal(4, 4, seed=n) for n in range(2)]
    held = [Piece("float32", (4, 4), load=lambda n=n: terms[n] * directions[n]) for n in range(2)]
    total = Piece("float32", (4, 4), load=lambda: sum(share * one for share, one in zip(read, directions, strict=True)))
    assert _alone(total, held) == found


def test_ranks_that_go_backward_once_each_are_not_read_for_what_is_lost() -> None:
    """That would take a megabyte a rank."""
    result, capture = SimpleNamespace(culprits=[SimpleNamespace(step=0)]), SimpleNamespace(ranks={0: {}, 1: {}})
    assert with_lost(result, (capture, capture), {0: 2}, "") is result  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skipped", "said"),
    [((), ""), ((2,), "micro-batch 3 of 3, whose"), ((0, 1), "micro-batches 1, 2 of 3, whose"), ((0, 1, 2), "")],
)
def test_a_stage_that_makes_no_gradients_of_a_micro_batch(tmp_path: Path, skipped: tuple[int, ...], said: str) -> None:
    """Of none at all it is frozen. First the stages are asked for their shapes, with the first micro-batch."""
    run = Recording(parts="stats digest tensor")
    for rank, scope in enumerate(("first", "second")):
        for batch in (-1, 0, 1, 2):
            x = np.full((2, 2), 10.0 * max(batch, rank - 1) + 3 * rank, np.float32)
            given = {"input.0": x, "param.weight": np.full((2, 2), rank + 1, np.float32)}
            forward = run.call("Linear", given, [x + 3], level="module", scope=scope, rank=rank)
            if rank or (batch >= 0 and batch not in skipped):
                back = {"phase": "backward", "level": "module", "scope": scope, "rank": rank, "forward": forward}
                run.call("Linear", {"grad_output.0": x}, {"grad_input.0": x + batch}, **back)
            if batch >= 0 and rank == 0:
                run.call("torch.distributed.recv", [], [x + 3 + batch], level="api", phase="collective", rank=0)
    told = lost(open_capture(run.write(tmp_path / "run", world_size=2)), 0)
    assert said in told
    assert bool(said) == bool(told)
