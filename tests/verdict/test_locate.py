"""Culprits before victims, the finest level, and what is made of calls that only one side has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trueup.comparison.result.summary import of_a_kind
from trueup.comparison.verdict.judged import Part, Suspect
from trueup.comparison.verdict.locate import rank_culprits
from trueup.comparison.verdict.origins import Origins
from verdict.captures import Array, Recording, Slot, calls_of, changed, located, normal

W = normal(16, 16, seed=50)


def both() -> tuple[Recording, Recording]:
    return Recording(), Recording()


def products(run: Recording, start: Array, count: int, *, wrong: dict[int, float] | None = None, **call: Any) -> list[Array]:
    """Record a chain of ``mm`` calls, some of them wrong by a relative error."""
    results = [start]
    for k in range(count):
        right = (results[-1] @ W / np.float32(4)).astype(np.float32)
        result = changed(right, (wrong or {}).get(k, 0.0), seed=k)
        run.call("aten::mm", [results[-1], W], [result], **call)
        results.append(result)
    return results


def suspects(part: Part) -> list[tuple[str, str, int, bool]]:
    return [(s.kind, s.judged.call.candidate.op, s.place, s.certain) for s in rank_culprits(part.suspects)]


def roles(part: Part) -> list[str]:
    return [j.role for j in calls_of(part)]


def test_equal_runs_have_no_suspects() -> None:
    runs = both()
    for run in runs:
        products(run, normal(16, 16), 5)
    part = located(*runs)
    assert not part.suspects
    assert roles(part) == ["equal"] * 5
    assert not part.unexplained


def test_the_culprit_comes_before_its_victims() -> None:
    runs = both()
    products(runs[0], normal(16, 16), 6)
    products(runs[1], normal(16, 16), 6, wrong={2: 0.1})
    part = located(*runs)
    assert suspects(part) == [("operator", "aten::mm", 2, True)]
    assert roles(part) == ["equal", "equal", "carried", "carried", "carried", "carried"]


def test_another_culprit_with_clean_inputs_is_independent() -> None:
    runs = both()
    for run, wrong in zip(runs, ({}, {1: 0.1}), strict=True):
        products(run, normal(16, 16), 3, wrong=wrong)
    for run, wrong in zip(runs, ({}, {1: 0.1}), strict=True):
        products(run, normal(16, 16, seed=3), 3, wrong=wrong)
    assert [place for *_, place, _ in suspects(located(*runs))] == [1, 4]


def test_a_second_error_downstream_that_its_inputs_do_not_explain_is_independent() -> None:
    runs = both()
    products(runs[0], normal(16, 16), 6)
    products(runs[1], normal(16, 16), 6, wrong={1: 1e-2, 4: 3.0})
    part = located(*runs)
    assert [place for *_, place, _ in suspects(part)] == [1, 4]


def test_what_inputs_explain_of_which_nothing_is_left_is_not_known() -> None:
    runs = both()
    products(runs[0], normal(16, 16), 6)
    products(runs[1], normal(16, 16), 6, wrong={1: 2.0, 4: 300.0})
    part = located(*runs)
    assert [s.certain for s in part.suspects] == [True, False]
    assert [place for *_, place, _ in suspects(part)] == [1]


def test_a_backward_reads_what_its_forward_got_wrong() -> None:
    runs = both()
    for side, run in enumerate(runs):
        x, y = normal(16, 16), changed(normal(16, 16, seed=1), 1e-3 * side)
        forward = run.call("torch.f", [x], [y], level="api")
        grads = {"grad_output.0": normal(16, 16, seed=2)}, {"grad_input.0": changed(normal(16, 16, seed=3), 0.9 * side)}
        run.call("torch.f", *grads, level="api", phase="backward", forward=forward)
    part = located(*runs)
    assert len([s for s in part.suspects if s.certain]) == 2
    assert [place for *_, place, _ in suspects(part)] == [0]


def test_culprits_of_a_kind_are_one_finding() -> None:
    runs = both()
    for run, wrong in zip(runs, ({}, {1: 0.1}), strict=True):
        for start in (0, 3):
            products(run, normal(16, 16, seed=start), 3, wrong=wrong)
        run.call("aten::other", [normal(4)], [changed(normal(4, seed=1), 0.1 if wrong else 0.0)])
    kinds = of_a_kind(rank_culprits(located(*runs).suspects))
    assert [[s.place for s in kind] for kind in kinds] == [[1, 4], [6]]


def test_a_call_that_went_on_while_another_ran_passes_on_what_that_got_wrong() -> None:
    one, two, beside = (Suspect(s.judged, "operator", True) for s in 3 * located(*wrong_twice()).suspects[:1])
    for suspect, began, ready in ((one, 0, 9), (two, 3, 5), (beside, 3, 12)):
        suspect.began, suspect.ready = began, ready
    assert rank_culprits([one, two]) == [two]
    assert rank_culprits([one, beside]) == [one, beside]


def wrong_twice() -> tuple[Recording, Recording]:
    runs = both()
    for run, wrong in zip(runs, ({}, {1: 0.1}), strict=True):
        products(run, normal(16, 16), 3, wrong=wrong)
    return runs


def test_the_earliest_suspect_of_a_broken_operator_is_its_first_culprit() -> None:
    runs = both()
    products(runs[0], normal(16, 16), 6)
    products(runs[1], normal(16, 16), 6, wrong={1: 3e-6, 4: 0.5})
    part = located(*runs)
    assert [(s.place, s.certain) for s in part.suspects] == [(1, False), (4, True)]
    assert suspects(part) == [("operator", "aten::mm", 1, True), ("operator", "aten::mm", 4, True)]


@pytest.mark.parametrize(("op", "first"), [("aten::gelu", 0), ("aten::silu", 2)])
def test_a_broken_function_is_found_in_its_gradient(op: str, first: int) -> None:
    runs = both()
    for run, wrong in zip(runs, (0.0, 3e-6), strict=True):
        x, g = normal(16, 16), normal(16, 16, seed=2)
        run.call(op, [x], [changed(x, wrong)])
        run.call("aten::mm", [x, g], [x @ g])
        run.call("aten::gelu_backward", [g, x], [changed(g, 1e4 * wrong)], phase="backward")
    assert suspects(located(*runs))[0][2:] == (first, True)


def test_what_could_be_rounding_never_goes_before_a_certain_one_of_another_operator() -> None:
    runs = both()
    products(runs[0], normal(16, 16), 6)
    products(runs[1], normal(16, 16), 6, wrong={1: 3e-6, 4: 0.5})
    part = located(*runs)
    other = next(s for s in part.suspects if s.place == 1)
    other.judged.call.candidate.op = "aten::bmm"
    assert [s.place for s in rank_culprits(part.suspects)] == [4]
    products_only = [s for s in part.suspects if not s.certain]
    assert [s.place for s in rank_culprits(products_only)] == [1]


# ---------------------------------------------------------------- levels
def nested(inner: list[bool | None], *, outer_wrong: bool, unmeasured: bool = False) -> tuple[Recording, Recording]:
    """One api call with aten calls inside: right (True), wrong (False) or of another operator on the candidate (None)."""
    runs = both()
    for side, run in enumerate(runs):
        x = normal(16, 16)
        seq = run.seq
        run.seq += 1
        y = x
        for k, right in enumerate(inner):
            z = changed(normal(16, 16, seed=k + 7), 0.1 if side and right is False else 0.0)
            op = "aten::other" if side and right is None else f"aten::sub{k}"
            run.call(op, [y], [Slot(z, "") if unmeasured else z], parent=seq)
            y = z
        result = changed(normal(16, 16, seed=77), 0.1 if side and outer_wrong else 0.0)
        after, run.seq = run.seq, seq
        run.call("torch.f", [x], [result], level="api", scope="block")
        run.seq = after
        run.rows.sort(key=lambda row: row["seq"])
    return runs


def test_the_finer_level_speaks_for_the_coarser() -> None:
    part = located(*nested([True, False], outer_wrong=True))
    assert [(s.judged.call.candidate.op, s.api) for s in part.suspects] == [("aten::sub1", "torch.f")]


def test_the_coarser_level_speaks_where_the_finer_does_not_line_up() -> None:
    part = located(*nested([True, None], outer_wrong=True))
    assert [(s.judged.call.candidate.op, s.children) for s in part.suspects] == [("torch.f", ("aten::other", "aten::sub0"))]
    assert not part.uncovered


def test_unmatched_calls_inside_a_call_that_agrees_are_covered() -> None:
    part = located(*nested([True, None], outer_wrong=False))
    assert (len(part.alignment.only_baseline), len(part.alignment.only_candidate)) == (1, 1)
    assert not part.suspects
    assert not part.uncovered


def test_unmatched_calls_inside_a_call_without_result_are_not_covered() -> None:
    runs = both()
    for op, run in zip(("aten::a", "aten::b"), runs, strict=True):
        seq = run.call("torch.f", [normal(3)], [], level="api")
        run.call(op, [normal(3)], [normal(3, seed=ord(op[-1]))], parent=seq, phase="optimizer")
    origins = Origins()
    located(*runs, origins)
    assert [len(side) for side in origins.pending] == [1, 1]


def test_finer_calls_that_were_not_measured_do_not_speak() -> None:
    part = located(*nested([True, True], outer_wrong=True, unmeasured=True))
    assert [s.judged.call.candidate.op for s in part.suspects] == ["torch.f"]


def test_finer_calls_without_the_error_do_not_speak() -> None:
    part = located(*nested([True, True], outer_wrong=True))
    assert [s.judged.call.candidate.op for s in part.suspects] == ["torch.f"]


# ---------------------------------------------------------------- kinds
def test_an_argument_that_differs() -> None:
    runs = both()
    for run, eps, factor in zip(runs, (1e-5, 1e-3), (1, 1.01), strict=True):
        x = normal(64)
        run.call("aten::native_layer_norm", [x], [x * np.float32(factor)], arguments={"eps": eps})
    assert suspects(located(*runs)) == [("argument", "aten::native_layer_norm", 0, True)]


def given_eps(phase: str, effect: float) -> Part:
    runs = both()
    for run, eps, apart in zip(runs, (1e-5, 1e-6), (0.0, effect), strict=True):
        x = normal(64)
        run.call("aten::native_layer_norm", [x], [changed(x, apart)], arguments={"eps": eps}, phase=phase)
    return located(*runs)


def test_an_argument_whose_effect_is_rounding_is_no_culprit() -> None:
    """32 units of float32, 1.9e-6, are what a normalisation may be off by."""
    assert suspects(given_eps("forward", 3e-6)) == [("argument", "aten::native_layer_norm", 0, True)]
    part = given_eps("forward", 1e-6)
    assert suspects(part) == []
    assert [judged.call.candidate.op for judged in part.harmless] == ["aten::native_layer_norm"]
    assert given_eps("forward", 0.0).harmless == []


def test_what_an_optimizer_is_given_acts_in_every_step() -> None:
    assert suspects(given_eps("optimizer", 1e-7)) == [("argument", "aten::native_layer_norm", 0, True)]


def test_a_tensor_given_on_one_side_only_is_an_argument() -> None:
    runs = both()
    bias = normal(8, seed=4)
    for side, run in enumerate(runs):
        inputs = {"input.0": normal(8)} | ({} if side else {"input.bias": bias})
        run.call("torch.nn.functional.layer_norm", inputs, [normal(8) + (0 if side else bias)], level="api")
    assert suspects(located(*runs)) == [("argument", "torch.nn.functional.layer_norm", 0, True)]


def test_other_random_numbers_are_not_a_wrong_operator() -> None:
    runs = both()
    for seed, run in enumerate(runs):
        mask = normal(1000, seed=seed) > 0
        run.call("aten::bernoulli_", [np.zeros(1000, np.float32)], [mask.astype(np.float32)])
    assert suspects(located(*runs)) == [("random", "aten::bernoulli_", 0, True)]


def test_the_same_draw_scaled_otherwise_is_a_wrong_operator() -> None:
    runs = both()
    for scale, run in zip((2, 1), runs, strict=True):
        x, mask = normal(1000), normal(1000, seed=3) > 0
        run.call("aten::native_dropout", [x], [(x * mask * scale).astype(np.float32), mask])
    assert suspects(located(*runs)) == [("operator", "aten::native_dropout", 0, True)]


def test_the_same_draw_is_a_wrong_operator_whatever_drew_before() -> None:
    runs = Recording(), Recording()
    for run, scale, drawing in ((runs[0], 1 / 0.9, "aten::add"), (runs[1], 1.0, "aten::bernoulli_")):
        x, mask, other = normal(8, 24), normal(8, 24, seed=3) < 1.0, normal(8, 24, seed=4)
        run.call(drawing, [x], [other], scope="inside")
        run.call("torch.nn.functional.dropout", [x], [(x * mask * scale).astype(np.float32)], level="api")
    found = [s for s in located(*runs).suspects if s.judged.call.candidate.level == "api"]
    assert [s.kind for s in found] == ["operator"]


@pytest.mark.parametrize(("relative", "found"), [(0.0, False), (2e-7, False), (1e-4, True)])
def test_the_data_may_differ_by_a_few_units_from_the_start(relative: float, found: bool) -> None:
    runs = both()
    for side, run in enumerate(runs):
        x = changed(normal(16, 16), relative if side else 0.0)
        run.call("aten::mm", [x, W], [x @ W])
    assert suspects(located(*runs)) == ([("input", "aten::mm", 0, True)] if found else [])


def test_labels_that_differ_are_an_input() -> None:
    runs = both()
    for side, run in enumerate(runs):
        run.call("aten::embedding", [W, np.array([1, 2 + side])], [W[[1, 2 + side]]])
    part = located(*runs)
    assert suspects(part) == [("input", "aten::embedding", 0, True)]
    assert part.suspects[0].reason == "input.1"


# ---------------------------------------------------------------- regions
def lstm(run: Recording, x: Array, *, fused: bool, wrong: float = 0.0, measured: bool = True, read: bool = True) -> None:
    """A linear layer, an LSTM in one operator or in many, and a layer on top: aten only."""
    (first,) = products(run, x, 1)[1:]
    result = changed(normal(16, 16, seed=8), wrong)
    if fused:
        run.call("aten::_lstm_fused", [first, W], [result])
    else:
        gates, state = normal(16, 16, seed=11), normal(16, 16, seed=12)
        run.call("aten::_cell_gates", [first, W], [gates])
        run.call("aten::_cell_state", [gates], [state])
        run.call("aten::_cell_workspace", [state], [normal(4, seed=13)])  # a dead end
        run.call("aten::_cell_output", [state, gates], [result])
    if read:
        products(run, Slot(result, "") if not measured else result, 1)  # type: ignore[arg-type]


def test_a_region_that_agrees_is_covered() -> None:
    runs = both()
    lstm(runs[0], normal(16, 16), fused=True)
    lstm(runs[1], normal(16, 16), fused=False, wrong=1e-6)
    part = located(*runs)
    assert (len(part.alignment.only_baseline), len(part.alignment.only_candidate)) == (1, 4)
    assert not part.suspects
    assert not part.uncovered


def test_a_region_whose_sources_agree_and_whose_result_does_not_is_a_culprit() -> None:
    runs = both()
    lstm(runs[0], normal(16, 16), fused=True)
    lstm(runs[1], normal(16, 16), fused=False, wrong=0.1)
    part = located(*runs)
    assert suspects(part) == [("region", "aten::_cell_output", 4, True)]
    (region,) = part.suspects
    assert region.children == ("aten::_cell_gates", "aten::_cell_state", "aten::_cell_output")
    assert region.judged.error_in == 0
    assert region.judged.error_out == pytest.approx(0.1, rel=0.3)
    assert not part.uncovered


def test_a_region_whose_sources_differ_is_a_victim() -> None:
    runs = both()
    for side, run in enumerate(runs):
        x = products(run, normal(16, 16), 2, wrong={0: 0.2} if side else None)[-1]
        lstm(run, x, fused=not side, wrong=0.2 if side else 0.0)
    assert suspects(located(*runs)) == [("operator", "aten::mm", 0, True)]


def test_a_call_that_the_candidate_lacks_is_a_region() -> None:
    runs = both()
    for side, run in enumerate(runs):
        gradient = products(run, normal(16, 16), 1)[-1]
        if side == 0:
            reduced = gradient / np.float32(2)
            run.call("c10d::allreduce_", [gradient], [reduced], phase="collective")
            gradient = reduced
        products(run, gradient, 1)
    part = located(*runs)
    (region,) = rank_culprits(part.suspects)
    assert (region.kind, region.judged.call.candidate.op, region.sides) == ("region", "c10d::allreduce_", (True, False))
    assert region.place == 1
    assert region.certain


def test_a_call_only_one_side_has_that_changes_nothing_is_covered() -> None:
    runs = both()
    for side, run in enumerate(runs):
        x = products(run, normal(16, 16), 1)[-1]
        if side:
            copy = x.copy()
            run.call("aten::clone", [x], [copy])
            x = copy
        products(run, x, 1)
    part = located(*runs)
    assert len(part.alignment.only_candidate) == 1
    assert not part.suspects
    assert not part.uncovered


def test_a_region_that_is_read_unmeasured_is_not_covered() -> None:
    runs = both()
    for side, run in enumerate(runs):
        result = normal(16, 16, seed=8)
        name = f"aten::_f{side}"
        run.call(name, [normal(16, 16)], [result])
        seq = run.seq
        run.rows.append(run.rows[-1] | {"slot": "input.0", "tensor": Slot(result, ""), "producer": (seq - 1, "output.0"),
                                        "seq": seq, "op": "aten::mm"})  # fmt: skip
        run.rows.append(run.rows[-1] | {"slot": "output.0", "tensor": normal(3), "producer": (None, None)})
        run.seq += 1
    part = located(*runs)
    assert [(side, call.op) for side, call in part.uncovered] == [("baseline", "aten::_f0"), ("candidate", "aten::_f1")]


def test_dead_ends_are_covered_but_not_those_of_the_optimizer() -> None:
    runs = both()
    for side, run in enumerate(runs):
        run.call(f"aten::_f{side}", [normal(4)], [normal(4, seed=1)])
        run.call(f"aten::_fused_sgd_{side}", [normal(4)], [normal(4, seed=2 + side)], phase="optimizer")
    origins = Origins()
    part = located(*runs, origins)
    assert not part.uncovered
    assert [[row.op for row in side.values()] for side in origins.pending] == [["aten::_fused_sgd_0"], ["aten::_fused_sgd_1"]]


# ---------------------------------------------------------------- origins
def test_a_difference_that_no_compared_call_made_is_reported() -> None:
    runs = both()
    for side, run in enumerate(runs):
        g = changed(normal(16, 16), 0.3 if side else 0.0)
        run.call("aten::mm", [g, W], [g @ W], phase="backward")
    part = located(*runs)
    assert not part.suspects
    assert [slot for _, slot in part.unexplained] == ["input.0"]


def test_what_a_compared_call_made_arises_there_whatever_runs_inside() -> None:
    """What is left of terms that cancel is off by all of itself; the kernels inside are one run's alone."""
    runs = both()
    for side, run in enumerate(runs):
        x = normal(16, 16)
        left = normal(16, 16, seed=2 + side) * np.float32(1e-9)
        seq = run.call("torch.sub", [x, x.copy()], [left], level="api")
        run.call(f"aten::sub_{side}", [x, x.copy()], [left.copy()], parent=seq)
        run.call("torch.Tensor.view", [left], [left.reshape(-1)], level="api")
    part = located(*runs)
    assert not part.suspects
    assert not part.unexplained


