"""What is missing or damaged is said, and never passes: payload files, records, steps and calls of one side.

msprobe 26.2.0 writes `pass` beside a missing or corrupt tensor file and drops the row of an operator that the target lacks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import trueup
from verdict.cases import broken, named, noisy, record, told, trained

SEGMENTS = "rank-00000/tensors-*.safetensors"
ROUNDING = 3e-8
"""Noise on a softmax that no criterion objects to, so that both sides differ in bits from there on."""


def within_rounding(_: Any) -> Any:
    return broken("aten::_softmax", noisy(ROUNDING), 0)


def at_fault(_: Any) -> Any:
    return broken("aten::_softmax", noisy(1e-2), 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return captures of detail ``tensor``: a baseline, its twin, one within rounding of it and one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    alterations: dict[str, Callable[[Any], Any] | None] = {
        "baseline": None, "twin": None, "rounded": within_rounding, "faulty": at_fault,
    }  # fmt: skip
    return {
        name: trained(folder / name, "gpt2-eager", alter, detail="tensor", level=["module", "api"])
        for name, alter in alterations.items()
    }


def without(segment: Path) -> None:
    segment.unlink()


def cut(segment: Path) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(whole[: len(whole) // 2])


def without_header(segment: Path) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(b"\xff" * 64 + whole[64:])


def flipped(segment: Path) -> None:
    """Turn over one bit in each 4 KB of the tensors' bytes."""
    whole = bytearray(segment.read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin + 100, len(whole), 4096):
        whole[place] ^= 0x40
    segment.write_bytes(whole)


def damaged(capture: Path, into: Path, how: Callable[[Path], None]) -> Path:
    shutil.copytree(capture, into)
    for segment in sorted(into.glob(SEGMENTS)):  # on a slow machine a capture is flushed in several
        how(segment)
    return into


DAMAGES = (without, cut, without_header, flipped)


# ---------------------------------------------------------------- payload files
def test_the_runs_themselves(runs: dict[str, Path]) -> None:
    rounded = trueup.compare(runs["baseline"], runs["rounded"])
    assert rounded.verdict == "aligned", rounded.sentence
    assert rounded.counts["equal"] < rounded.counts["compared"]
    assert trueup.compare(runs["baseline"], runs["twin"]).verdict == "aligned"
    assert "softmax" in named(trueup.compare(runs["baseline"], runs["faulty"])).op


@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_payload_is_not_aligned(runs: dict[str, Path], how: Callable[[Path], None], side: str, tmp_path: Path) -> None:
    sides = {"baseline": runs["baseline"], "candidate": runs["rounded"]}
    sides[side] = damaged(sides[side], tmp_path / side, how)
    result = trueup.compare(sides["baseline"], sides["candidate"])
    assert result.verdict == "inconclusive", result.sentence
    assert "/tensors-0" in told(result)


@pytest.mark.parametrize("how", [without, cut, without_header])
def test_damaged_payload_of_equal_runs_is_said(runs: dict[str, Path], how: Callable[[Path], None], tmp_path: Path) -> None:
    """The digests that were taken in the run say that nothing differs; that the file is gone has to be said even so."""
    candidate = damaged(runs["twin"], tmp_path / "candidate", how)
    result = trueup.compare(runs["baseline"], candidate)
    assert result.culprit is None
    assert result.verdict == "inconclusive" or "/tensors-0" in told(result), result.sentence


@pytest.mark.parametrize("how", DAMAGES)
def test_a_fault_is_found_from_statistics_where_payload_is_damaged(
    runs: dict[str, Path], how: Callable[[Path], None], tmp_path: Path
) -> None:
    candidate = damaged(runs["faulty"], tmp_path / "candidate", how)
    result = trueup.compare(runs["baseline"], candidate)
    assert "softmax" in named(result).op
    assert "/tensors-0" in told(result)


