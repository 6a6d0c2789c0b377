"""``trueup show`` on a capture of 10^5 and more rows: what is read is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trueup.analysis.selecting import COLUMNS
from trueup.foundation.model import LANES, PACKED
from trueup.foundation.store import Writer, claim, parts, statistics

from .written import RANK, ROOT

Trueup = Callable[..., Any]
STEPS, CALLS = 40, 1500
ROWS = STEPS * CALLS * 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 120,000 rows: 1,500 calls a step; one call of step 37 has NaN."""
    directory = tmp_path_factory.mktemp("captures") / "large"
    out = Writer(directory, claim(directory, 0, None), ROOT, RANK)
    rows = 2 * CALLS
    packed = np.zeros((rows, PACKED))
    packed[:, :4] = [-1.0, 1.0, 0.25, 8.0]
    content = {
        "seq": np.arange(rows) // 2, "phase": ["forward"] * rows, "level": ["api"] * rows,
        "scope": [f"layers.{k // 2 % 48}.attn" for k in range(rows)], "op": ["torch.matmul"] * rows,
        "ordinal": [k // 96 for k in range(rows)], "slot": ["input.0", "output.0"] * CALLS, "dtype": ["float32"] * rows,
        "device": ["cpu"] * rows, "shape": [[8, 8]] * rows, "numel": [64] * rows,
    }  # fmt: skip
    for step in range(STEPS):
        packed[777, 4] = 5.0 if step == 37 else 0.0
        out.write_records(step, content | statistics(packed, np.arange(rows), rows))
    out.close("complete")
    return directory


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, set[str]]]:
    """What was read: step, rows, columns, for each part."""
    seen: list[tuple[int, int, set[str]]] = []
    real = parts.read

    def counting(several: Sequence[parts.Part], columns: Any, where: Any, *kept: Any) -> Any:
        seen.extend((part.step, part.rows, {*(part.names if columns is None else columns), *where}) for part in several)
        return real(several, columns, where, *kept)

    monkeypatch.setattr(parts, "read", counting)
    return seen


def wide(read: list[tuple[int, int, set[str]]]) -> list[int]:
    """Steps of which more was read than what chooses calls."""
    return [step for step, _, names in read if len(names) > 12]


@pytest.mark.parametrize(
    ("options", "steps", "calls"),
    [
        (["--limit", "3"], {0}, 3),
        (["--limit", "3", "--step", "17"], {17}, 3),
        (["--nan"], {37}, 1),
        (["--where", "n_nan > 0 and l2 < 9", "--scope", "layers.*"], {37}, 1),
        (["--limit", "1600"], {0, 1}, 1600),
    ],
)
def test_only_what_is_shown_is_read_in_full(
    trueup: Trueup, large: Path, read: list[tuple[int, int, set[str]]], options: list[str], steps: set[int], calls: int
) -> None:
    ran = trueup("show", large, *options)
    assert ran.code == 0
    assert sum(line[:6].strip().isdecimal() for line in ran.out.splitlines()) == calls
    assert "40 steps, 60,000 calls" in " ".join(ran.out.split())
    assert set(wide(read)) == steps
    assert not any("sketch" in names for _, _, names in read)
    assert {step for step, _, names in read if "value" in names} == steps
    cells = sum(rows * len(names) for _, rows, names in read)
    assert cells < ROWS * 18 + len(steps) * 2 * CALLS * (len(COLUMNS) + LANES)


def test_a_tensor_reads_one_step_in_full(trueup: Trueup, large: Path, read: list[tuple[int, int, set[str]]]) -> None:
    ran = trueup("show", large, "--tensor", "388", "input.0", "--step", "37")
    assert ran.code == 0
    assert {step for step, _, _ in read} == {37}
    assert len(wide(read)) == 1


def test_the_tree_of_all_steps(trueup: Trueup, large: Path, read: list[tuple[int, int, set[str]]]) -> None:
    lines = trueup("show", large, "--tree").out.splitlines()
    assert sum("attn  1," in line for line in lines) == 48
    assert sum("with NaN or inf" in line for line in lines) == 1
    assert wide(read) == []


def test_memory_is_bounded_by_some_steps(trueup: Trueup, large: Path) -> None:
    import pyarrow as pa

    trueup("show", large, "--limit", "3")
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    peaks = []
    from trueup.analysis import selecting

    real = selecting._mask

    def watching(rows: Any, chosen: Any) -> Any:
        peaks.append(pool.bytes_allocated() - before)
        return real(rows, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selecting, "_mask", watching)
        trueup("show", large, "--limit", "3", "--where", "l2 > 0")
    assert len(peaks) > 5
    assert max(peaks) < 16 * 2 * CALLS * 200  # bytes: a row takes some 100 in the columns that choose
