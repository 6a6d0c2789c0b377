"""Runs of different layouts: healthy ones are aligned, and of planted faults the cause is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nursery import Nursery
from trueup.analysis.audit import check
from trueup.comparison.layout.joined import _as_one
from trueup.comparison.result.comparing import compare
from trueup.doors.cli.app import run as run_command_line
from trueup.foundation.settings import differing

from .layouts import LAYOUTS, train
from .running import joined

OTHERS = [layout for layout in LAYOUTS if layout != "tp"]  # of that docs/layouts.md has the command
PAIRS = [*(("one", layout) for layout in OTHERS), ("tp", "one"), ("fsdp", "tp"), ("ddp", "fsdp"), ("hand", "ddp")]


@pytest.fixture(scope="session")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import parallel_layouts

    out = tmp_path_factory.mktemp("layouts")
    for code, error in joined(nursery, out, "distributed.layouts.work", {}, out=str(out)):
        assert code == 0, error[-4000:]
    with torch.random.fork_rng():
        train(out / "one")
        train(out / "one-stats", detail="stats")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parallel_layouts, "LAYERS", 2)
            parallel_layouts.train(out / "two-layers", parallel_layouts.LAYOUTS["one"])
            parallel_layouts.train(out / "packed", parallel_layouts.LAYOUTS["packed"])
    return out


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_healthy(runs: Path, first: str, second: str) -> None:
    result = compare(runs / first, runs / second)
    assert (result.verdict, list(result.culprits)) == ("aligned", []), result.sentence
    assert "the ranks of each run were put together before they were compared" in result.sentence


@pytest.mark.parametrize(
    ("first", "second"),
    [("two-layers", "pp-local"), ("pp-local", "cp"), ("zero1", "two-layers"), ("zero3", "pp-local"),
     ("ddp-accumulated", "pp-local")],
)  # fmt: skip
def test_stages_sequences_and_owners_of_weights(runs: Path, first: str, second: str) -> None:
    """Pipelines of micro-batches, with global names and with names that begin anew; zigzag pieces; ZeRO 1; micro-batches
    whose losses are divided by their number; weights that are gathered before they are used; a tied weight, of which the stages
    hold copies, beside flat buffers that hold it once; of stages the losses of micro-batches alone, not that of a first pass."""
    result = compare(runs / first, runs / second)
    assert (result.verdict, list(result.culprits)) == ("aligned", []), result.sentence


def test_an_optimizer_has_the_weights_of_all_ranks() -> None:
    """Of experts and of owners of weights each rank steps its own; of flat buffers nobody knows whose weights they hold."""

    def manifest(*names: str) -> dict[str, Any]:
        held = {"parameters": [list(names)]} if names else {}
        optimizer = {"class": "AdamW", "groups": [{"lr": 0.1, "parameters": len(names) or 1}], **held}
        return {"framework": "torch", "settings": {"modules": {"": {"class": "M"}}, "optimizers": [optimizer]}}

    alone: Any = SimpleNamespace(stages=(), renames={})
    whole = manifest("a", "b", "c")
    assert differing(whole, _as_one([manifest("a", "b"), manifest("a", "c")], alone, {}, frozenset())) == []
    assert differing(whole, _as_one([manifest(), manifest()], alone, {}, frozenset())) == []
    (said,) = differing(whole, _as_one([manifest("a"), manifest("b")], alone, {}, frozenset()))
    assert (said.name, said.baseline, said.candidate) == ("parameters", "3, with c", "2")
    stage = {**whole, "settings": {**whole["settings"], "modules": {"": {"class": "Stage"}}}}
    assert [one.name for one in differing(whole, _as_one([stage], alone, {}, frozenset()))] == ["class"]
    assert differing(*(_as_one([one], alone, {}, frozenset({""})) for one in (whole, stage))) == []  # the model is no call


def test_heads_that_both_runs_cut(runs: Path) -> None:
    """Neither says along which dimension; they are views of features that are known to be cut."""
    assert compare(runs / "tp", runs / "hand").verdict == "aligned"


def test_what_is_declared(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/layouts.md has it."""
    page = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text("utf-8")
    shards = tmp_path / "shards.toml"
    shards.write_text(page.partition("```toml\n")[2].partition("```")[0])
    code = run_command_line(["compare", str(runs / "tp"), str(runs / "hand"), "--shards", str(shards), "--recompute", "0"])
    assert (code, "ALIGNED" in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    ("run", "code", "said"),
    [
        ("ddp", 0, "nothing that must be the same on 2 ranks differs"),
        ("fsdp", 0, "nothing that must be the same on 2 ranks differs"),
        ("zero1", 0, "nothing that must be the same on 2 ranks differs"),
        ("drift", 1, "param.weight of layers.0.gated.down must be the same on all ranks, and ranks 0, 1 differ"),
        ("silent", 1, "they were not reduced"),
        ("tied", 1, "the gradient of words.weight differs on ranks 0, 1 when the optimizer runs"),
        ("masks", 1, "ranks 0, 1 drew the same mask in layers.0.gated"),
    ],
)
def test_without_a_baseline(runs: Path, run: str, code: int, said: str) -> None:
    result = check(runs / run, replicas=True)
    assert result.ranks is not None
    assert any(said in one for one in (result.ranks.sentence, *(odd.said for odd in result.ranks.found))), result.ranks
    assert (result.ranks.verdict == "deviates") == bool(code)


