"""A capture from a stranger: names that lead out, manifests that are none, sizes that lie."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.foundation.store.segment import open_segment

from .captures import small, writer

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("hostile") / "run", steps=1, parts=1)


@pytest.mark.parametrize(
    "name",
    [
        "../rank-00001/tensors-0000.safetensors", "/etc/passwd", "..", "", "tensors-0000.safetensors/../x",
        "tensors-0000.safetensors\0", "tensors-0000.safetensors\n", "manifest.json", "tensors-٠٠٠٠.safetensors",
    ],
)  # fmt: skip
def test_segment_names_do_not_lead_out(run: Path, name: str) -> None:
    with pytest.raises(TrueupError, match=r"is no payload segment: expected tensors-NNNN\.safetensors"):
        open_capture(run).payload(0, name, "x")


def test_hostile_segment_name_in_records(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, {"seq": [0], "payload_segment": ["../../secret"], "payload_key": ["x"]})
    out.close()
    assert "'../../secret' is no payload segment" in open_capture(tmp_path / "run").problems[0]


def test_links_are_not_followed(tmp_path: Path) -> None:
    run, outside = small(tmp_path / "run"), small(tmp_path / "outside")
    segment = run / "rank-00000/tensors-0000.safetensors"
    segment.unlink()
    segment.symlink_to(outside / "rank-00000/tensors-0000.safetensors")
    (run / "rank-00001").symlink_to(outside / "rank-00000")
    (run / "rank-00000/step-000009").symlink_to(outside / "rank-00000/step-000000")
    (run / "rank-00000/step-000000/records-0002.parquet").symlink_to(
        outside / "rank-00000/step-000000/records-0000.parquet"
    )
    capture = open_capture(run)
    assert list(capture.ranks) == [0]
    assert capture.steps == [0, 1, 2]
    assert capture.rows == 72
    assert sum("is a link or not what its name says" in problem for problem in capture.problems) == 3
    with pytest.raises(TrueupError, match="is not a regular file: captures hold no links, pipes or devices"):
        capture.payload(0, "tensors-0000.safetensors", "x")
    with pytest.raises(TrueupError, match="leads out of the capture"):
        capture.payload(1, "tensors-0000.safetensors", "x")


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    run = small(tmp_path / "run")
    (run / "manifest.json").unlink()
    os.mkfifo(run / "manifest.json")
    with pytest.raises(TrueupError, match="is not a regular file"):
        open_capture(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged: expected JSON, got Expecting value"),
        ("[1]", "is damaged: expected a JSON object, got list; record again"),
        ("[" * 100_000, "is damaged: expected JSON, got maximum recursion depth"),
        ("{}", r"is no manifest of a capture: expected a format_version of at least 1, got None; give the directory"),
        ('{"format_version": true}', "expected a format_version of at least 1, got True"),
        ('{"format_version": "1"}', "expected a format_version of at least 1, got '1'"),
        (
            '{"format_version": 3}',
            r"was recorded in a newer format: expected format_version up to 2, got 3; upgrade trueup to read it$",
        ),
        (
            '{"format_version": 1, "x": "' + "y" * 2**24 + '"}',
            "is not read: expected at most 16777216 bytes",
        ),
    ],
)
def test_root_manifests(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(TrueupError, match=message):
        open_capture(tmp_path)


def test_no_capture_at_all(tmp_path: Path) -> None:
    with pytest.raises(TrueupError, match="is not a capture: expected a directory, got nothing; check the path"):
        open_capture(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(TrueupError, match="is not a capture: expected a directory, got a file; check the path"):
        open_capture(tmp_path / "file")
    with pytest.raises(TrueupError, match=r"is not a capture: expected manifest\.json in it, got none"):
        open_capture(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["format_version", "status", "written", "notes", "rank", "run"])


@QUIET
@given(
    root=st.dictionaries(FIELDS, JSON),
    rank=st.dictionaries(FIELDS, JSON) | JSON,
    raw=st.none() | st.binary(max_size=50),
)
def test_any_manifest_is_read_or_refused(tmp_path: Path, root: dict, rank: object, raw: bytes | None) -> None:
    (tmp_path / "rank-00000").mkdir(exist_ok=True)
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 1, **root}))
    (tmp_path / "rank-00000" / "manifest.json").write_bytes(json.dumps(rank).encode() if raw is None else raw)
    try:
        assert isinstance(open_capture(tmp_path).problems, list)
    except TrueupError as error:
        assert str(tmp_path) in str(error)  # noqa: PT017  (either outcome is right)


OFFSETS = JSON | st.lists(st.integers(-1, 2**70), min_size=2, max_size=2)
DTYPES = st.sampled_from(["F32", "U8", "X"]) | JSON
SHAPES = JSON | st.lists(st.integers(-1, 5))
HEADER = st.fixed_dictionaries(
    {"t": st.fixed_dictionaries({"dtype": DTYPES, "shape": SHAPES, "data_offsets": OFFSETS}) | JSON},
    optional={"__metadata__": st.dictionaries(st.just("t"), JSON | st.text(max_size=9)) | JSON},
)


@QUIET
@given(header=HEADER, length=st.none() | st.integers(0, 2**64 - 1), data=st.binary(max_size=40))
def test_any_segment_is_read_or_refused(tmp_path: Path, header: dict, length: int | None, data: bytes) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "tensors-0000.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    try:
        segment = open_segment(path)
        segment.check()
        assert isinstance(segment.tensor("t"), np.ndarray)
    except TrueupError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_random_bytes_over_a_part(run: Path) -> None:
    """Several bytes at once, footer included: a note or a table, never another exception."""
    path = run / "rank-00000/step-000000/records-0000.parquet"
    whole = path.read_bytes()
    chance = random.Random(3)
    try:
        for _ in range(150):
            damaged = bytearray(whole)
            footer = int.from_bytes(whole[-8:-4], "little") + 8
            for _ in range(chance.randrange(1, 6)):
                damaged[-chance.randrange(1, footer + 1)] = chance.randrange(256)
            path.write_bytes(damaged)
            capture = open_capture(run)
            capture.records()
            assert capture.rows == 12 or capture.problems
    finally:
        path.write_bytes(whole)


def test_a_part_that_claims_too_much(run: Path, tmp_path: Path) -> None:
    table = pa.table({"seq": pa.array(np.zeros(5_000_000, np.int64))})
    folder = tmp_path / "run/rank-00000/step-000000"
    folder.mkdir(parents=True)
    (tmp_path / "run/manifest.json").write_text('{"format_version": 1}')
    pq.write_table(table, folder / "records-0000.parquet", compression="zstd")
    capture = open_capture(tmp_path / "run")
    assert any("claims 5000000 rows" in problem for problem in capture.problems)
    assert capture.records().num_rows == 0


def test_known_column_of_a_wrong_type(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/rank-00000/step-000000"
    folder.mkdir(parents=True)
    (tmp_path / "run/manifest.json").write_text('{"format_version": 1}')
    pq.write_table(pa.table({"seq": ["one"], "step": [0], "rank": [0]}), folder / "records-0000.parquet")
    capture = open_capture(tmp_path / "run")
    assert capture.records(["seq"]).num_rows == 0
    assert any("records-0000.parquet is truncated or damaged" in problem for problem in capture.problems)


def test_a_number_that_would_fill_memory(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run/rank-00000/step-000000"
    folder.mkdir(parents=True)
    (tmp_path / "run/manifest.json").write_text('{"format_version": 1}')
    (folder / "records-999999999.parquet").write_bytes(b"")
    assert len(open_capture(tmp_path / "run").problems) < 20


@pytest.mark.parametrize("name", ["step", "rank", "seq"])
def test_rows_of_another_place_than_their_folder_make_a_part_lost(tmp_path: Path, name: str) -> None:
    """Else a comparison would filter them away without a word."""
    path = small(tmp_path / "run", steps=1, parts=1) / "rank-00000/step-000000/records-0000.parquet"
    table = pq.read_table(path, partitioning=None)
    place = table.column_names.index(name)
    for values in ([None] * table.num_rows, [7] * table.num_rows):
        pq.write_table(table.set_column(place, name, pa.array(values, table.schema.field(name).type)), path)
        capture = open_capture(path.parents[2])
        rows = capture.records().num_rows
        assert [rows == 0, bool(capture.lost)] == [name != "seq" or values[0] is None] * 2