# ---------------------------------------------------------------- records and steps
def test_a_lost_part_of_the_records(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["twin"], tmp_path / "candidate")
    parts = sorted((tmp_path / "candidate").rglob("records-*.parquet"))
    parts[-1].write_bytes(parts[-1].read_bytes()[:-20])
    try:
        result = trueup.compare(runs["baseline"], tmp_path / "candidate")
    except trueup.TrueupError as error:
        assert parts[-1].name in str(error)  # noqa: PT017 - it may be the only part
    else:
        assert result.verdict == "inconclusive", result.sentence
        assert parts[-1].name in told(result)


def test_records_that_end_within_a_call_are_no_backward_that_ends_there(runs: dict[str, Path], tmp_path: Path) -> None:
    """Of a call in the backward the part before has what it is given, and what it makes was in the part that is lost."""
    folder = shutil.copytree(runs["twin"], tmp_path / "candidate") / "rank-00000" / "step-000000"
    parts = sorted(folder.glob("records-*.parquet"))
    table = pa.concat_tables(map(pq.read_table, parts), promote_options="permissive")
    rows = table.select(["phase", "level", "scope", "slot"]).to_pylist()
    wanted = {"phase": "backward", "level": "module", "scope": "transformer.h.0.mlp.act", "slot": "grad_input.0"}
    for part in parts:
        part.unlink()
    pq.write_table(table.slice(0, rows.index(wanted)), folder / "records-0000.parquet")
    (folder / "records-0001.parquet").write_bytes(b"PAR1")
    result = trueup.compare(runs["baseline"], tmp_path / "candidate")
    assert (result.verdict, "records-0001.parquet" in told(result)) == ("inconclusive", True), result.sentence


@pytest.mark.parametrize("longer", ["baseline", "candidate"])
def test_steps_of_one_side(longer: str, tmp_path: Path) -> None:
    sides = [
        trained(tmp_path / side, "gpt2", steps=3 if side == longer else 2, level="api") for side in ("baseline", "candidate")
    ]
    result = trueup.compare(*sides)
    assert (result.verdict, result.culprit) == ("inconclusive", None)
    assert result.notes[0].startswith(f"steps 2 are only in {tmp_path / longer}")


# ---------------------------------------------------------------- calls of one side
class Feed(nn.Module):
    """The feed-forward half of a transformer block; ``left_out`` names the part that somebody forgot."""

    def __init__(self, left_out: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)
        self.left_out = left_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.left_out == "norm" else self.norm(x)
        y = self.up(y)
        y = y if self.left_out == "gelu" else nn.functional.gelu(y)
        y = self.down(y)
        return y if self.left_out == "add" else x + y


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return what records a step of four such halves, the third of which lacks something, at some detail; each once."""
    folder = tmp_path_factory.mktemp("fed")

    @cache
    def recorded(left_out: str, detail: str) -> Path:
        torch.manual_seed(5)
        model = nn.Sequential(*(Feed(left_out if k == 2 else "") for k in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        x = torch.randn(6, 10, 48)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return record(folder / f"{left_out}-{detail}", step, model, detail=detail, level=["module", "api"])

    return recorded


@pytest.mark.parametrize("detail", ["stats", "tensor"])
@pytest.mark.parametrize("left_out", ["norm", "gelu", "add"])
@pytest.mark.parametrize("lacking", ["baseline", "candidate"])
def test_a_call_that_one_side_lacks(lacking: str, left_out: str, detail: str, fed: Callable[[str, str], Path]) -> None:
    sides = [fed(left_out if side == lacking else "", detail) for side in ("baseline", "candidate")]
    first = named(trueup.compare(*sides))
    assert first.scope in ("2", f"2.{left_out}"), first.sentence
    assert (first.phase, first.step) == ("forward", 0)
    assert first.kind in ("unmatched", "region") or first.op == "Feed", first.sentence


def test_the_report_names_what_was_lost(runs: dict[str, Path], tmp_path: Path) -> None:
    candidate = damaged(runs["rounded"], tmp_path / "candidate", without)
    trueup.compare(runs["baseline"], candidate).save(tmp_path / "report")
    verdict = json.loads((tmp_path / "report/verdict.json").read_text())
    assert verdict["verdict"] == "inconclusive"
    assert any("tensors-0000.safetensors" in note for note in verdict["notes"])
