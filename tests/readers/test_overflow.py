"""`trueup overflow` of what other tools dumped: masks are healthy, and NaN and Inf are found though no column counts them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup

from . import writers
from .captures import imported

NAMES = ("Max", "Min", "Mean", "Norm")


@pytest.mark.parametrize("kind", ["statistics-mix", "statistics-L1", "tensor-mix", "md5-L1", "recompute-mix"])
def test_a_causal_mask_in_a_dump_is_expected(dumps: Path, kind: str, tmp_path: Path) -> None:
    result = trueup.overflow(imported(dumps / kind, tmp_path)[2])
    assert (result.verdict, result.anomalies) == ("clean", ()), result.sentence
    assert [op for op, _ in result.expected] == ["torch.Tensor.masked_fill"]


def leaves(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "Max" in value:
            yield value
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


@pytest.mark.parametrize("kind", ["statistics-mix", "statistics-L1", "md5-L1"])
@pytest.mark.parametrize(("top", "bottom", "word", "anomaly"), [
    (math.nan, math.nan, "NaN", "nan"), (math.inf, 0.0, "+Inf", "overflow"),
])  # fmt: skip
def test_nan_and_infinity_without_counts(
    dumps: Path, kind: str, top: float, bottom: float, word: str, anomaly: str, tmp_path: Path
) -> None:
    """Everything that a layer gives is bad, and all that follows it, as in a run that lost a number there."""
    shutil.copytree(dumps / kind, tmp_path / "dump")
    for path in sorted((tmp_path / "dump").rglob("dump.json"))[:1]:
        content = json.loads(path.read_text())
        begun = False
        for name, call in content["data"].items():
            for tensor in leaves(call if begun else {}):
                if str(tensor["dtype"]).startswith("torch.float"):
                    tensor.update(dict.fromkeys(NAMES, math.nan))
            if name.startswith("Functional.gelu.0.forward"):
                begun = True
                call["output"][0] |= dict(zip(NAMES, (top, bottom, top, top), strict=True))
        path.write_text(json.dumps(content))
    result = trueup.overflow(imported(tmp_path / "dump", tmp_path)[2])
    first = result.first
    assert first is not None
    assert (first.kind, first.place.op, first.place.phase) == (anomaly, "torch.nn.functional.gelu", "forward"), result.sentence
    assert f"it made {word} in output.0" in first.sentence
    assert [one.sentence for one in result.anomalies[1:] if one.place.step == first.place.step] == []


@pytest.mark.parametrize("kind", ["statistics", "all"])
@pytest.mark.parametrize("version", ["2.3", "6.0"])
def test_nan_in_a_dump_of_ptdbg(version: str, kind: str, tmp_path: Path) -> None:
    root = writers.ptdbg(tmp_path / "dump", version, kind)
    bad = [writers.ptdbg_name(version, writers.run()[1], "output.0"), writers.ptdbg_name(version, writers.run()[2], "input.0")]
    (table,) = root.rglob("dump.pkl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for row in rows:
        if row[0] in bad:
            row[5] = [math.nan] * len(row[5])
            for array in root.rglob(f"{row[0]}.npy"):
                np.save(array, np.full_like(np.load(array), np.nan))
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = trueup.overflow(imported(root, tmp_path)[2])
    first = result.first
    assert first is not None
    assert (first.kind, first.place.op, first.place.phase) == ("nan", "torch.nn.functional.relu", "forward"), result.sentence
    assert len(result.anomalies) == 1
