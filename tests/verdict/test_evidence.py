"""What is shown beside a verdict, against captures whose content is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trueup.comparison.result.evidence import NEAR, UPDATES, with_evidence
from trueup.foundation.facts import criteria
from trueup.foundation.model import Finding, Result
from trueup.foundation.store import open_capture

from .captures import Array, Recording, Slot, compared

RNG = np.random.default_rng(3)
DATA, WEIGHT = (RNG.normal(size=(64, 48)).astype(np.float32) for _ in range(2))


def chain(broken: bool = False, extra: bool = False, parts: str = "stats digest tensor", readers: int = 1) -> Recording:
    """Record data -> scale -> (extra) -> mul, which may be broken -> readers of its result -> a sum of each."""
    run = Recording(parts=parts)
    scaled = run_call(run, "aten::neg", [DATA], -DATA, "a")
    if extra:
        run.call("aten::extra", [], [Slot(DATA.copy(), "")], scope="a")
    product = scaled * WEIGHT
    if broken:
        product[5, 7] += 3.0
        product[9, 1] -= 2.0
    made = run_call(run, "aten::mul", [scaled, WEIGHT], product, "b")
    for k in range(readers):
        read = run_call(run, "aten::abs", [made], np.abs(product), f"c.{k}")
        run_call(run, "aten::sqrt", [read], np.sqrt(np.abs(product)), "d")
    return run


def updated(broken: bool = False) -> Recording:
    """Record data -> mul, which may be broken; one call of the model reads its result, and ten of the optimizer."""
    run = Recording()
    product = DATA * WEIGHT
    if broken:
        product[5, 7] += 3.0
    made = run_call(run, "aten::mul", [DATA, WEIGHT], product, "b")
    run_call(run, "aten::abs", [made], np.abs(product), "c")
    for _ in range(10):
        run_call(run, "aten::lerp_", [made], product * 2.0, "", phase="optimizer")
    return run


def test_readers_on_the_way_of_the_data_come_before_the_optimizers(tmp_path: Path) -> None:
    evidence = culprit(compared(tmp_path, updated(), updated(broken=True))).evidence
    assert evidence is not None
    assert sorted(node.op for node in evidence.nodes if node.hops == 1) == ["aten::abs", *["aten::lerp_"] * UPDATES]
    assert evidence.omitted == 10 - UPDATES


def run_call(run: Recording, op: str, inputs: list[Array], output: Array, scope: str, **options: object) -> Array:
    output = np.array(output)
    run.call(op, inputs, [output], scope=scope, **options)  # type: ignore[arg-type]
    return output


def culprit(result: Result) -> Finding:
    assert result.culprit is not None
    assert result.culprit.evidence is not None
    return result.culprit


def test_elements_and_the_calls_around(tmp_path: Path) -> None:
    found = culprit(compared(tmp_path, chain(), chain(broken=True)))
    evidence = found.evidence
    assert evidence is not None
    assert [(w.slot, w.index) for w in evidence.worst] == [("output.0", (5, 7)), ("output.0", (9, 1))]
    assert [w.candidate - w.baseline for w in evidence.worst] == pytest.approx([3.0, -2.0], abs=1e-6)
    (spread,) = evidence.histograms
    assert sum(spread.baseline) == sum(spread.candidate) == DATA.size
    nodes = {(node.hops, node.op): node for node in evidence.nodes}
    assert list(nodes) == [(-1, "aten::neg"), (0, "aten::mul"), (1, "aten::abs"), (2, "aten::sqrt")]
    assert nodes[0, "aten::mul"].role == "culprit"
    assert (nodes[-1, "aten::neg"].state, nodes[1, "aten::abs"].state) == ("equal", "deviates")
    named = [(evidence.nodes[e.source].op, evidence.nodes[e.target].op, e.slots, e.side) for e in evidence.edges]
    assert named == [
        ("aten::neg", "aten::mul", ("output.0", "input.0"), "both"),
        ("aten::mul", "aten::abs", ("output.0", "input.0"), "both"),
        ("aten::abs", "aten::sqrt", ("output.0", "input.0"), "both"),
    ]
    assert [e.error for e in evidence.edges] == [0.0, found.error_out, nodes[1, "aten::abs"].error_out]
    assert evidence.notes == ()


def test_where_only_statistics_exist_that_is_said(tmp_path: Path) -> None:
    evidence = culprit(compared(tmp_path, chain(parts="stats digest"), chain(broken=True))).evidence
    assert evidence is not None
    assert (evidence.histograms, evidence.worst) == ((), ())
    assert evidence.notes == (
        "only statistics were recorded in the baseline: without the elements there is no histogram and no list of the worst; "
        "capture both runs with --detail tensor",
    )
    assert len(evidence.nodes) == 4


def test_a_lost_tensor_is_said(tmp_path: Path) -> None:
    result = None
    baseline, candidate = chain().write(tmp_path / "b"), chain(broken=True).write(tmp_path / "c")
    for segment in (tmp_path / "c").rglob("*.safetensors"):
        segment.unlink()
    import trueup

    result = trueup.compare(baseline, candidate)
    (note,) = culprit(result).evidence.notes  # type: ignore[union-attr]
    assert note.startswith("output.0: the candidate's elements cannot be read (")


def test_an_input_that_differs_is_shown_before_what_it_causes(tmp_path: Path) -> None:
    sides = []
    for off in (0, 1):
        run = Recording(parts="stats digest tensor")
        data, weight = DATA.copy(), WEIGHT.copy()
        data[0, 0] += off
        weight[0, 0] = 1000
        run_call(run, "aten::mul", [data, weight], data * weight, "a")
        sides.append(run)
    found = culprit(compared(tmp_path, *sides))
    assert found.kind == "input"
    assert found.evidence is not None
    assert [spread.slot for spread in found.evidence.histograms] == ["input.0", "output.0"]


def test_of_many_readers_those_with_the_largest_errors_are_kept(tmp_path: Path) -> None:
    evidence = culprit(compared(tmp_path, chain(readers=20), chain(broken=True, readers=20))).evidence
    assert evidence is not None
    near = [node for node in evidence.nodes if node.hops == 1]
    assert len(near) == NEAR
    assert evidence.omitted == 20 - NEAR
    assert len([node for node in evidence.nodes if node.hops == 2]) == NEAR


def test_a_call_of_one_run_stands_in_its_picture_and_between_its_neighbours(tmp_path: Path) -> None:
    baseline, candidate = chain(), Recording(parts="stats digest tensor")
    # Another operator makes the input of the culprit on the candidate.
    moved = run_call(candidate, "aten::mul_by", [DATA], -DATA, "a")
    product = moved * WEIGHT
    product[5, 7] += 3
    made = run_call(candidate, "aten::mul", [moved, WEIGHT], product, "b")
    read = run_call(candidate, "aten::abs", [made], np.abs(product), "c.0")
    run_call(candidate, "aten::sqrt", [read], np.sqrt(np.abs(product)), "d")
    evidence = culprit(compared(tmp_path, baseline, candidate)).evidence
    assert evidence is not None
    before = {(node.op, node.side, node.seq) for node in evidence.nodes if node.hops == -1}
    assert before == {("aten::neg", "baseline", (0, -1)), ("aten::mul_by", "candidate", (-1, 0))}
    assert {e.side for e in evidence.edges if evidence.nodes[e.target].hops == 0} == {"baseline", "candidate"}


def test_neighbours_of_an_unmatched_call(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(), chain(extra=True))
    alone = Finding("unmatched", 0, 0, "forward", "aten", "a", "aten::extra", 0, None, "", side="candidate", seq=(-1, 1))
    captures = (open_capture(result.baseline.path), open_capture(result.candidate.path))
    (found,) = with_evidence(dataclasses.replace(result, unmatched=[alone]), captures).unmatched
    assert [(near.hops, near.op, near.seq, near.side) for near in found.neighbours] == [
        (-1, "aten::neg", (0, 0), "both"),
        (1, "aten::mul", (1, 2), "both"),
    ]


def test_a_reader_of_what_is_inside_a_function_reads_the_function(tmp_path: Path) -> None:
    """An api call's gradients are named by the operator inside; the optimizer that reads them is a consumer of the function."""
    sides = []
    for broken in (False, True):
        run = Recording()
        outer = run.call("torch.mul", {"input.0": DATA}, {}, level="api", scope="b")
        product = DATA * WEIGHT + np.float32(3 * broken)
        inner = run_call(run, "aten::mul", [DATA], product, "b", parent=outer)
        run.rows += [run.rows[0] | {"slot": "output.0", "tensor": product, "producer": (None, None)}]
        run.rows.sort(key=lambda row: row["seq"])
        run.call("torch.relu", {"input.0": inner}, {"output.0": np.abs(product)}, level="api", scope="c")
        sides.append(run)
    evidence = culprit(compared(tmp_path, *sides, level="api")).evidence
    assert evidence is not None
    assert [(node.hops, node.op) for node in evidence.nodes] == [(0, "torch.mul"), (1, "torch.relu")]


