"""Runs of different layouts: nobody blames an operator for a tensor of which a rank holds a part."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trueup.analysis.audit import check
from trueup.comparison.layout.calls import _closed, _looked_up, _moves, _prepared, _sending, _serving
from trueup.comparison.layout.declaring import load
from trueup.comparison.layout.geometry import Geometry, geometry_of
from trueup.comparison.layout.gradients import by_pieces, off, staying
from trueup.comparison.layout.inferring import Apart, Slot, Told, _of_pieces, _through_views, way_along
from trueup.comparison.layout.joined import undeclared
from trueup.comparison.layout.losses import begun, how_of, reduced, totals, weights
from trueup.comparison.layout.order import made_by
from trueup.comparison.layout.pieces import Piece, Way, put_together, way_in
from trueup.comparison.layout.updates import updates_in
from trueup.comparison.result.comparing import compare
from trueup.comparison.result.layouts import _over_pieces, _summed_oddly, _times_as_much, joined
from trueup.comparison.result.of_pieces import counts_piece, is_unplaced
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture

from .captures import Recording

CUT = Way("sharded", 0)
TP = {"mesh": {"shape": [2], "dims": ["tp"]}, "placements": ["Shard(0)"], "global_shape": [4, 2]}


def _run(directory: Path, world: int, part: dict[str, object] | None = None) -> Path:
    run = Recording(parts="stats digest tensor")
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    for rank in range(world):
        held = weight if part is None else np.split(weight, world)[rank]
        x = np.ones((3, 2), np.float32)
        run.call("Linear", {"input.0": x, "param.weight": held}, [x @ held.T], level="module", scope="up", rank=rank)
        if part is not None:
            run.rows[-2]["value"] = json.dumps(part | {"coordinate": [rank]})
    return run.write(directory, world_size=world)


@pytest.mark.parametrize(
    ("first", "second", "said", "verdict"),
    [
        ((1, None), (2, TP), "one process against TP=2", "aligned"),
        ((2, None), (2, TP), "2 processes against TP=2", "aligned"),
        ((1, None), (2, {"mesh": 7, "placements": [None]}), "one process against 2 processes", "aligned"),
        ((2, TP), (2, TP | {"placements": ["Replicate()"]}), "TP=2, and weights or batches that are cut elsewhere", "deviates"),
    ],
)
def test_pieces_are_put_together(tmp_path: Path, first: tuple, second: tuple, said: str, verdict: str) -> None:
    result = compare(_run(tmp_path / "a", *first), _run(tmp_path / "b", *second))
    assert result.verdict == verdict
    assert f"note: the layouts differ ({said})" in result.sentence


@pytest.mark.parametrize(("cut", "said"), [(True, False), (False, True)])
def test_a_module_that_is_cut_by_hand_is_of_another_class(tmp_path: Path, cut: bool, said: bool) -> None:
    """`ColumnParallelLinear` in place of `Linear` is no other setting; of a module that every rank holds whole the class is."""
    weight, x = np.arange(1, 9, dtype=np.float32).reshape(4, 2), np.ones((3, 2), np.float32)
    runs = []
    for kind, parts in (("Linear", [weight]), ("Column", np.split(weight, 2) if cut else [weight, weight])):
        run = Recording(parts="stats digest tensor")
        for rank, held in enumerate(parts):
            run.call(kind, {"input.0": x, "param.weight": held}, [x @ held.T], level="module", scope="up", rank=rank)
        settings = {"modules": {"": {"class": "M"}, "up": {"class": kind, "bias": True}}}
        runs.append(run.write(tmp_path / kind, world_size=len(parts), settings=settings))
    result = compare(*runs)
    assert (result.verdict, "class of up" in result.sentence) == ("aligned", said), result.sentence


def _grid(directory: Path, order: tuple[int, int] = (0, 1), together: str = "") -> Path:
    """A run of four ranks: neighbours cut a weight, those that stand 2 apart the batch; no mesh says so."""
    run = Recording(parts="stats digest tensor")
    weight, x = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(12, dtype=np.float32).reshape(4, 3)[:, :2] + 1
    for rank in range(4):
        held, given = np.split(weight, 2)[order[rank % 2]], np.split(x, 2)[rank // 2]
        run.call("Linear", {"input.0": given, "param.weight": held}, [given @ held.T], level="module", scope="up", rank=rank)
        for ranks in (f"{rank - rank % 2}-{rank - rank % 2 + 1}", f"{rank % 2},{rank % 2 + 2}", "0-3"):
            said = {"ranks": together or ranks, "group": ranks}
            run.call("torch.distributed.all_reduce", {}, [], phase="collective", rank=rank, arguments=said)
    return run.write(directory, world_size=4)


def _whole(directory: Path) -> Path:
    run = Recording(parts="stats digest tensor")
    weight, x = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(12, dtype=np.float32).reshape(4, 3)[:, :2] + 1
    run.call("Linear", {"input.0": x, "param.weight": weight}, [x @ weight.T], level="module", scope="up")
    return run.write(directory, world_size=1)


def test_groups_make_a_grid(tmp_path: Path) -> None:
    """Megatron names no mesh: the groups that communicate say which ranks cut the model, and which the data."""
    whole, grid = _whole(tmp_path / "a"), _grid(tmp_path / "b")
    assert geometry_of(open_capture(grid)).along("ranks-by-2") == [[0, 2], [1, 3]]
    assert compare(whole, grid).verdict == "aligned"
    swapped = compare(whole, _grid(tmp_path / "c", (1, 0)))
    assert (swapped.verdict, swapped.culprits[0].cause) == (
        "deviates", "param.weight of up is cut as in the baseline, and its pieces are swapped: rank by rank they are pieces 1, 0",
    )  # fmt: skip


def test_groups_that_make_no_grid(tmp_path: Path) -> None:
    assert geometry_of(open_capture(_grid(tmp_path / "b", together="0-3"))).axes == ("ranks",)
    assert geometry_of(open_capture(_grid(tmp_path / "c", together="0-3,7-"))).axes == ("ranks",)


def test_replicas_that_differ(tmp_path: Path) -> None:
    result = compare(_run(tmp_path / "a", 1), _run(tmp_path / "b", 2, TP | {"placements": ["Replicate()"]}))
    assert result.culprits[0].kind == "ranks"
    assert result.culprits[0].cause.startswith("param.weight of up must be the same on all ranks, and ranks 0, 1 differ (rel. L2 ")


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    run = _run(tmp_path / "b", 2, TP)
    shutil.rmtree(run / "rank-00001")
    result = compare(_run(tmp_path / "a", 1), run)
    assert (result.verdict, list(result.culprits)) == ("inconclusive", [])
    assert "because the layouts differ: one process against TP=2;" in result.sentence
    assert "lacks rank 1" in result.sentence


def test_one_layout_is_compared_rank_by_rank(tmp_path: Path) -> None:
    result = compare(_run(tmp_path / "a", 2, TP), _run(tmp_path / "b", 2, TP))
    assert (result.verdict, result.counts["compared"]) == ("aligned", 2)


@pytest.mark.parametrize(("given", "made", "named"), [(0.008, 0.69, True), (0.3, 0.69, False), (0.008, 0.02, False)])
def test_a_sum_made_twice_is_no_rounding_of_half_types(tmp_path: Path, given: float, made: float, named: bool) -> None:
    x = np.ones((3, 2), np.float32)
    for world in (1, 2):
        run = Recording(parts="stats digest tensor")
        for rank in range(world):
            for scope in ("a", "b", "c", "c")[: 2 + world]:
                told = {"ranks": "0-1", "reduce_op": "SUM"}
                if world == 2:
                    run.call("all_reduce", [x], [x], level="api", phase="collective", scope=scope, rank=rank, arguments=told)
            for scope in "abc":
                run.call("Row", {"input.0": x, "param.weight": x}, [x], level="module", scope=scope, rank=rank)
        run.write(tmp_path / str(world), world_size=world)
    sides = joined((open_capture(tmp_path / "1"), open_capture(tmp_path / "2")))
    assert not isinstance(sides, str)
    row = {"step": 0, "phase": "forward", "level": "module", "scope": "c", "op": "Row", "ordinal": 0, "seq_candidate": 5}
    result = SimpleNamespace(matched=pa.Table.from_pylist([row | {"error_in": given, "error_out": made}]))
    found = _summed_oddly(result, sides[1])
    assert (found is not None) == named
    if found is not None:
        assert found.cause.startswith("c adds up over its ranks 2 times in a step, and 2 other modules of its class (Row) 1 time")


@pytest.mark.parametrize(("factors", "said"), [((4, 4), "4.000 = 4"), ((1, 0.25), "0.250 = 1/4"), ((4, 3), ""), ((1, 1), "")])
def test_gradients_that_are_a_multiple_of_the_other_runs(factors: tuple[float, ...], said: str) -> None:
    keys = [("optimizer", "api", "", "torch.Tensor.lerp_", n) for n in range(2)]
    updated = dict(zip(keys, ("up.weight", "down.weight"), strict=True))
    table = pa.table({"seq": [7], "site": pa.nulls(1)})
    sides = []
    for some in ((1.0, 1.0), factors):
        pieces = _parts(*(np.arange(1, 5, dtype=np.float32) * factor for factor in some))
        slots = {(key, "input.1"): one for key, one in zip(keys, pieces, strict=True)}
        step = SimpleNamespace(slots=slots, updated=updated, records=table)
        workers = SimpleNamespace(axes=("ranks",), size=lambda _: 4)
        sides.append(SimpleNamespace(steps=[0], step=lambda _, step=step: step, workers=workers, sites=lambda _: {}))
    found = _times_as_much((sides[0], sides[1]))
    assert (found is not None) == bool(said)
    if found is not None:
        wrong = ["up.weight", "down.weight"] if factors[0] != 1 else ["down.weight"]
        assert all(name in found.cause for name in wrong)
        assert f"off by exactly {said}, the number of ranks" in found.cause


@pytest.mark.parametrize(("ranks", "axis", "named"), [("0-3", "near", True), ("0,2", "near", False), ("0-3", "", False)])
def test_a_sum_over_ranks_that_hold_other_pieces(ranks: str, axis: str, named: bool) -> None:
    made = ("backward", "api", "up", "linear", 0)
    common = {"value": None, "producer_seq": None, "producer_slot": None, "site": None, "slot": "arguments"}
    key = dict(zip(("phase", "level", "scope", "op", "ordinal"), made, strict=True))
    rows = [common | key | {"seq": 3, "slot": "grad_input.1"}]
    reduced = common | {"seq": 9, "phase": "collective", "level": "api", "scope": "", "op": "all_reduce", "ordinal": 0}
    rows += [reduced | {"value": json.dumps({"ranks": ranks, "reduce_op": "SUM"})}]
    rows += [reduced | {"slot": "input.0", "producer_seq": 3, "producer_slot": "grad_input.1"}]
    table = pa.Table.from_pylist(rows)
    ways = {(made, "grad_input.1"): {axis: Way("sharded"), "far": Way("partial")}}
    run = SimpleNamespace(
        steps=[0], original=SimpleNamespace(ranks=range(4), records=lambda columns, **_: table.select(columns)),
        step=lambda _: SimpleNamespace(ways=ways, records=table), sites=lambda _: {}, data=frozenset({"far"}),
        geometry=SimpleNamespace(axes=("far", "near"), coordinates={rank: divmod(rank, 2) for rank in range(4)}),
    )  # fmt: skip
    found = _over_pieces(run)
    assert (None if found is None else found.cause) == ((
        "the gradient of up (input.1) is added up over ranks 0, 1, 2, 3, which hold different pieces of it: "
        "add it up over ranks 0, 2, which hold the same one"
    ) if named else None)  # fmt: skip


# ---------------------------------------------------------------- losses
def _losses(*values: float, axes: tuple[str, ...] = ("ranks",), data: tuple[str, ...] = ("ranks",)) -> SimpleNamespace:
    """Workers, two along the last of ``axes``, with their losses."""
    places = {worker: divmod(worker, 2)[-len(axes) :] for worker in range(len(values))}
    return SimpleNamespace(workers=Geometry(axes, places), data=frozenset(data), losses=dict(enumerate(values)))


@pytest.mark.parametrize(
    ("sides", "hows"),
    [
        ((_losses(3.0, axes=(), data=()), _losses(2.8, 3.2)), [{}, {"ranks": "avg"}]),
        ((_losses(3.0, axes=(), data=()), _losses(1.4, 1.6)), [{}, {"ranks": "sum"}]),  # divided by the ranks, or tokens of all
        ((_losses(3.0, axes=(), data=()), _losses(1.4, 1.0)), [{}, {}]),  # neither: means, and the loss shows it
        (  # the sum of micro-batches, the mean of ranks
            (
                _losses(3.0, axes=(), data=()),
                _losses(1.0, 2.0, 1.6, 1.4, 1.3, 1.7, axes=("ranks", "micro"), data=("ranks", "micro")),
            ),
            [{}, {"ranks": "avg", "micro": "sum"}],
        ),
        ((_losses(1.4, 1.6), _losses(2.9, 3.1)), [{"ranks": "sum"}, {"ranks": "avg"}]),
        ((_losses(3.0, 3.0, axes=("tp",), data=()), _losses(2.8, 3.2)), [{}, {"ranks": "avg"}]),  # ranks that cut the model
        ((_losses(3.0, axes=(), data=()), _losses(axes=("ranks",))), [{}, {}]),
    ],
)
def test_losses_of_both_runs_come_to_the_same(sides: tuple[SimpleNamespace, ...], hows: list[dict[str, str]]) -> None:
    assert reduced(sides) == hows


def test_a_number_counts_as_its_gradient_says() -> None:
    assert weights({0: 0.5, 1: 1.5}) == {0: 0.5, 1: 1.5}  # a rank with three times as many tokens
    assert (weights({0: 0.5, 1: 0.5}), weights({0: 0.5, 1: None}), weights({0: -1.0, 1: 1.0})) == ({}, {}, {})
    workers = _losses(0.0, 0.0).workers
    assert how_of({0: 20.0, 1: 30.0}, workers, {"ranks"}, 50.0, {"ranks": "avg"}) == (
        {"ranks": "sum"},
        True,
    )  # losses not divided yet
    assert how_of({0: 20.0, 1: 30.0}, workers, {"ranks"}, None, {"ranks": "avg"}) == ({"ranks": "avg"}, True)
    assert how_of({0: 20.0, 1: 30.0}, workers, {"ranks"}, 12.0, {"ranks": "avg"}) == ({"ranks": "avg"}, False)
    # The other run's number was put together in one of two ways, too: 150, or 25.
    found = how_of({0: 20.0, 1: 30.0}, workers, {"ranks"}, 150.0, {"ranks": "sum"}, (150.0, 25.0))
    assert (found, totals({0: 20.0, 1: 30.0}, workers, {"ranks"})) == (({"ranks": "avg"}, False), (25.0, 50.0))


def test_where_a_backward_begins() -> None:
    def row(seq: int, phase: str, slot: str, mean: float, made: int | None = None, forward: int | None = None) -> dict[str, object]:
        return {"seq": seq, "phase": phase, "level": "api", "slot": slot, "mean": mean, "numel": 1, "producer_seq": made,
                "forward_seq": forward}  # fmt: skip

    rows = [row(1, "forward", "output.0", 3.0), row(2, "forward", "input.0", 3.0, 1), row(2, "forward", "output.0", 1.5)]
    rows += [row(4, "backward", "grad_output.0", 1.0, None, 2), row(5, "backward", "grad_output.0", 0.5, 4, 1)]
    assert begun(rows) == [1.5]


def _weighted(directory: Path, tokens: tuple[int, ...], counts: tuple[float, ...]) -> Path:
    """A run whose ranks hold so many tokens each; the loss is the mean of theirs, of which each counts so much."""
    run, every = Recording(parts="stats digest tensor"), np.arange(1, 9, dtype=np.float32)
    for rank, (x, count) in enumerate(zip(np.split(every, np.cumsum(tokens)[:-1]), counts, strict=True)):
        rows = x[:, None] * np.ones((1, 2), np.float32)
        run.call("Model", {"input.0": rows + 1}, [rows], level="module", rank=rank)
        loss, one = np.array(x.mean(), np.float32), np.array(1, np.float32)
        made = run.call("loss", [rows], [loss], level="api", scope="", rank=rank)
        total = run.call("scale", [loss], [loss * np.float32(count)], level="api", scope="", rank=rank) if len(tokens) > 1 else made
        back = {"level": "api", "phase": "backward", "rank": rank}
        if len(tokens) > 1:
            scaled = one * np.float32(count)
            run.call("scale", {"grad_output.0": one}, {"grad_input.0": scaled}, forward=total, **back)
            one = scaled
        its = np.full((len(x), 2), 0.5 * count / len(x), np.float32)
        run.call("loss", {"grad_output.0": one}, {"grad_input.0": its}, forward=made, **back)
    return run.write(directory, world_size=len(tokens))


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((0.5, 1.5), "aligned"),
        ((0.25, 0.75), "aligned"),
        ((1.0, 1.0), "deviates"),
        ((1.5, 0.5), "deviates"),
        ((0.6, 1.5), "deviates"),
    ],
)
def test_means_weighted_by_tokens(tmp_path: Path, counts: tuple[float, float], verdict: str) -> None:
    """Ranks with 2 and 6 tokens: times their share of the tokens the ranks' means are the mean of all, or, halved, add up to it."""
    result = compare(_weighted(tmp_path / "one", (8,), (1.0,)), _weighted(tmp_path / "two", (2, 6), counts))
    assert result.verdict == verdict, result.sentence