def test_of_statistics_alone_it_is_said(runs: Path) -> None:
    result = compare(runs / "one-stats", runs / "tp-stats")
    assert (result.verdict, list(result.culprits)) == ("aligned", [])
    assert "117 of 217 calls were compared by statistics alone" in result.sentence
    assert "capture with --detail tensor to compare their elements" in result.sentence


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("forward", "output.0 of layers.0.gated.down is not the same on ranks 0, 1, and is neither a piece of the whole"),
        ("backward", "grad_input.0 of layers.0.gated differs on 2 ranks, and the sum is not the whole gradient"),
        ("swapped", "param.weight of layers.0.gated.up is cut as in the baseline, and its pieces are swapped"),
        ("loss", "off by exactly 2.000 = 2, the number of ranks"),
        ("twice", "off by exactly 0.500 = 1/2, the number of ranks: divided once too often"),
        ("tied", "the gradient of words.weight differs on ranks 0, 1 when the optimizer runs"),
        ("drift", "param.weight of layers.0.gated.down must be the same on all ranks, and ranks 0, 1 differ (rel. L2 1e-2)"),
        ("silent", "they were not reduced"),
        ("masks", "ranks 0, 1 drew the same mask in layers.0.gated"),
    ],
)
def test_faults(runs: Path, fault: str, cause: str) -> None:
    result = compare(runs / "one", runs / fault)
    assert result.verdict == "deviates"
    assert cause in result.culprits[0].cause, result.sentence


def test_gradients_that_adam_makes_the_same_of(runs: Path) -> None:
    """Twice the gradients in a flat buffer: nothing that AdamW makes of them tells."""
    result = compare(runs / "two-layers", runs / "zero2-summed")
    (culprit,) = result.culprits
    assert (result.verdict, culprit.phase) == ("deviates", "optimizer")
    assert culprit.cause.startswith("the gradients of 29 tensors (words.weight, places.weight, layers.0.before.weight…) that the")
    assert "that the optimizer is given are off by exactly 2.000 = 2, the number of ranks: added up or multiplied" in culprit.cause


def test_micro_batches_that_are_lost_before_a_flat_buffer(runs: Path) -> None:
    """No call of the optimizer shows whose gradient it is given; the flat buffer, cut by weights, does."""
    result = compare(runs / "two-layers", runs / "zero2-last-only")
    assert result.verdict == "deviates"
    assert "are those of micro-batch 2 of 2 alone: those of the others are lost" in result.culprits[0].cause, result.sentence


@pytest.mark.parametrize(
    ("baseline", "fault", "cause"),
    [
        ("two-layers", "own-places", "output.0 of torch.arange counts from 0 on ranks 0, 1 alike, and each holds another piece"),
        ("two-layers", "tied-not-reduced", "the gradient of words.weight differs on ranks 0, 1 when the optimizer runs"),
        ("packed", "bias-each-rank", "the bias of layers.1.gated.down is added on each of 2 ranks before their sum is taken"),
        ("packed", "summed-again", "layers.1.gated.down adds up over its ranks 2 times in a step, and 3 other modules"),
        ("two-layers", "summed-narrowly", "terms of sums over 2 ranks travel in bfloat16 in the candidate alone, which makes"),
        ("packed", "column-not-reduced", "a reduction is missing in the backward of layers.1.gated.both"),
    ],
)
def test_public_bugs(runs: Path, baseline: str, fault: str, cause: str) -> None:
    """As `benchmarks/layout_faults.py` rebuilds them."""
    result = compare(runs / baseline, runs / fault)
    assert result.verdict == "deviates"
    assert cause in result.culprits[0].cause, result.sentence


def test_the_command_of_the_page(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from end_to_end.executing import lines_of, wrong
    from test_documentation import ROOT

    monkeypatch.chdir(runs.parent)
    compared, alone = (line.replace("runs/", f"{runs.name}/") for line in lines_of(ROOT / "docs/layouts.md"))
    assert wrong(compared, capsys, (0,)) == ""
    assert wrong(alone, capsys, (1,)) == ""