def test_memory_that_changes_between_the_write_and_the_read_is_the_culprit() -> None:
    runs = both()
    for side, run in enumerate(runs):
        x = products(run, normal(16, 16), 3)[-1]
        if side:  # the same memory: what is read next is another value
            producer = run.made[id(x)]
            x = changed(x, 0.5)
            run.made[id(x)] = producer
        products(run, x, 2)
    (found,) = located(*runs).suspects
    assert (found.kind, found.place, found.reason, found.certain) == ("overwritten", 3, "input.0", True)


def test_a_baseline_that_overwrites_too_blames_nobody() -> None:
    runs = both()
    for side, run in enumerate(runs):
        x = products(run, normal(16, 16), 3)[-1]
        producer = run.made[id(x)]
        x = changed(x, 0.5, seed=side)
        run.made[id(x)] = producer
        products(run, x, 2)
    part = located(*runs)
    assert not part.suspects
    assert part.unexplained


def test_a_call_without_results_whose_input_differs_does_not_agree() -> None:
    runs = both()
    for side, run in enumerate(runs):
        run.call("torch.Tensor.backward", [np.float32([1.0 + side])], level="api", phase="backward")
    assert roles(located(*runs)) == ["carried"]


def test_suspects_of_ranks_are_ordered_by_execution() -> None:
    runs = [both() for _ in range(2)]
    found: list[Suspect] = []
    for rank, (first, second) in enumerate(runs):
        products(first, normal(16, 16), 6)
        products(second, normal(16, 16), 6, wrong={4 - 3 * rank: 0.1})
        part = located(first, second)
        for suspect in part.suspects:
            suspect.judged.call.candidate.rank = rank
            if rank == 0:
                suspect.judged.call.candidate.phase = "collective"
        found += part.suspects
    assert [(s.rank, s.place) for s in rank_culprits(found)] == [(1, 1)]