# ---------------------------------------------------------------- ways
def _parts(*arrays: np.ndarray) -> list[Piece]:
    return [Piece(array.dtype.name, array.shape, load=lambda array=array: array) for array in arrays]


@pytest.mark.parametrize(
    ("parts", "way", "whole"),
    [
        ([[0, 1, 2], [3, 4]], Way("sharded"), [0, 1, 2, 3, 4]),
        ([[0, 1, 6, 7], [2, 3, 4, 5]], Way("sharded", order="zigzag"), [0, 1, 2, 3, 4, 5, 6, 7]),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], Way("sharded", order="interleaved", parts=(1, 1)), [0, 1, 2, 3, 4, 5, 6, 7]),
        ([[0, 2, 4], [1, 3, 5]], Way("sharded", order="interleaved", parts=(1, 1, 1)), [0, 1, 2, 3, 4, 5]),
        ([[0, 1, 4, 6], [2, 3, 5, 7]], Way("sharded", order="interleaved", parts=(2, 1, 1)), [0, 1, 2, 3, 4, 5, 6, 7]),
        ([[0, 1], [2, 3]], Way("sharded", order="interleaved", parts=(1, 1, 1)), None),
        ([[1, 2], [3, 4]], Way("partial"), [4, 6]),
        ([[1, 2], [3, 4]], Way("partial", reduce="avg"), [2, 3]),
        ([[3, 1], [4, 0]], Way("partial", reduce="norm"), [5, 1]),
        ([[3, 1], [4, 0]], Way("partial", reduce="max"), [4, 1]),
        ([[3, 1], [4, 0]], Way("partial", reduce="product"), None),
        ([[1, 2], [1, 2]], Way("replicated"), [1, 2]),
        ([[1, 2], [3]], Way("partial"), None),
        ([[1, 2], [3]], Way("sharded", 1), None),
    ],
)
def test_pieces(parts: list[list[int]], way: Way, whole: list[int] | None) -> None:
    found = put_together(_parts(*(np.array(part, np.float32) for part in parts)), way)
    assert (found is None) == (whole is None)
    if found is not None and found.load is not None:
        np.testing.assert_array_equal(found.load(), whole)