def test_what_an_earlier_step_made_is_named(tmp_path: Path) -> None:
    sides = []
    for broken in (False, True):
        run = Recording()
        weight = run_call(run, "aten::add_", [WEIGHT], WEIGHT + 1, "", phase="optimizer")
        product = DATA * weight
        product[0] += 5 * broken
        run_call(run, "aten::mul", [DATA, weight], product, "b", step=1)
        sides.append(run)
    evidence = culprit(compared(tmp_path, *sides)).evidence
    assert evidence is not None
    assert [(n.hops, n.op, n.step, n.phase) for n in evidence.nodes] == [
        (-1, "aten::add_", 0, "optimizer"), (0, "aten::mul", 1, "forward")
    ]  # fmt: skip


def test_the_rows_that_judged_are_listed_with_their_origin(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(), chain(broken=True))
    assert sum(rule.calls for rule in result.rules) == result.calls.num_rows
    assert sum(rule.deviates for rule in result.rules) == result.counts["deviates"]
    origins = {row.name: row.origin for row in criteria.load("default").rows}
    named = {rule.name.removesuffix(" in few elements"): rule for rule in result.rules}
    assert all(rule.origin.startswith(origins[name]) and rule.demand for name, rule in named.items())
    assert [rule.calls for rule in result.rules] == sorted((rule.calls for rule in result.rules), reverse=True)


def test_limits_of_older_tools_are_said(tmp_path: Path) -> None:
    (rule,) = compared(tmp_path, chain(), chain(broken=True), criterion="ptdbg").rules
    assert rule.demand.startswith("fails with cosine below 0.99 and max_absolute above 0.001; or fails with cosine below 0.9; or ")
    assert "ptdbg_ascend att 2.0" in rule.origin
    assert rule.calls == 4


def test_evidence_changes_no_verdict(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(), chain())
    assert (result.verdict, list(result.culprits)) == ("aligned", [])
    assert result.rules
