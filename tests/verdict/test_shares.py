"""What ranks have of a batch and of a vocabulary: samples by turns, words that pad, rows that another rank looks up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trueup.comparison.layout.inferring import Apart
from trueup.comparison.layout.pieces import Piece
from trueup.comparison.layout.samples import Batch, Samples, reordered
from trueup.comparison.result.comparing import compare
from trueup.comparison.result.layouts import _of_unreduced

from .captures import Array, Recording

KEPT = "stats digest tensor"
SAMPLES = np.arange(30, dtype=np.float32).reshape(5, 3, 2)
WEIGHT = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
IDS = np.array([[3, 0, 4], [1, 1, 2]])
ROWS = np.arange(1, 11, dtype=np.float32).reshape(5, 2)


def _trained(directory: Path, order: Sequence[Sequence[int]], wrong: float = 0.0, parts: str = KEPT) -> Path:
    """Ranks that are given samples, of three rows each, by number; one rank's result may be ``wrong``."""
    run = Recording(parts=parts)
    for rank, mine in enumerate(order):
        x = SAMPLES[list(mine)]
        made = x @ WEIGHT.T
        made[-1] += wrong * (rank == len(order) - 1)
        flat = made.reshape(-1, 4)
        run.call("Linear", {"input.0": x, "param.weight": WEIGHT}, [made], level="module", scope="up", rank=rank)
        run.call("torch.nn.functional.relu", [flat], [np.maximum(flat, 0)], level="api", rank=rank)
    return run.write(directory, world_size=len(order))


@pytest.mark.parametrize("order", [[[0, 2, 4], [1, 3]], [[4, 1], [0], [2, 3]], [[0, 1, 2], [3, 4]]])
def test_samples_by_turns(tmp_path: Path, order: list[list[int]]) -> None:
    """As a DistributedSampler hands them out, or in any other order; several rows belong to a sample."""
    whole, cut = _trained(tmp_path / "whole", [range(5)]), _trained(tmp_path / "cut", order)
    moved = [one for some in order for one in some] != [*range(5)]
    for pair in ((whole, cut), (cut, whole)):
        result = compare(*pair)
        assert (result.verdict, result.counts["compared"]) == ("aligned", 2), result.sentence
        assert ("samples came in another order, and were put in one" in result.sentence) == moved
    wrong = compare(whole, _trained(tmp_path / "wrong", order, 0.5))
    assert (wrong.verdict, wrong.culprits[0].scope) == ("deviates", "up")


def _places_first(directory: Path, order: Sequence[Sequence[int]], wrong: float = 0.0) -> Path:
    """The batch is the second dimension; what reads the result has places and samples in one."""
    run = Recording(parts=KEPT)
    for rank, mine in enumerate(order):
        x = SAMPLES[list(mine)].transpose(1, 0, 2).copy()
        made = x @ WEIGHT.T
        flat = made.reshape(-1, 4)
        labels = (x.sum(-1).reshape(-1) % 4).astype(np.int64)
        number = run.call("Linear", {"input.0": x, "param.weight": WEIGHT}, [made], level="module", scope="up", rank=rank)
        run.made[id(flat)] = number, "output.0"
        given = {"input.0": flat, "input.1": labels}
        run.call("scores", given, [flat * (1 + wrong) + labels[:, None]], level="api", rank=rank)
    return run.write(directory, world_size=len(order))


@pytest.mark.parametrize("order", [[[0, 2, 4], [1, 3]], [[0, 1, 2], [3, 4]]])
def test_samples_behind_places(tmp_path: Path, order: list[list[int]]) -> None:
    whole, cut = _places_first(tmp_path / "whole", [range(5)]), _places_first(tmp_path / "cut", order)
    assert [compare(*pair).verdict for pair in ((whole, cut), (cut, whole))] == ["aligned"] * 2
    wrong = compare(whole, _places_first(tmp_path / "wrong", order, 0.1))
    assert (wrong.verdict, wrong.culprits[0].op) == ("deviates", "scores")


def test_two_orders_of_samples(tmp_path: Path) -> None:
    """Neither run has the batch of one process."""
    one, two = _trained(tmp_path / "one", [[0, 2, 4], [1, 3]]), _trained(tmp_path / "two", [[3, 0], [4, 1], [2]])
    assert [compare(*pair).verdict for pair in ((one, two), (two, one))] == ["aligned"] * 2


def test_the_order_of_samples_without_their_bytes(tmp_path: Path) -> None:
    """Statistics of all samples do not depend on it."""
    whole, cut = (_trained(tmp_path / str(len(n)), n, parts="stats digest") for n in ([range(5)], [[0, 2, 4], [1, 3]]))
    assert compare(whole, cut).verdict == "aligned"


@pytest.mark.parametrize("order", [[[0, 1], [0, 1]], [[0, 1, 2], [1, 2]]])
def test_samples_that_several_ranks_are_given(tmp_path: Path, order: list[list[int]]) -> None:
    total, some = sum(map(len, order)), len({one for mine in order for one in mine})
    result = compare(_trained(tmp_path / "whole", [range(total)]), _trained(tmp_path / "cut", order))
    assert result.verdict == "deviates"
    said = "ranks 0, 1 are given some samples several times, and others not at all: input.0 of up holds "
    assert result.culprits[0].cause == f"{said}{some} of the baseline's {total}", result.sentence


