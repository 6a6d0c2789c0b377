"""A short run of the fuzzing, the same each time, and one capture for each crash that it has found."""

from __future__ import annotations

import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trueup
from fuzz.exercising import exercise, place
from fuzz.mutations import MUTATIONS, mutate
from trueup.foundation.store import schema
from verdict.captures import Recording, changed, normal

SEEDS = 24
PART = "rank-00000/step-000000/records-0000.parquet"


def recorded(error: float = 0.0) -> Recording:
    """Two steps of a chain of products with arguments, payload and stacks: no framework, no clock, the same bytes each time."""
    run = Recording(parts="stats digest tensor")
    w = normal(6, 6, seed=9)
    for step in range(2):
        x = changed(normal(6, 6, seed=step), error)
        for k in range(4):
            y = changed((x @ w / 3).astype("float32"), error, seed=k)
            outer = run.call("torch.matmul", [x, w], [y], level="api", step=step, scope=f"net.{k % 2}", source=f"a.py:{k} in f")
            run.call("aten::mm", [x, w], [y], step=step, scope=f"net.{k % 2}", parent=outer, arguments={"0": k})
            x = y
        run.call("torch.Tensor.backward", [x[:1, 0]], level="api", step=step)
    return run


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    recorded().write(folder / "baseline", levels=["api", "aten"])
    recorded(1e-7).write(folder / "candidate", levels=["api", "aten"])
    return folder


def test_damaged_captures_are_read_compared_or_refused(bases: Path, tmp_path: Path) -> None:
    found: dict[str, str] = {}
    for seed in range(SEEDS):
        try:
            exercise(seed, bases, tmp_path / "work")
        except Exception as error:  # noqa: BLE001 - every one is a finding
            found.setdefault(place(error), f"seed {seed}: {error}")
    assert found == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20, "peak memory of the whole test process, in KB"


def test_each_mutation_happens_and_is_the_same_each_time(bases: Path, tmp_path: Path) -> None:
    drawn = set()
    for seed in range(45):
        done = []
        for k in range(2 if seed < 10 else 1):
            copy = tmp_path / f"{k}-{seed}" / "run"
            shutil.copytree(bases / "baseline", copy)
            done.append([line.replace(str(copy.parent), "") for line in mutate(copy, random.Random(seed))])
        assert done[0] == done[-1]
        drawn |= {line.partition(":")[0] for line in done[0]}
    assert drawn == {mutation.__name__ for mutation in MUTATIONS}


# ---------------------------------------------------------------- one thing at a time
VALUES: tuple[Any, ...] = (7, "x", None, [1], [{"a": 1}], {"a": {"b": [1]}}, "\0" * 9, 10**40)
"""Each field, and each column below, is given half of the values, its neighbour the others; `make fuzz` draws them for all."""
RANK = (
    "framework", "devices", "world_size", "environment", "seeds", "versions", "status", "notes", "written", "rank", "pid",
    "environment.deterministic", "environment.float32_matmul_precision", "environment.versions", "environment.num_threads",
)  # fmt: skip
"""The fields of a real rank's manifest, and those of its environment."""
CAPTURE = ("run", "trueup_version", "levels", "detail", "config", "created", "command", "notes")


def uses(bases: Path, damaged: Path, turn: int) -> None:
    """Compare with a damaged capture, every other time as the baseline; only TrueupError may come out."""
    sides = (bases / "baseline", damaged)
    try:
        assert trueup.compare(*(sides if turn % 2 else sides[::-1])).verdict in ("aligned", "deviates", "inconclusive")
    except trueup.TrueupError as error:
        assert str(error)  # noqa: PT017 - it need not be raised


@pytest.mark.parametrize("field", RANK)
def test_anything_in_a_field_of_a_rank(field: str, bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "candidate", tmp_path / "damaged")
    path = tmp_path / "damaged/rank-00000/manifest.json"
    whole = path.read_text()
    inner, _, name = field.rpartition(".")
    for k, value in enumerate(VALUES[RANK.index(field) % 2 :: 2]):
        content = json.loads(whole)
        (content[inner] if inner else content)[name] = value
        path.write_text(json.dumps(content))
        uses(bases, tmp_path / "damaged", k)


@pytest.mark.parametrize("field", CAPTURE)
def test_anything_in_a_field_of_the_capture(field: str, bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "candidate", tmp_path / "damaged")
    path = tmp_path / "damaged/manifest.json"
    whole = json.loads(path.read_text())
    for k, value in enumerate(VALUES[CAPTURE.index(field) % 2 :: 2]):
        path.write_text(json.dumps(whole | {field: value}))
        uses(bases, tmp_path / "damaged", k)


def extremes(kind: pa.DataType) -> list[Any]:
    """Return values that a column's type can hold and nobody expects."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_fixed_size_binary(kind):
        return [np.full(kind.byte_width // 8, value).tobytes() for value in (0.0, 1e308, float("nan"), float("inf"))]
    if pa.types.is_list(kind):
        return [[], [0], [-1], [2**62] * 3, [1] * 100, [None]]
    if pa.types.is_integer(kind):
        high = 2 ** (kind.bit_width - 1)
        return [0, -1, high - 1, -high, min(high - 1, 2**53 + 1)]
    if pa.types.is_floating(kind):
        return [0.0, -1.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")]
    return ["", "../../x", "float999", "arguments", "output.0", "[" * 5000, "NaN", "\0", "1e999", "tensors-0000.safetensors"]


@pytest.mark.parametrize("name", schema.RECORDS.names)
def test_anything_in_a_column(name: str, bases: Path, tmp_path: Path) -> None:
    """In all rows, or in every third."""
    shutil.copytree(bases / "candidate", tmp_path / "damaged")
    path = tmp_path / "damaged" / PART
    table = pq.read_table(path, partitioning=None)
    kind, place = table.schema.field(name).type, table.column_names.index(name)
    for k, value in enumerate([None, *extremes(kind)][place % 2 :: 2]):
        values = [value if (row + k) % (1 if k % 3 else 3) == 0 else old for row, old in enumerate(table[name].to_pylist())]
        pq.write_table(table.set_column(place, name, pa.array(values, kind)), path)
        uses(bases, tmp_path / "damaged", k)


def test_a_column_that_is_not_there(bases: Path, tmp_path: Path) -> None:
    shutil.copytree(bases / "candidate", tmp_path / "damaged")
    path = tmp_path / "damaged" / PART
    table = pq.read_table(path, partitioning=None)
    for k, name in enumerate(schema.RECORDS.names):
        pq.write_table(table.drop_columns([name]), path)
        uses(bases, tmp_path / "damaged", k)
