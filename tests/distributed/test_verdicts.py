"""What a comparison of distributed runs says: of a broken collective, of a rank that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

import trueup
from nursery import Nursery
from trueup.doors.cli import main

from .running import run, said, start


def test_a_healthy_run_is_aligned_with_itself(operators: Path) -> None:
    result = trueup.compare(operators / "faults" / "healthy", operators / "faults" / "again")
    assert result.verdict == "aligned", result.sentence


def test_a_broken_all_reduce_is_named(operators: Path) -> None:
    result = trueup.compare(operators / "faults" / "healthy", operators / "faults" / "broken")
    culprit = result.culprit
    assert culprit is not None, result.sentence
    assert (culprit.op, culprit.phase, culprit.level, culprit.rank) == ("c10d::allreduce_", "collective", "aten", 0)
    assert culprit.api == "torch.distributed.all_reduce"
    assert culprit.error_in == 0
    assert "in _mean" in str(culprit.source)


def test_a_rank_that_contributes_too_much_is_named_by_the_call_before(operators: Path) -> None:
    result = trueup.compare(operators / "faults" / "healthy", operators / "faults" / "scaled")
    culprit = result.culprit
    assert culprit is not None, result.sentence
    assert (culprit.op, culprit.kind, culprit.rank) == ("torch.Tensor.div_", "argument", 1)
    assert all(c.phase != "collective" for c in result.culprits), "what rank 0 receives is explained by rank 1"


@pytest.fixture(scope="module")
def senders(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on simulated devices of which one rank's is broken."""
    out = tmp_path_factory.mktemp("senders")
    run(nursery, out, "senders")
    return out / "senders"


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize(("fault", "phase", "op"), [("forward", "forward", "layer_norm"), ("backward", "backward", "layer_norm")])
def test_gradients_that_another_rank_got_wrong(senders: Path, fault: str, phase: str, op: str, level: str) -> None:
    """DDP averages what rank 1's broken device computes; rank 0's own gradients are right."""
    result = trueup.compare(senders / "ddp-healthy", senders / f"ddp-{fault}", level=level)
    culprit = result.culprit
    assert culprit is not None, result.sentence
    assert (culprit.rank, culprit.phase, culprit.step) == (1, phase, 0)
    assert op in culprit.op
    assert {c.rank for c in result.culprits} == {1}
    assert [(o.rank, o.phase, o.sender, o.cause) for o in result.occurrences] == [(0, "collective", 1, 1), (1, phase, None, 1)]
    assert "rank 0 got it from rank 1: first in c10d::allreduce_, collective, step 0" in result.sentence


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize(("fault", "rank", "op"), [("forward", 0, "layer_norm"), ("backward", 1, "gelu")])
def test_what_a_stage_of_a_pipeline_got_wrong(senders: Path, fault: str, rank: int, op: str, level: str) -> None:
    """Activations that are sent forth, gradients that are sent back."""
    result = trueup.compare(senders / "pipeline-healthy", senders / f"pipeline-{fault}", level=level)
    culprit = result.culprit
    assert culprit is not None, result.sentence
    assert (culprit.rank, culprit.phase, culprit.step) == (rank, fault, 0)
    assert op in culprit.op
    assert {c.rank for c in result.culprits} == {rank}
    by_rank = {o.rank: o for o in result.occurrences}
    assert (by_rank[1 - rank].sender, by_rank[rank].sender) == (rank, None)
    assert "recv" in by_rank[1 - rank].op
    got = by_rank[1 - rank]  # from there on that rank's calls are victims, whatever number they have
    later = [c for c in result.calls.to_pylist() if c["rank"] == got.rank and c["step"] == 0 and c["seq_candidate"] >= got.seq[1]]
    assert {c["role"] for c in later if c["error_out"] > 1e-3} == {"victim"}


def test_healthy_simulated_devices_are_aligned(senders: Path) -> None:
    for how in ("ddp", "pipeline"):
        result = trueup.compare(senders / f"{how}-healthy", senders / f"{how}-healthy")
        assert (result.verdict, list(result.occurrences)) == ("aligned", [])


@pytest.fixture(scope="module")
def starts(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that begin with other weights or buffers, which rank 0 hands out."""
    out = tmp_path_factory.mktemp("starts")
    run(nursery, out, "starts")
    return out / "starts"


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize(
    ("how", "name"),
    [("ddp", "other-seed"), ("ddp", "one-weight"), ("ddp", "one-buffer"), ("before", "one-buffer"), ("by-hand", "one-weight")],
)
def test_a_difference_that_starts_in_what_rank_0_hands_out(starts: Path, how: str, name: str, level: str) -> None:
    result = trueup.compare(starts / how / "plain", starts / how / name, level=level)
    culprit = result.culprit
    assert culprit is not None, result.sentence
    assert (culprit.kind, culprit.rank, culprit.step) == ("input", 0, 0)
    assert {c.rank for c in result.culprits} == {0}
    assert "rank 0 hands it out to the other ranks: the difference starts in the weights or buffers that rank 0 began with" in (
        result.sentence
    )
    assert [(o.rank, o.sender, o.cause) for o in result.occurrences] == [(0, None, 0), (1, 0, 0)]


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize("how", ["ddp", "before", "by-hand"])
def test_what_another_rank_replaces_is_no_reason(starts: Path, how: str, level: str) -> None:
    """Rank 1 begins with other weights, and gets those of rank 0 before it computes anything."""
    again = trueup.compare(starts / how / "plain", starts / how / "again", level=level)
    assert again.verdict == "aligned"
    result = trueup.compare(starts / how / "plain", starts / how / "rank-1", level=level)
    assert (result.verdict, result.culprits) == ("aligned", [])
    told = [note for note in result.notes if "what another rank hands out replaces it before anything reads it" in note]
    shown = [("ddp", "api"), ("ddp", "aten"), ("by-hand", "api")]  # else no call shows what rank 1 had
    assert len(told) == ((how, level) in shown)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_the_other_ranks_stay_readable(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    ends = start(nursery, tmp_path, "dies", HOW=how)
    assert [code for code, _ in ends] == [1, -9 if how == "kill" else 1]
    path = tmp_path / "dies" / "capture"
    capsys.readouterr()
    assert main(["show", str(path), "--rank", "0", "--phase", "optimizer"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    result = trueup.compare(path, path)
    assert result.counts["compared"] > 100
    told = " ".join([*result.notes, *result.candidate.notes])
    assert "rank 0: the capture ended with RuntimeError" in told
    if how == "kill":
        assert "rank 1 was interrupted or is still recording" in shown
        assert "rank 1 was interrupted or is still recording" in told
    else:
        assert "rank 1: the capture ended with ValueError: the last batch is broken" in shown
        assert "rank 1: the capture ended with ValueError: the last batch is broken" in told


def test_two_simulated_devices(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "npu")
    for rank in (0, 1):
        told = said(tmp_path, "npu", rank)
        assert told["api"] == told["aten"] == told["off"]
    for level in ("api", "aten"):
        capture = trueup.foundation.store.open_capture(tmp_path / "npu" / level)
        reduced = capture.records(["device", "l2"], phase="collective", op="c10d::allreduce_", slot=("input.0", "output.0"))
        assert set(reduced.column("device").to_pylist()) == {"npu:0"}
        assert reduced.column("l2").null_count == 0
