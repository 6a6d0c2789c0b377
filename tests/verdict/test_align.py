"""Which call is which: by order where the two sides execute the same, by data where they do not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest

from trueup.comparison.graph.streams import WAYS, Row, Stream
from trueup.comparison.verdict.align import align
from trueup.foundation.store import table
from verdict.captures import NAMES, VALUES, Array, Recording, changed, load, normal


def chain(outputs: Iterable[Array], op: str = "aten::add", scope: str = "") -> Recording:
    run = Recording()
    for output in outputs:
        run.call(op, [], [output], scope=scope)
    return run


@dataclasses.dataclass
class Found:
    """An alignment as calls."""

    pairs: list[tuple[Row, Row]]
    only_baseline: list[Row]
    only_candidate: list[Row]


def rows(baseline: Stream, candidate: Stream) -> Found:
    found = align(baseline, candidate)
    first, second = ([s.row(k) for k in side] for s, side in ((baseline, found.baseline), (candidate, found.candidate)))
    rest = ((baseline, found.only_baseline), (candidate, found.only_candidate))
    return Found(list(zip(first, second, strict=True)), *([s.row(k) for k in side] for s, side in rest))


def aligned(baseline: Recording, candidate: Recording) -> Found:
    return rows(baseline.stream(), candidate.stream())


def numbers(found: Found) -> list[tuple[int, int]]:
    return [(b.seq, c.seq) for b, c in found.pairs]


def different(count: int, start: int = 0, shape: tuple[int, ...] = (8,)) -> list[Array]:
    return [normal(*shape, seed=start + k) for k in range(count)]


def test_equal_streams_pair_one_to_one() -> None:
    found = aligned(chain(different(20)), chain(different(20)))
    assert numbers(found) == [(k, k) for k in range(20)]
    assert not found.only_baseline
    assert not found.only_candidate


@pytest.mark.parametrize("position", [0, 3, 9, 10])
def test_only_the_inserted_call_is_unmatched(position: int) -> None:
    tensors = different(10)
    longer = [changed(t, 1e-6, seed=k) for k, t in enumerate(tensors)]
    longer.insert(position, normal(8, seed=99))
    found = aligned(chain(tensors), chain(longer))
    assert [c.seq for c in found.only_candidate] == [position]
    assert not found.only_baseline
    assert numbers(found) == [(k, k + (k >= position)) for k in range(10)]


def test_only_the_deleted_call_is_unmatched() -> None:
    tensors = different(10)
    found = aligned(chain(tensors), chain(tensors[:4] + tensors[5:]))
    assert [c.seq for c in found.only_baseline] == [4]
    assert not found.only_candidate


def test_inputs_find_the_partner_of_a_call_whose_result_is_wrong() -> None:
    inputs, outputs = different(6), different(6, 50)
    runs = Recording(), Recording()
    for k in range(6):
        runs[0].call("aten::relu", [inputs[k]], [outputs[k]])
    runs[1].call("aten::relu", [normal(8, seed=90)], [normal(8, seed=91)])
    for k in range(6):
        runs[1].call("aten::relu", [inputs[k]], [normal(8, seed=77) if k == 3 else outputs[k]])
    found = aligned(*runs)
    assert numbers(found) == [(k, k + 1) for k in range(6)]


def test_fused_against_unfused_leaves_what_has_no_counterpart() -> None:
    before, after = normal(4, 8), normal(4, 8, seed=5)
    baseline, candidate = Recording(), Recording()
    for run in (baseline, candidate):
        run.call("aten::mm", [], [before])
    baseline.call("aten::_fused_gelu", [before], [after])
    half, error = before / 2, normal(4, 8, seed=6)
    candidate.call("aten::mul", [before], [half])
    candidate.call("aten::erf", [before], [error])
    candidate.call("aten::mul", [half, error], [after])
    for run in (baseline, candidate):
        run.call("aten::sum", [after], [np.float32([after.sum()])])
    found = aligned(baseline, candidate)
    assert [(b.op, c.op) for b, c in found.pairs] == [("aten::mm", "aten::mm"), ("aten::sum", "aten::sum")]
    assert [c.op for c in found.only_baseline] == ["aten::_fused_gelu"]
    assert [c.op for c in found.only_candidate] == ["aten::mul", "aten::erf", "aten::mul"]


def model(names: str, *, extra: bool = False, other: int = 0) -> Recording:
    """Record three layers of two products each, on other shapes in each layer; the last has an extra call or not."""
    run = Recording()
    for layer in range(3):
        for part, op in (("fc1", "aten::mm"), ("fc2", "aten::addmm")):
            run.call(op, [], [normal(4 + layer, 8, seed=layer + other)], scope=f"{names}.{layer}.{part}")
    if extra:
        run.call("aten::relu", [], [normal(6, 8)], scope=f"{names}.2.fc2")
    return run


def test_a_renamed_module_is_found_by_what_it_executes() -> None:
    baseline, candidate = model("encoder.layers").stream(), model("backbone", other=50).stream()
    found = align(baseline, candidate)
    assert found.baseline.tolist() == found.candidate.tolist() == list(range(6))
    assert {WAYS[way] for way in found.paired} == {"renamed"}
    assert found.scopes["backbone.1.fc2"] == "encoder.layers.1.fc2"


def test_what_the_others_are_called_names_a_module_that_executes_something_else() -> None:
    found = aligned(model("encoder.layers"), model("backbone", extra=True, other=50))
    assert (len(found.pairs), [c.op for c in found.only_candidate]) == (6, ["aten::relu"])


def test_modules_of_other_operators_are_not_one() -> None:
    found = aligned(chain(different(3), op="aten::mm", scope="a"), chain(different(3, 9), op="aten::bmm", scope="b"))
    assert (len(found.pairs), len(found.only_baseline), len(found.only_candidate)) == (0, 3, 3)


def test_a_call_that_moved_to_another_module_is_found_by_its_data() -> None:
    runs = Recording(), Recording()
    for run, scope in zip(runs, ("head", "neck"), strict=True):
        for k in range(3):
            run.call("aten::mm", [], [normal(4, seed=k)], scope="head" if k else scope)
        run.call("aten::mm", [], [normal(4, seed=8 + (run is runs[1]))], scope="neck")
    streams = runs[0].stream(), runs[1].stream()
    found = align(*streams)
    pairs = {(b, c): WAYS[way] for b, c, way in zip(found.baseline.tolist(), found.candidate.tolist(), found.paired, strict=True)}
    assert pairs[0, 0] == "data"


def test_equal_data_of_several_calls_pair_nothing() -> None:
    same = normal(4)
    found = aligned(chain([same, same], scope="a"), chain([same, same, same], op="aten::add", scope="b"))
    assert not found.pairs


def test_phases_and_levels_do_not_mix() -> None:
    baseline, candidate = Recording(), Recording()
    for run, level, phase in ((baseline, "aten", "forward"), (candidate, "api", "forward"), (candidate, "aten", "backward")):
        run.call("mm", [], [normal(3)], level=level, phase=phase)
    assert not aligned(baseline, candidate).pairs


def test_other_shapes_are_never_paired_when_sequences_differ() -> None:
    small, large = different(4), different(4, 20, (9,))
    found = aligned(chain([*small[:2], *large]), chain([*small, *large[:1]]))
    shapes = [(len(b.slots), b.seq, c.seq) for b, c in found.pairs]
    assert [(b, c) for _, b, c in shapes] == [(0, 0), (1, 1), (2, 4)]


def test_no_other_shape_in_a_bucket_too_long_for_the_table() -> None:
    count = 6000
    shapes = [(2,), (3,)]
    tensors = [np.full(shapes[k % 2], k, np.float32) for k in range(count)]
    rotated = [np.full(shapes[(k + 1) % 2], -k, np.float32) for k in range(count + 1)]
    found = aligned(chain(tensors), chain(rotated))
    assert found.pairs
    assert all(tensors[b].shape == rotated[c].shape for b, c in numbers(found))
    assert len({c for _, c in numbers(found)}) == len(found.pairs)


def test_a_hundred_thousand_calls_in_one_bucket_stay_fast() -> None:
    count = 100_000
    tensors = [np.float32([k, -k]) for k in range(97)]  # of which the bucket holds many copies: they are made quickly
    place = 70_000
    few = chain(tensors)
    whole = table(few.columns(few.rows) | {"step": [0] * 97, "rank": [0] * 97})
    streams = []
    for side in (0, 1):
        which, names = [k * k % 97 for k in range(count)], ["aten::add"] * count
        if side:
            which.insert(place, 0)
            names.insert(place, "aten::mul")
        many = whole.take(which)
        for name, values in (("op", pa.array(names).dictionary_encode()), ("seq", pa.array(range(len(which))))):
            many = many.set_column(many.schema.get_field_index(name), name, values)
        streams.append(load(many, NAMES, VALUES))
    started = time.process_time()
    found = rows(*streams)
    assert time.process_time() - started < 5
    assert [c.seq for c in found.only_candidate] == [place]
    assert not found.only_baseline


def test_many_calls_of_one_operator_stay_fast() -> None:
    count = 1500
    tensors = [np.float32([k, -k]) for k in range(1, count)]
    other = [t + np.float32(1e-3) for t in tensors[1:]]
    streams = chain(tensors).stream(), chain(other).stream()
    started = time.process_time()
    found = rows(*streams)
    assert time.process_time() - started < 10
    assert len(found.pairs) == count - 2
    assert [b.seq for b in found.only_baseline] == [0]


def test_casts_in_another_order_are_paired_by_what_they_cast() -> None:
    weight, x, rest = normal(4, 8), normal(16, 4, seed=1), different(3, start=2)
    found = aligned(chain([weight, x, *rest], op="aten::_to_copy"), chain([x, changed(weight, 1e-3), *rest], op="aten::_to_copy"))
    assert sorted(numbers(found)) == [(0, 1), (1, 0), (2, 2), (3, 3), (4, 4)]


def test_another_shape_is_another_operator_but_the_same_function() -> None:
    tensors = different(3)
    other = [*tensors[:2], normal(9, seed=7)]
    found = aligned(chain(tensors), chain(other))
    assert (numbers(found), [c.seq for c in found.only_candidate]) == ([(0, 0), (1, 1)], [2])


def layered(scale: float = 1.0, **last: object) -> Recording:
    """Calls in scopes, one of them with a shape of its own, as often as not the same operator."""
    run = Recording()
    for k in range(12):
        run.call(f"aten::{'add' if k % 3 else 'mul'}", [], [scale * normal(4 + k % 2, 3, seed=k)], scope=f"layers.{k % 4}")
    run.call("aten::mm", [normal(3, 3)], [normal(3, 3, seed=1)], **({"scope": "head"} | last))
    return run


def test_streams_of_one_structure_are_paired_at_a_glance_as_they_are_the_long_way() -> None:
    baseline = layered().stream()
    far, near = layered(scale=2.0).stream(), layered(scale=2.0).stream(like=baseline)
    assert near.is_like(baseline)
    assert not far.is_like(baseline)
    for found, expected in zip(dataclasses.astuple(align(baseline, near)), dataclasses.astuple(align(baseline, far)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("other", [{"scope": "tail"}, {"phase": "backward"}, {"level": "api"}, {"forward": 3}])
def test_a_stream_that_differs_anywhere_is_not_like_another(other: dict[str, object]) -> None:
    baseline = layered().stream()
    assert not layered(**other).stream(like=baseline).is_like(baseline)


def test_what_streams_hold_alike_is_read_as_it_is_alone() -> None:
    baseline = layered().stream()
    near, far = layered(scale=2.0).stream(like=baseline), layered(scale=2.0).stream()
    for name in ("starts", "call", "seq", "step", "scope", "op", "slot", "dtype", "producer", "numel", "counts", "l2", "arguments"):
        np.testing.assert_array_equal(getattr(near, name), getattr(far, name), err_msg=name)
    assert near.shapes is baseline.shapes
    assert near.l2 is not baseline.l2


def test_a_pair_of_unlike_data_gives_way_where_its_calls_are_alike_out_of_order() -> None:
    """A backward transposes a weight first on one side and last on the other; gradients of that shape are no counterparts."""
    weight, gradient = normal(8, 8, seed=1), normal(8, 8, seed=2)
    first, second = Recording(), Recording()
    for run, order in ((first, (weight, gradient)), (second, (gradient, weight))):
        run.call("aten::view" if run is first else "aten::sum", [normal(3)], [normal(3)])
        for tensor in order:
            run.call("aten::t", [tensor], [tensor.T])
    assert sorted(numbers(aligned(first, second))) == [(1, 2), (2, 1)]


def test_the_most_alike_go_first_and_a_call_given_another_number_is_another_call() -> None:
    """The gradient of ``0.9 * a + 0.1 * mean(b)``: both products read a one, and are written in another order by hand."""
    first, second = Recording(), Recording()
    one = np.ones((), np.float32)
    for run, factors in ((first, (0.9, 1 / 336)), (second, (0.1, 0.9))):
        run.call("aten::view" if run is first else "aten::sum", [normal(3)], [normal(3)])
        for factor in factors:
            run.call("aten::mul", [one], [one * np.float32(factor)], arguments={"1": factor})
    found = aligned(first, second)
    assert numbers(found) == [(1, 2)]
    assert [b.seq for b in found.only_baseline] == [0, 2]


def test_unlike_data_stay_a_pair_where_nothing_is_alike() -> None:
    first, second = chain([normal(8, seed=1)]), chain([normal(8, seed=2), normal(3)])
    assert numbers(aligned(first, second)) == [(0, 0)]


def test_equal_data_of_another_shape_are_no_pair() -> None:
    kernel = normal(8, 8, 3, 3)
    first, second = Recording(), Recording()
    first.call("aten::_to_copy", [kernel], [kernel])
    second.call("aten::im2col", [normal(3)], [normal(3)])
    second.call("aten::_to_copy", [kernel.reshape(8, 72)], [kernel.reshape(8, 72)])
    assert not aligned(first, second).pairs


def test_complex_numbers_are_no_counterparts_of_real_ones() -> None:
    same, real = normal(8), normal(8, seed=1)
    assert numbers(aligned(chain([same, real]), chain([same, real.astype(np.complex64)]))) == [(0, 0)]
    assert numbers(aligned(chain([same, real]), chain([same, real]))) == [(0, 0), (1, 1)]


def test_what_goes_backward_of_no_counterparts_and_is_unlike_is_matched_by_its_forward() -> None:
    """The backward of a backward runs before other calls on one device and after them on another."""

    def run(order: tuple[int, ...]) -> Recording:
        found, gradients = Recording(), different(3, start=10)
        calls = [found.call("linear", [], [x], level="api") for x in different(3)]
        for k in order:
            found.call("linear", {"grad_output.0": gradients[k]}, [], level="api", phase="backward", forward=calls[k])
        return found

    assert numbers(aligned(run((2, 1, 0)), run((1, 0, 2)))) == [(0, 0), (1, 1), (2, 2), (4, 3), (5, 4), (3, 5)]


def test_what_goes_backward_with_other_slots_is_matched_by_its_forward_too() -> None:
    def run(order: tuple[int, ...]) -> Recording:
        found = Recording()
        slots = [{"grad_output.0": normal(8, seed=20)}, {"grad_output.0": normal(8, seed=21), "grad_input.1": normal(4, seed=22)}]
        calls = [found.call("linear", [], [x], level="api") for x in different(2)]
        for k in order:
            found.call("linear", slots[k], [], level="api", phase="backward", forward=calls[k])
        return found

    assert numbers(aligned(run((1, 0)), run((0, 1)))) == [(0, 0), (1, 1), (3, 2), (2, 3)]
