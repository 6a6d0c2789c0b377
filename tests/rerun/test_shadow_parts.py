"""Sampling, time limits, the table and the words of a shadow run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trueup.foundation.model import TrueupError
from trueup.recording.execution import shadow
from trueup.recording.execution.shadow import LEAST_SHARE, SHARE, TIME, Budget, shadow_lines, summarise
from trueup.recording.recorder.options import ShadowOptions


def chosen(budget: Budget, calls: int = 2000) -> list[int]:
    return [n for n in range(calls) if budget.why_not(0, "forward", "a", "aten::mm", n, "float32") is None]


def test_sample_is_deterministic_and_of_the_size_asked_for() -> None:
    options = ShadowOptions.of(sample=0.1, seed=3)
    first = chosen(Budget(options))
    assert first == chosen(Budget(options))
    assert 150 < len(first) < 250
    assert first[0] == 0  # the first of its kind, always
    assert first != chosen(Budget(ShadowOptions.of(sample=0.1, seed=4)))


def test_every_kind_is_met_whatever_the_share() -> None:
    budget = Budget(ShadowOptions.of(sample=0.001))
    kinds = [("forward", "aten::mm"), ("backward", "aten::mm"), ("forward", "aten::gelu")]
    assert [budget.why_not(0, phase, "", op, 5, "float32") for phase, op in kinds] == [None] * 3
    assert budget.why_not(0, "forward", "", "aten::mm", 6, "float32") == SHARE


def test_time_limit_stops_a_step_and_lowers_the_share_of_the_next() -> None:
    budget = Budget(ShadowOptions.of(time="10ms"))
    budget.spent = 0.1
    assert budget.why_not(0, "forward", "", "aten::mm", 0, "float32") == TIME
    budget.end_step()
    assert budget.share == pytest.approx(0.1)
    for _ in range(50):
        budget.spent = 1.0
        budget.end_step()
    assert budget.share == LEAST_SHARE
    for _ in range(50):
        budget.end_step()
    assert budget.share == 1.0


@pytest.mark.parametrize(
    ("text", "milliseconds", "ratio"), [("200ms", 200, None), ("2s", 2000, None), ("0.5x", None, 0.5), (7, 7, None)]
)
def test_limits(text: Any, milliseconds: float | None, ratio: float | None) -> None:
    options = ShadowOptions.of(time=text)
    assert (options.milliseconds, options.ratio) == (milliseconds, ratio)


@pytest.mark.parametrize(
    ("target", "device", "dtype"),
    [
        ("cpu:float64", "cpu", "float64"), ("cuda:1:float32", "cuda:1", "float32"), ("cpu", "cpu", "float64"),
        ("cuda:0", "cuda:0", "float64"),
    ],
)
def test_targets(target: str, device: str, dtype: str) -> None:
    options = ShadowOptions.of(target)
    assert (options.reference, options.dtype) == (device, dtype)


def row(**other: Any) -> dict[str, Any]:
    return {
        "step": 0, "rank": 0, "seq": 1, "phase": "backward", "scope": "neck.lstm", "op": "aten::cell_backward", "ordinal": 0,
        "api": "torch.lstm", "slot": "output.0", "dtype": "float32", "shape": "[4, 8]", "state": "wrong", "error": 0.21,
        "explained": 6e-8, "excess": 3.5e6, "rule": "fused", "reason": "off", "source": "/home/me/net/centernet.py:57 in forward",
        "milliseconds": 1.0, "calls": 1,
    } | other  # fmt: skip


def test_words_of_a_wrong_call() -> None:
    rows = [
        row(), row(seq=5, ordinal=1), row(seq=9, op="aten::mm", scope="head"),
        row(seq=2, op="aten::exp", state="accurate", excess=0.1, error=1e-8),
        {"step": 0, "rank": 0, "seq": 99, "phase": "forward", "op": "aten::rand", "state": "not judged", "reason": "random",
         "calls": 3},
    ]  # fmt: skip
    assert shadow_lines(summarise(shadow.table(rows), "cpu float64")) == [
        "WRONG  first: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::cell_backward)",
        "       given its own inputs it is off by 2.1e-1 (rel. L2) in output.0, float32 [4, 8]: 3.5e6 x what rounding explains",
        "       your code: net/centernet.py:57 in forward",
        "       1 further call of the same operator is wrong by itself",
        "       so are calls of other operators, independently: aten::mm in backward (1)",
        "       judged 4 calls of 1 step against cpu float64",
        "       not judged 3 calls: random (3)",
    ]


def test_an_earlier_suspect_of_a_broken_operator_is_the_first_culprit() -> None:
    result = summarise(shadow.table([row(seq=3, state="suspicious", excess=2.0), row(seq=7)]), "cpu float64")
    assert [b.seq for b in result.culprits] == [3, 7]
    assert result.suspects == []


def test_nothing_judged_is_not_soundness() -> None:
    result = summarise(shadow.SCHEMA.empty_table(), "cpu float64")
    assert (result.verdict, result.exit_code) == ("could not tell", 2)
    assert shadow_lines(result) == ["COULD NOT TELL  no call was judged"]


def test_errors_that_are_no_numbers_are_words() -> None:
    rows = [row(dtype="int64", error=0.1, excess=math.inf, reason="3 of 30 elements differ")]
    result = summarise(shadow.table(rows), "cpu float64")
    assert shadow_lines(result)[1].strip() == "given its own inputs, output.0 (int64 [4, 8]): 3 of 30 elements differ"


def test_table_survives_damage(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    shadow.write(folder, 0, [row()])
    shadow.write(folder, 1, [row(seq=2)])
    whole, problems = shadow.read(tmp_path, [0])
    assert (whole.num_rows, problems) == (2, [])
    damaged = bytearray((folder / "shadow-0001.parquet").read_bytes())
    damaged[40:80] = b"\0" * 40
    (folder / "shadow-0001.parquet").write_bytes(bytes(damaged))
    rest, problems = shadow.read(tmp_path, [0])
    assert rest["seq"].to_pylist() == [1]
    assert len(problems) == 1
    assert "shadow-0001.parquet is truncated or damaged" in problems[0]


def test_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"step": ["not a number"]}), folder / "shadow-0000.parquet")
    assert shadow.read(tmp_path, [0])[0].num_rows == 0
    (folder / "shadow-0001.parquet").symlink_to("/etc/hostname")
    assert "regular file" in " ".join(shadow.read(tmp_path, [0])[1])


def test_ordinary_capture_is_no_shadow_run(tmp_path: Path) -> None:
    import torch

    import trueup
    from trueup.recording.execution.shadow import open_result

    with trueup.capture(tmp_path / "run"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(TrueupError, match="no capture of a shadow run"):
        open_result(tmp_path / "run")