@pytest.mark.parametrize(
    "way", [Way("sharded", 0), Way("sharded", 1), Way("sharded", 1, "zigzag"), Way("sharded", 0, "zigzag"), Way("partial")]
)
def test_a_range_of_rows_of_what_is_put_together(way: Way) -> None:
    arrays = [np.arange(24, dtype=np.float32).reshape(6, 4) + n for n in range(2)]
    found = put_together(_parts(*arrays), way, 0.5)
    assert found is not None
    assert found.load is not None
    for start, stop in ((0, 3), (4, 8), (5, found.shape[0]), (2, 2)):
        np.testing.assert_array_equal(found.rows(start, stop), found.load()[start:stop])


@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_are_held_against_a_whole_by_ranges_of_rows(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches, on two ranks each, which cut the second dimension of what a function is given: a few rows are in memory."""
    monkeypatch.setattr("trueup.comparison.layout.inferring.AT_A_TIME", 1 << 12)
    key, whole = ("forward", "api", "", "Cut.apply", 0), np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    batches = [np.roll(half, shift, axis=0) for half in np.split(whole, 2)]
    held = dict(enumerate(_parts(*(piece for half in batches for piece in np.split(half, 2, axis=1)))))
    told = Told(
        0, {"tp": 2}, frozenset(), {}, undeclared, joined={(key, "input.0"): put_together(_parts(*np.split(whole, 2)), CUT)}
    )
    slot = Slot(key, "output.0", 0, 1, held, None, ("input.0",))
    tracemalloc.start()
    way = _of_pieces([[0, 1], [2, 3]], slot, held, told)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert way == (None if shift else Way("sharded", 1))
    assert most < whole.nbytes / 4


def test_a_sequence_of_odd_length_is_cut_into_unequal_pieces() -> None:
    whole = np.arange(28, dtype=np.float32).reshape(2, 7, 2)  # batch, sequence, width
    key = "forward", "api", "", "torch.flatten", 0
    parts = [whole[:, :4], whole[:, 4:]]
    for shape, pieces in (((2, 7, 2), parts), ((14, 2), [part.reshape(-1, 2) for part in parts])):
        held = dict(enumerate(_parts(*pieces)))
        (other,) = _parts(whole.reshape(shape))
        cut = {"cp": (4, 7, Way("sharded"))}
        told = Told(0, {"cp": 2}, frozenset({"cp"}), {(key, "output.0"): other}, undeclared, sequence=cut)
        way = way_along("cp", [[0, 1]], Slot(key, "output.0", 0, 1, held, None, ()), held, told)
        assert way is not None
        found = put_together(list(held.values()), way)
        assert found is not None
        assert found.load is not None
        np.testing.assert_array_equal(found.load(), whole.reshape(shape))


def test_what_dtensor_says() -> None:
    told = ("Shard(1)", "StridedShard(0, 2)", "Replicate()", "Partial(sum)", "Partial(max)", "Odd(1)", 7)
    assert [way_in(text) for text in told] == [
        Way("sharded", 1), Way("sharded", 0, "strided", 2), Way("replicated"), Way("partial"), Way("partial", reduce="max"), None,
        None,
    ]  # fmt: skip
    norms = ("NormPartial(sum)", "NormPartial(sum, 2.0)", "NormPartial(sum, inf)", "NormPartial(sum, 1.5)")
    assert [way.reduce for text in norms if (way := way_in(text)) is not None] == ["norm", "norm", "max", "1.5"]


def test_declarations(tmp_path: Path) -> None:
    file = tmp_path / "shards.toml"
    file.write_text('[[slot]]\nscope = "layers.*"\nslot = "output.?"\ndims = "s[cp:zigzag] b h[tp,ranks]"\npartial = ["ep"]\n')
    told = load(file)
    key = ("forward", "module", "layers.0", "Block", 0)
    ways = {axis: told(key, "output.0", axis) for axis in ("cp", "tp", "ranks", "ep", "dp")}
    cut = Way("sharded", 2)
    assert ways == {"cp": Way("sharded", 0, "zigzag"), "tp": cut, "ranks": cut, "ep": Way("partial"), "dp": None}
    assert told(key, "input.0", "tp") is None


@pytest.mark.parametrize(("order", "parts"), [("", (1, 1)), ("3", (1, 1, 1)), ("(4,1,1)", (4, 1, 1))])
def test_declared_packs(tmp_path: Path, order: str, parts: tuple[int, ...]) -> None:
    file = tmp_path / "shards.toml"
    file.write_text(f'[[slot]]\nslot = "param.weight"\ndims = "f[tp:interleaved{order}] i"\n')
    way = load(file)(("forward", "module", "up", "Linear", 0), "param.weight", "tp")
    assert way == Way("sharded", 0, "interleaved", parts=parts)


def _packed_by_hand(directory: Path, world: int, wrong: int = 0) -> Path:
    """A run whose neighbours hold pieces of queries, keys and values; of four ranks those that stand 2 apart cut the data."""
    run = Recording(parts="stats digest tensor")
    weight, x = np.arange(12, dtype=np.float32).reshape(3, 2, 2), np.arange(8, dtype=np.float32).reshape(4, 2) + 1
    for rank in range(world):
        held, given = weight[:, (rank + wrong) % 2], np.split(x, world // 2)[rank // 2]
        made = given @ held.T
        run.call("Linear", {"input.0": given, "param.weight": held}, [made], level="module", scope="up", rank=rank)
        queries = np.ascontiguousarray(made[:, :1])  # a view of what the layer made
        run.made[id(queries)] = run.made[id(made)]
        run.call("torch.nn.functional.silu", [queries], [2 * queries], level="api", scope="act", rank=rank)
        run.kept.append(queries)
        for ranks in (f"{rank - rank % 2}-{rank - rank % 2 + 1}", f"{rank % 2},{rank % 2 + 2}", "0-3"):
            said = {"ranks": ranks, "group": ranks} if world == 4 else {"ranks": "0-1", "group": "0-1"}
            run.call("torch.distributed.all_reduce", {}, [], phase="collective", rank=rank, arguments=said)
    return run.write(directory, world_size=world)


@pytest.mark.parametrize(
    ("dims", "wrong", "verdict"),
    [
        ("", 0, "inconclusive"),
        ("f[ranks,ranks-by-1:interleaved3] i", 0, "aligned"),
        ("f[ranks,ranks-by-1:interleaved3] i", 1, "deviates"),
    ],
)
def test_both_sides_cut_by_hand(tmp_path: Path, dims: str, wrong: int, verdict: str) -> None:
    """A line for the weight is enough: what it makes of its inputs lies as its rows do, and so does what views show of that."""
    shards = tmp_path / "shards.toml"
    shards.write_text(f'[[slot]]\nscope = "up"\nslot = "param.weight"\ndims = "{dims}"\n' if dims else "")
    result = compare(_packed_by_hand(tmp_path / "two", 2), _packed_by_hand(tmp_path / "four", 4, wrong), shards=shards)
    assert result.verdict == verdict, result.sentence
    said = "nothing says how 4 slots of 2 modules lie along ranks in the baseline, the first param.weight of up: say it in a file"
    assert (said in result.sentence) == (not dims)


def _by_sequence(directory: Path, world: int, factor: float = 1.0) -> Path:
    """Neighbours hold pieces of a sequence, which nothing says but what one function cuts; others cut the batch, where there are
    four ranks."""
    run, whole = Recording(parts="stats digest tensor"), np.arange(48, dtype=np.float32).reshape(4, 4, 3)
    for rank in range(world):
        x = np.split(whole, world // 2)[rank // 2]
        run.call("Words", {"input.0": x - 1}, [x], level="module", scope="words", rank=rank)
        mine = np.ascontiguousarray(np.split(x, 2, axis=1)[rank % 2])
        run.call("Cut.apply", [x], [mine], level="api", scope="", rank=rank)
        run.call("Norm", {"input.0": mine}, [mine * factor], level="module", scope="norm", rank=rank)
        run.kept += [mine]
        for ranks in (f"{rank - rank % 2}-{rank - rank % 2 + 1}", f"{rank % 2},{rank % 2 + 2}", "0-3"):
            said = {"ranks": ranks, "group": ranks} if world == 4 else {"ranks": "0-1", "group": "0-1"}
            run.call("torch.distributed.all_reduce", {}, [], phase="collective", rank=rank, arguments=said)
    return run.write(directory, world_size=world)


def test_pieces_of_what_a_function_cuts(tmp_path: Path) -> None:
    """Both runs cut the sequence by hand: what one function is given, whole, its pieces make; the same bytes lie alike later."""
    two = _by_sequence(tmp_path / "two", 2)
    result = compare(two, _by_sequence(tmp_path / "four", 4))
    assert (result.verdict, result.counts["compared"]) == ("aligned", 3), result.sentence
    assert compare(two, _by_sequence(tmp_path / "off", 4, 1.1)).verdict == "deviates"


def _by_heads(directory: Path, world: int, turned: int = 0) -> Path:
    """Heads are exchanged for places between the ranks and back, as in Ulysses; a piece is as long as a head is wide."""
    run, x = Recording(parts="stats digest tensor"), np.random.default_rng(0).normal(size=(2, 4, 8, 4)).astype(np.float32)
    for rank in range(world):
        count = np.arange(8 // world)
        places, mine = count + rank * len(count), np.split(x, world, axis=2)[rank]
        run.call("torch.arange", [], [count], level="api", rank=rank, arguments={"end": len(count)})
        run.call("torch.Tensor.add", [count], [places], level="api", rank=rank, arguments={"other": rank * len(count)})
        run.call("Model", {"input.0": mine, "input.1": places}, [2 * mine], level="module", rank=rank)
        heads = np.split(np.roll(x, turned, axis=1), world, axis=1)[rank]
        run.call("lib.Swap.apply", [mine], [heads], level="api", rank=rank)
        run.call("torch.Tensor.mul", [heads.copy()], [2 * heads], level="api", rank=rank)
        back = np.split(np.roll(2 * x, turned, axis=1), world, axis=2)[rank]
        run.call("lib.Swap.apply", [2 * heads], [back], level="api", rank=rank)
    return run.write(directory, world_size=world)


def test_heads_that_are_exchanged_for_places(tmp_path: Path) -> None:
    two, four = _by_heads(tmp_path / "two", 2), _by_heads(tmp_path / "four", 4)
    assert [compare(*pair).verdict for pair in ((two, four), (four, two))] == ["aligned"] * 2
    assert compare(two, _by_heads(tmp_path / "turned", 4, turned=1)).verdict == "deviates"


def test_the_inside_of_what_autograd_does_not_see() -> None:
    def row(seq: int, op: str, parent: int | None, phase: str = "forward", level: str = "api") -> dict[str, object]:
        return {"seq": seq, "level": level, "phase": phase, "op": op, "parent": parent}

    rows = [row(0, "Model", None, level="module"), row(1, "ring.Ring.apply", 0), row(2, "torch.exp", 1)]
    rows += [row(3, "checkpoint.CheckpointFunction.apply", 0), row(4, "Linear", 3, level="module"), row(5, "torch.exp", 4)]
    rows += [row(6, "ring.Ring.apply", None, "backward"), row(7, "torch.mul", 6), row(8, "all_reduce", 6, "collective", "module")]
    rows += [row(9, "multi_head_attention_forward", 0), row(10, "linear", 9)]
    assert _closed(rows) == {1, 6}


def test_tokens_that_travel_to_their_expert_are_only_moved() -> None:
    def row(seq: int, op: str, parent: int | None, phase: str = "forward", dtype: str = "float32") -> dict[str, object]:
        return {"seq": seq, "phase": phase, "op": op, "parent": parent, "scope": "mlp", "slot": "output.0", "dtype": dtype}

    rows = [
        row(1, "moe.Travel.apply", 0),
        row(2, "all_to_all_single", 1, "collective"),
        row(3, "all_to_all_single", 2, "collective"),
    ]
    assert _sending([*rows, row(4, "all_reduce", 0, "collective")], {1}) == {1: "mlp"}
    moved = ("torch.Tensor.index_copy_", "float32"), ("torch.Tensor.cumsum", "int64"), ("torch.Tensor.__eq__", "bool")
    computed = ("torch.softmax", "float32"), ("torch.Tensor.mul", "float32")
    assert [_moves([row(5, op, 0, dtype=dtype)]) for op, dtype in (*moved, *computed)] == [True, True, True, False, False]


def test_what_is_sent_forward_has_no_call_in_the_backward() -> None:
    """A sum over ranks behind each expert: its backward hands the gradient on, and sends nothing."""
    shared = {"level": "api", "scope": "mlp", "slot": "output.0", "dtype": "float32", "producer_seq": None}
    rows = [
        {**shared, "seq": seq, "op": op, "parent": parent, "phase": phase, "forward_seq": forward}
        for seq, op, parent, phase, forward in (
            (1, "moe.Reduce.apply", None, "forward", None), (2, "all_reduce", 1, "collective", None),
            (3, "moe.Scale.apply", None, "forward", None), (4, "moe.Scale.apply", None, "backward", 3),
            (5, "moe.Reduce.apply", None, "backward", 1),
        )
    ]  # fmt: skip
    assert {1, 3, 4, 5} & _serving(rows, _closed(rows), {"mlp"}, stepped=True) == {1, 5}
    assert not {1, 3, 4, 5} & _serving(rows, _closed(rows), (), stepped=True)


def test_what_is_done_to_gradients_before_a_flat_buffer() -> None:
    def row(seq: int, phase: str, scope: str = "", forward: int | None = None) -> dict[str, object]:
        return {"seq": seq, "phase": phase, "level": "api", "scope": scope, "forward_seq": forward}

    rows = [row(0, "forward", "up"), row(1, "forward"), row(2, "backward", "up", 0), row(3, "forward"), row(4, "forward", "up")]
    assert _prepared([*rows, row(5, "optimizer"), row(6, "forward")]) == {3}
    assert _prepared([row(0, "forward"), row(1, "optimizer")]) == set()
    assert _prepared([row(3, "forward"), row(4, "backward", "", 3)]) == set()


def test_calls_of_an_optimizer_after_those_that_clip() -> None:
    ops = ("_foreach_norm", "clamp", "lerp_", "addcdiv_", "lerp_", "addcdiv_")
    keys = [("optimizer", "api", "", op, ops[:n].count(op)) for n, op in enumerate(ops)]
    calls: Any = SimpleNamespace(kept={key: SimpleNamespace(key=key) for key in keys})
    assert [call.key[3] for call in updates_in(calls, 2)] == ["lerp_", "addcdiv_", "lerp_", "addcdiv_"]
    assert updates_in(calls, 3) == []


def test_experts_that_two_of_four_ranks_hold() -> None:
    """Of four ranks 0 and 2 hold one expert, 1 and 3 another; what one of three ranks does besides, nobody knows."""

    def key(scope: str) -> tuple[str, str, str, str, int]:
        return "forward", "module", scope, "Expert", 0

    def held(*scopes: str) -> Any:
        return SimpleNamespace(kept={key(scope): SimpleNamespace(rows={"input.0": 0}) for scope in scopes})

    ranks = Geometry(("ranks",), {rank: (rank,) for rank in range(4)})
    standing: Any = SimpleNamespace(workers=ranks, ranks=ranks, passes=1, stages=frozenset())
    makers, alone = made_by({rank: held("router", f"experts.{rank % 2}") for rank in range(4)}, standing, ())
    assert (makers[key("experts.0")], makers[key("experts.1")], alone) == ([0, 2], [1, 3], 0)


def _gathering(directory: Path, world: int, wrong: float = 1.0) -> Path:
    """A module that gathers, by hand, pieces of what nobody knows how it lies, and makes of them what all ranks have."""
    run, x = Recording(parts="stats digest tensor"), np.arange(6, dtype=np.float32).reshape(3, 2)
    for rank in range(world):
        made = x * np.float32(2 * wrong)
        at = run.call("Attention", {"input.0": x}, [made], level="module", scope="attention", rank=rank)
        inner = {"level": "api", "scope": "attention", "rank": rank, "parent": at}
        mine = x if world == 1 else np.ascontiguousarray(np.roll(x, rank + 1, axis=1)[:1]) + rank
        gathered = run.call("gather", [mine], [mine + 1], **inner)
        run.call("gather", {"grad_output.0": mine}, {"grad_input.0": mine * 3}, phase="backward", forward=gathered, **inner)
        run.call("add", [x], [x + 1], **inner)
        run.call("Norm", {"input.0": made}, [made + 1], level="module", scope="norm", rank=rank)
        if world > 1:
            run.call("torch.distributed.all_gather", [mine], [], phase="collective", rank=rank, arguments={"ranks": "0-1"})
    return run.write(directory, world_size=world)


def test_how_a_module_computes_what_agrees_is_its_own_matter(tmp_path: Path) -> None:
    whole = _gathering(tmp_path / "one", 1)
    result = compare(whole, _gathering(tmp_path / "two", 2))
    assert result.verdict != "deviates", result.sentence
    assert result.counts["compared"] == 3, result.sentence
    off = compare(whole, _gathering(tmp_path / "off", 2, 1.1))
    assert (off.verdict, off.culprits[0].scope) == ("deviates", "attention")


@pytest.mark.parametrize(
    ("kind", "slot", "axis", "counts"),
    [("argument", "output.0", "cp", True), ("argument", "output.0", "tp", False), ("argument", "input.0", "cp", False)],
)
def test_a_count_of_places_is_as_long_as_a_piece(kind: str, slot: str, axis: str, counts: bool) -> None:
    key = ("forward", "api", "", "torch.arange", 0)
    fields = dict(zip(("phase", "level", "scope", "op", "ordinal"), key, strict=True))
    found: Any = SimpleNamespace(kind=kind, step=0, slots=[SimpleNamespace(slot=slot)], **fields)
    step = SimpleNamespace(ways={(key, "output.0"): {axis: CUT}})
    run: Any = SimpleNamespace(step=lambda _: step, standing=SimpleNamespace(sequence={"cp": ()}))
    assert counts_piece(found, run) == counts


@pytest.mark.parametrize(("kind", "slot", "unplaced"), [("unknown", "param.weight", True), ("replicas", "param.weight", False),
                                                        ("unknown", "output.0", False)])  # fmt: skip
def test_shapes_of_pieces_that_nobody_can_place(kind: str, slot: str, unplaced: bool) -> None:
    key = ("forward", "module", "up", "Linear", 0)
    fields = dict(zip(("phase", "level", "scope", "op", "ordinal"), key, strict=True))
    found: Any = SimpleNamespace(kind="input", step=0, slots=[SimpleNamespace(slot="param.weight")], **fields)
    side: Any = SimpleNamespace(apart=[Apart(kind, key, slot, 0, 1, "tp", (0, 1))])
    assert is_unplaced(found, (side, SimpleNamespace(apart=[]))) == unplaced  # type: ignore[arg-type]


def test_gradients_of_some_weights_are_no_proof() -> None:
    first, second, twice = _parts(*(np.arange(1, 5, dtype=np.float32) * factor for factor in (1, 3, 2)))
    assert off({"a": first, "b": second}, {"a": first, "b": second}, {}) == []
    assert off({"a": first, "b": second}, {"a": first}, {}) is None
    found = off({"a": first, "b": second}, {"a": twice}, {})
    assert [(one.weights, round(one.ratio, 3)) for one in found or ()] == [(("a",), 2.0)]


@pytest.mark.parametrize(
    ("factors", "found"),
    [((2, 2, 2, 3, 3, 3), True), ((2, 2, 2, 2, 2, 2), False), ((2, 2, 3, 3, 3, 3), False), ((2, 2, 2, 3, 2, 3), False)],
)
def test_factors_of_each_piece_of_a_flat_buffer(factors: tuple[int, ...], found: bool) -> None:
    """Three weights of which two ranks hold halves, the second torn."""
    whole = np.random.default_rng(0).normal(size=24).astype(np.float32)
    wrong = whole * np.repeat(np.array(factors, np.float32), 4)
    first, second = (dict(zip("abc", _parts(*np.split(held, 3)), strict=True)) for held in (whole, wrong))
    assert [round(one, 5) for one in by_pieces(off(first, second, {}) or [], second, 2)] == ([2, 3] if found else [])


def test_a_tied_weight_and_its_copy_have_one_gradient() -> None:
    first, second, twice = _parts(*(np.arange(1, 5, dtype=np.float32) * factor for factor in (1, 3, 2)))
    whole, tied = {"words": first, "up": second}, {"head": "words"}
    assert off(whole, {**whole, "head": first}, tied) == off({**whole, "head": first}, whole, tied) == []
    assert [one.weights for one in off(whole, {**whole, "head": twice}, tied) or ()] == [("head",)]
    assert off(whole, {**whole, "head": first}, {}) is None


def test_a_weight_that_stays_as_it_was() -> None:
    first, moved, rounded = _parts(*(np.full(4, value, np.float32) for value in (1, 1.01, 1 + 2**-23)))
    at = ("forward", "module", "up", "Linear", 0), "param.weight"
    still = {0: {at: first}, 1: {at: first}}
    assert staying({0: {at: first}, 1: {at: moved}}, still) == (at, 0, 1)
    both = {0: {at: first}, 1: {at: moved}}
    assert staying(still, still) is staying(both, both) is staying({0: {at: first}, 1: {at: rounded}}, still) is None


def _each_cuts_another(directory: Path, cut: str, wrong: float = 1.0) -> Path:
    """Two ranks that cut one of two weights by hand, and have the other whole."""
    run, x = Recording(parts="stats digest tensor"), np.arange(6, dtype=np.float32).reshape(3, 2)
    weight = np.arange(8, dtype=np.float32).reshape(4, 2)
    for rank in range(2):
        for scope in ("up", "gate"):
            held = np.split(weight, 2)[rank] if scope == cut else weight
            made = (x @ held.T) * np.float32(wrong)
            run.call("Linear", {"input.0": x, "param.weight": held}, [made], level="module", scope=scope, rank=rank)
    return run.write(directory, world_size=2)


def test_each_run_shows_how_the_other_is_cut(tmp_path: Path) -> None:
    first = _each_cuts_another(tmp_path / "up", "up")
    for baseline, candidate in ((first, "gate"), (_each_cuts_another(tmp_path / "gate", "gate"), "up")):
        assert compare(baseline, _each_cuts_another(tmp_path / f"{baseline.name}-{candidate}", candidate)).verdict == "aligned"
    assert compare(first, _each_cuts_another(tmp_path / "off", "gate", 1.1)).verdict == "deviates"


@pytest.mark.parametrize(("seeds", "verdict"), [((1, 1), "deviates"), ((1, 2), "aligned")])
def test_masks_of_what_is_partly_zero(tmp_path: Path, seeds: tuple[int, int], verdict: str) -> None:
    """What an activation has set to zero on one rank was dropped by no mask."""
    run = Recording(parts="stats digest tensor")
    for rank, seed in enumerate(seeds):
        x = np.maximum(np.random.default_rng(rank).normal(size=(32, 32)), 0).astype(np.float32)
        mask = np.random.default_rng(seed + 7).random((32, 32)) > 0.3
        run.call("Model", {"input.0": x}, [x + 1], level="module", rank=rank)
        run.call("torch.nn.functional.dropout", [x], [x * mask], level="api", rank=rank)
    ranks = check(run.write(tmp_path / "run", world_size=2), replicas=True).ranks
    assert ranks is not None
    assert ranks.verdict == verdict, ranks.sentence


@pytest.mark.parametrize(
    ("data", "cut", "seeds", "said"),
    [
        ((0, 1, 0, 1), 1, (), "ranks 0, 2 hold WHAT: they learn the same 2 times; and 1 more"),
        ((0, 0, 1, 2), 1, (), "ranks 0, 1 hold WHAT: they learn the same 2 times"),
        ((0, 0, 0, 0), 1, (1, 2, 3, 4), "all 4 ranks hold WHAT: they learn the same 4 times"),
        ((0, 0, 0, 0), 4, (), ""),  # inside the model each has a part of the sequence
        ((0, 1, 2, 3), 1, (), ""),
    ],
)
def test_ranks_that_learn_the_same(tmp_path: Path, data: tuple[int, ...], cut: int, seeds: tuple[int, ...], said: str) -> None:
    run, weight = Recording(parts="stats digest tensor"), np.arange(16, dtype=np.float32).reshape(2, 8)
    said = said.replace("WHAT", "the same weights and are given the same data")
    for rank, batch in enumerate(data):
        x = np.random.default_rng(batch).normal(size=(8, 4, 8)).astype(np.float32)
        run.call("Model", {"input.0": x}, [x], level="module", rank=rank)
        mine = np.split(x, cut, axis=1)[rank % cut]
        run.call("Linear", {"input.0": mine, "param.weight": weight}, [mine @ weight.T], level="module", scope="up", rank=rank)
        if seeds:
            mask = np.random.default_rng(seeds[rank]).random((8, 4, 2)) > 0.3
            run.call("torch.nn.functional.dropout", [mine @ weight.T], [mine @ weight.T * mask], level="api", rank=rank)
    ranks = check(run.write(tmp_path / "run", world_size=4), replicas=True).ranks
    assert ranks is not None
    assert (ranks.sentence == said) if said else (ranks.verdict != "deviates" and not ranks.found), ranks.sentence


def test_places_that_views_alone_read_are_no_calls() -> None:
    def row(seq: int, op: str, slot: str, dtype: str, made: int | None = None) -> dict[str, object]:
        return {"seq": seq, "level": "api", "phase": "forward", "scope": "", "op": op, "slot": slot, "dtype": dtype,
                "producer_seq": made, "forward_seq": None}  # fmt: skip

    rows = [
        row(0, "torch.arange", "output.0", "int64"), row(1, "torch.cat", "input.0.0", "int64", 0),
        row(1, "torch.cat", "output.0", "int64"),
        row(2, "torch.Tensor.__getitem__", "input.1", "int64", 1), row(3, "torch.arange", "output.0", "int64"),
        row(4, "torch.nn.functional.embedding", "input.0", "int64", 3), row(5, "torch.argmax", "input.0", "float32"),
        row(5, "torch.argmax", "output.0", "int64"), row(6, "torch.Tensor.__getitem__", "input.1", "int64", 5),
    ]  # fmt: skip
    assert _looked_up(rows, set()) == {0, 1}


@pytest.mark.parametrize(
    ("made", "mine", "dim"),
    [
        ((2, 5, 12), (2, 4, 5, 3), 1),  # heads before places
        ((2, 5, 12), (2, 5, 4, 3), 2),
        ((2, 4, 12), (2, 4, 4, 3), 1),  # as many heads as places
        ((2, 5, 12), (2, 5, 12), 2),
        ((2, 5, 12), (2, 5, 6), None),  # a half of features that are one block
        ((2, 5, 12), (10, 12), None),
    ],
)
def test_heads_of_features_that_are_cut(made: tuple[int, ...], mine: tuple[int, ...], dim: int | None) -> None:
    maker, key = (("forward", "api", "q", "linear", 0), "output.0"), ("forward", "api", "", "scaled_dot_product_attention", 0)
    told = Told(0, {"tp": 2}, frozenset(), {}, undeclared, {maker: {"tp": Way("sharded", 2)}}, shapes={maker: made})
    slot = Slot(key, "input.0", 7, 1, {}, None, (), maker)
    assert _through_views("tp", slot, Piece("float32", mine), told) == (None if dim is None else Way("sharded", dim))


def test_sequences_cut_inside_one_model(tmp_path: Path) -> None:
    """Sequence beside tensor parallelism: the models are given the same, their norms are not."""

    def train(directory: Path, parts: int) -> Path:
        run, x = Recording(parts="stats digest tensor"), np.arange(8, dtype=np.float32).reshape(1, 4, 2)
        for rank in range(2):
            run.call("Model", {"input.0": x}, [2 * x], level="module", rank=rank)
            mine = np.split(x, parts, axis=1)[rank % parts]
            run.call("Norm", {"input.0": mine}, [mine + 1], level="module", scope="norm", rank=rank)
        return run.write(directory, world_size=2)

    result = compare(train(tmp_path / "tp", 1), train(tmp_path / "sp", 2))
    assert "the layouts differ (2 processes, and weights or batches that are cut elsewhere)" in result.sentence
    assert result.verdict == "aligned"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[slot]]\nslot = "output.0"\ndims = "b h[tp:zag]"', "'h[tp:zag]' is no dimension: expected name, name[axis] or"),
        ('[[slot]]\nslot = "output.0"\ndims = "b[tp] h[tp]"', "axis 'tp' cuts two dimensions"),
        ('[[slot]]\nslot = "output.0"', "dims and partial are missing"),
        ('[[slot]]\ndims = "b"', "slot"),
    ],
)
def test_wrong_declarations(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "shards.toml"
    file.write_text(text)
    with pytest.raises(TrueupError) as caught:
        load(file)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"shards file {file}: ")
    assert str(caught.value).endswith("see docs/layouts.md")