def test_what_picks_samples_is_no_culprit_before_them() -> None:
    """The call that makes the data is another on each rank, and comes first."""
    apart = Apart("samples", ("forward", "module", "", "Model", 0), "input.0", 0, 5, "ranks", (0, 1), 0.0, "2 of the baseline's 3")
    run: Any = SimpleNamespace(apart=[apart])
    for scope, step, made in (("", 0, True), ("", 1, False), ("up", 0, False)):
        finding: Any = SimpleNamespace(step=step, phase="forward", scope=scope, op="torch.randint")
        assert _of_unreduced(finding, run) == made


def test_other_samples_are_no_other_order(tmp_path: Path) -> None:
    result = compare(_trained(tmp_path / "whole", [[0, 1, 2]]), _trained(tmp_path / "cut", [[0, 1], [3]]))
    assert (result.verdict, result.culprits[0].kind) == ("deviates", "input"), result.sentence


@pytest.mark.parametrize("dim", [0, 1])
def test_a_range_of_rows_in_another_order(dim: int) -> None:
    array = np.arange(48).reshape(6, 8)
    whole = Piece("int64", (6, 8), load=lambda: array)
    each = (6, 8)[dim] // 2
    swapped, held = Samples((1, 0), {(0,): 1, (1,): 1}), Piece("int64", (each, each))
    made = reordered({(0,): held, (1,): held}, whole, Batch(dim), swapped)
    assert made is not None
    assert made.load is not None
    assert made.load().tolist() == np.concatenate(np.split(array, 2, dim)[::-1], dim).tolist()
    assert made.rows(2, 5).tolist() == made.load()[2:5].tolist()
    assert made.rows(3, 3).shape == (0, 8)
    uneven = {(0,): Piece("int64", (1, 1)), (1,): Piece("int64", (5, 5))}
    assert reordered(uneven, whole, Batch(dim), swapped) is None


def _scored(directory: Path, parts: Sequence[Array], wrong: tuple[int, float] = (0, 0.0), kept: str = KEPT) -> Path:
    """Scores of words, by ranks that hold some rows of the weight; one column may be ``wrong``."""
    run, x = Recording(parts=kept), np.arange(6, dtype=np.float32).reshape(3, 2)
    for rank, held in enumerate(parts):
        made = x @ held.T
        made[:, wrong[0]] += wrong[1] * (rank == len(parts) - 1)
        run.call("Linear", {"input.0": x, "param.weight": held}, [made], level="module", scope="head", rank=rank)
    return run.write(directory, world_size=len(parts))


@pytest.mark.parametrize(
    ("wrong", "kept", "verdict"),
    [
        ((0, 0.0), KEPT, "aligned"), ((2, 9.0), KEPT, "aligned"),
        ((0, 9.0), KEPT, "deviates"), ((0, 0.0), "stats digest", "inconclusive"),
    ],
)  # fmt: skip
def test_a_padded_vocabulary(tmp_path: Path, wrong: tuple[int, float], kept: str, verdict: str) -> None:
    """Four words, of which two ranks hold three rows each: what no word has is not compared."""
    padded = np.split(np.concatenate([WEIGHT, np.full((2, 2), 0.5, np.float32)]), 2)
    whole, cut = _scored(tmp_path / "whole", [WEIGHT], kept=kept), _scored(tmp_path / "cut", padded, wrong, kept)
    result = compare(whole, cut)
    assert result.verdict == verdict, result.sentence
    assert [one.scope for one in result.culprits] == ["head"] * (verdict == "deviates")


def test_a_longer_weight_with_other_rows_is_not_padded(tmp_path: Path) -> None:
    other = np.split(np.concatenate([WEIGHT[::-1], WEIGHT[:2]]), 2)
    assert compare(_scored(tmp_path / "whole", [WEIGHT]), _scored(tmp_path / "cut", other)).verdict == "inconclusive"


def _looked_up(directory: Path, world: int, fault: str = "") -> Path:
    """An embedding whose rows ranks share, by hand: three rows and two."""
    run = Recording(parts=KEPT)
    for rank, weight in enumerate(np.split(ROWS, [3]) if world > 1 else [ROWS]):
        first = 3 * rank
        own = (first <= IDS) & (first + len(weight) > IDS)
        local = np.where(own, IDS - first + (fault == "shifted") * rank * (IDS == 3), 0)
        found = weight[local]
        made = ROWS[IDS] * (1 if fault != "sum" else 2)
        outer = run.call("Embedding", {"input.0": IDS, "param.weight": weight}, [made], level="module", scope="words", rank=rank)
        given = {"input.0": local, "input.1": weight}
        inner = run.call("embedding", given, [found if world > 1 else made], level="api", scope="words", rank=rank, parent=outer)
        back = {"phase": "backward", "scope": "words", "rank": rank, "forward": inner}
        gradient = np.ones_like(found) * own[..., None] if fault != "unmasked" else np.ones_like(found)
        total = np.zeros_like(weight)
        np.add.at(total, local, gradient)
        run.call("embedding", {"grad_output.0": gradient}, {"grad_input.1": total}, level="api", **back)
    return run.write(directory, world_size=world)


@pytest.mark.parametrize(
    ("fault", "op"), [("", ""), ("sum", "Embedding"), ("shifted", "embedding"), ("unmasked", "embedding")]
)
def test_rows_that_another_rank_looks_up(tmp_path: Path, fault: str, op: str) -> None:
    whole, cut = _looked_up(tmp_path / "whole", 1), _looked_up(tmp_path / "cut", 2, fault)
    result = compare(whole, cut)
    assert result.verdict == ("deviates" if fault else "aligned"), result.sentence
    assert [one.op for one in result.culprits][:1] == [op] * bool(op), result.sentence
