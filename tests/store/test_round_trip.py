"""What is written comes back: records, payload, stacks, manifests, and columns that a newer writer added."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from trueup.foundation.kernels import digest, hexadecimal
from trueup.foundation.model import LANES, TrueupError
from trueup.foundation.store import RECORDS, open_capture, sketch_matrix
from trueup.foundation.store.segment import SAFETENSORS

from .captures import columns, files, small, writer


def test_records_come_back_sorted_and_typed(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    late, early = columns(first_seq=100, seed=1), columns(seed=0)
    out.write_records(0, late)
    out.write_records(0, early)
    out.add_sites([(0, ["a.py:1 in f"], None)])
    out.close()
    capture = open_capture(tmp_path / "run")
    table = capture.records()
    assert capture.problems == []
    assert table.schema.names == RECORDS.names
    assert table.schema.equals(RECORDS)
    assert table["seq"].to_pylist() == [k // 2 for k in range(12)] + [100 + k // 2 for k in range(12)]
    assert table["slot"].to_pylist() == ["input.0", "arguments"] * 12
    assert table["digest"].to_pylist() == early["digest"] + late["digest"]
    assert table["l2"].to_pylist() == early["l2"].tolist() + late["l2"].tolist()
    assert table["shape"].to_pylist()[:2] == [[2, 5], None]
    matrix = sketch_matrix(table["sketch"])
    assert np.isnan(matrix[1::2]).all()
    np.testing.assert_array_equal(matrix[:12:2], early["sketch"].data[::2])
    np.testing.assert_array_equal(sketch_matrix(table["sketch"].slice(12)), matrix[12:])


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    capture = open_capture(small(tmp_path / "run"))
    assert capture.steps == [0, 1, 2]
    assert capture.rows == 72
    table = capture.records(["op", "step"], step=(1, 2), scope="layers.1", slot=["input.0"])
    assert table.column_names == ["op", "step"]
    assert table["step"].to_pylist() == [1] * 4 + [2] * 4
    assert capture.records(["l2"], level="module").num_rows == 0
    assert capture.records(["l2"], step=77).column_names == ["l2"]
    assert capture.records(rank=3).num_rows == 0
    with pytest.raises(ValueError, match=r"no columns \['nonsense'\] in .*: there are \['device', 'digest'"):
        capture.records(["nonsense"])


def test_nan_is_not_null(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, {"seq": [0, 1], "min": np.array([np.nan, 1.0]), "max": [float("nan"), None]})
    out.close()
    table = open_capture(tmp_path / "run").records(["min", "max", "mean"])
    assert [column.null_count for column in table.columns] == [0, 1, 2]
    assert np.isnan(table["min"][0].as_py())


def test_unknown_columns_are_kept(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, {"seq": [0], "novelty": ["x"], "clash": [1]})
    out.write_records(1, {"seq": [1], "clash": [[1]]})
    out.close()
    capture = open_capture(tmp_path / "run")
    assert capture.records(["seq", "novelty"])["novelty"].to_pylist() == ["x", None]
    assert capture.records(["novelty"], novelty="x").num_rows == 1
    assert capture.records().schema.names == RECORDS.names
    assert len(capture.problems) == 1
    assert "unknown columns differ in type between parts and are left out" in capture.problems[0]


def test_columns_of_different_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns of a records part differ in length: expected 2, got {'op': 1}"):
        writer(tmp_path / "run").write_records(0, {"seq": [0, 1], "op": ["a"]})


PAYLOADS = [*SAFETENSORS, "complex64", "complex128", "float8_e4m3fnuz", "float4_e2m1fn", "int4"]


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
def test_payload_of_every_dtype(tmp_path: Path, shape: tuple[int, ...]) -> None:
    out = writer(tmp_path / "run")
    tensors = {}
    for name in PAYLOADS:
        kind = getattr(ml_dtypes, name, name)
        tensors[name] = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(kind)
    refs = {n: out.add_payload(hexadecimal(digest(t)), n, shape, t.tobytes()) for n, t in tensors.items()}
    out.close()
    capture = open_capture(tmp_path / "run")
    for name, tensor in tensors.items():
        got = capture.payload(0, *refs[name])
        assert (got.dtype, got.shape, got.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
        assert not got.flags.writeable
    with safe_open(tmp_path / "run" / "rank-00000" / "tensors-0000.safetensors", "numpy") as plain:  # for everybody
        assert len(plain.keys()) == len(PAYLOADS)
        np.testing.assert_array_equal(plain.get_tensor(refs["float32"][1]), tensors["float32"])
        assert plain.get_tensor(refs["complex128"][1]).dtype == np.uint8


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=40), max_size=12))
def test_equal_bytes_are_stored_once(tmp_path_factory: pytest.TempPathFactory, blobs: list[bytes]) -> None:
    run = tmp_path_factory.mktemp("capture") / "run"
    out = writer(run)
    arrays = [np.frombuffer(blob, np.uint8) for blob in blobs]
    refs = [out.add_payload(hexadecimal(digest(a)), "uint8", a.shape, a.tobytes()) for a in arrays]
    out.close()
    capture = open_capture(run)
    assert [capture.payload(0, *ref).tobytes() for ref in refs] == blobs
    assert len(set(refs)) == len(set(blobs))
    assert capture.ranks[0]["written"]["payload_bytes"] == sum(map(len, set(blobs)))


def test_segments_are_cut_and_precede_their_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.foundation.store.writer.SEGMENT_BYTES", 100)
    out = writer(tmp_path / "run")
    refs = [out.add_payload(f"{k:016x}", "uint8", (60,), bytes([k]) * 60) for k in range(5)]
    assert [int(segment[8:12]) for segment, _ in refs] == [0, 0, 1, 1, 2]
    assert not (out.folder / "tensors-0002.safetensors").exists()
    out.write_records(0, {"seq": [0], "payload_segment": [refs[4][0]], "payload_key": [refs[4][1]]})
    assert (out.folder / "tensors-0002.safetensors").exists()
    assert out.add_payload(f"{1:016x}", "uint8", (60,), b"\1" * 60) == refs[1]


def test_call_stacks(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.add_sites([(3, ["a.py:1 in f", "b.py:2 in g"], "f(x)")])
    out.flush()
    out.add_sites([(9, ["c.py:3 in h"], None)])
    out.close()
    capture = open_capture(tmp_path / "run")
    assert capture.sites(0) == {3: (("a.py:1 in f", "b.py:2 in g"), "f(x)"), 9: (("c.py:3 in h",), None)}
    assert capture.sites(1) == {}


def test_manifests(tmp_path: Path) -> None:
    out = writer(tmp_path / "run", run="abc")
    out.note("torch.compile was turned off")
    out.note("torch.compile was turned off")
    out.update(seeds={"torch": 1234})
    assert open_capture(tmp_path / "run").ranks[0]["status"] == "recording"
    out.close("complete")
    out.close("interrupted")
    capture = open_capture(tmp_path / "run")
    assert capture.root["format_version"] == 2
    assert capture.root["run"] == "abc"
    assert capture.ranks[0]["status"] == "complete"
    assert capture.ranks[0]["notes"] == ["torch.compile was turned off"]
    assert capture.ranks[0]["seeds"] == {"torch": 1234}


def test_empty_capture(tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    out.write_records(0, {})
    out.close()
    capture = open_capture(tmp_path / "run")
    assert (capture.steps, capture.rows, capture.problems) == ([], 0, [])
    assert capture.records().schema.equals(RECORDS)
    assert capture.records(["sketch"])["sketch"].type == pa.list_(pa.float64(), LANES)
    assert capture.query("select count(*) n from records")["n"].to_pylist() == [0]
    assert repr(capture) == f"Capture({str(tmp_path / 'run')!r}, 1 ranks, 0 steps, 0 rows)"


def test_query_reaches_records_and_nothing_else(tmp_path: Path) -> None:
    capture = open_capture(small(tmp_path / "run"))
    sql = (
        "select scope, count(*) n, max(len(sketch)) lanes from records where slot = 'input.0' group by all order by all"
    )
    assert capture.query(sql).to_pydict() == {
        "scope": [f"layers.{k}" for k in range(3)],
        "n": [12] * 3,
        "lanes": [64] * 3,
    }
    for hostile in (
        "select * from read_text('/etc/hostname')",
        f"copy records to '{tmp_path}/stolen.csv'",
        "set enable_external_access = true",
        "install httpfs",
    ):
        with pytest.raises(TrueupError, match=r"the query on .* failed"):
            capture.query(hostile)
    assert not (tmp_path / "stolen.csv").exists()


def test_a_query_without_duckdb_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = open_capture(small(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(TrueupError, match=r"needs DuckDB, which is not installed: pip install 'trueup\[sql\]'$"):
        capture.query("select 1")


def test_files_are_those_of_the_design(tmp_path: Path) -> None:
    assert files(small(tmp_path / "run", steps=1)) == [
        "manifest.json",
        "rank-00000/lock",
        "rank-00000/manifest.json",
        "rank-00000/sites-0000.parquet",
        "rank-00000/step-000000/records-0000.parquet",
        "rank-00000/step-000000/records-0001.parquet",
        "rank-00000/tensors-0000.safetensors",
    ]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["format_version"] == 2


def test_a_view_of_a_payload(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    out = writer(tmp_path / "run")
    segment, key = out.add_payload(hexadecimal(digest(array)), "float32", (24,), array.tobytes())
    out.close()
    capture = open_capture(tmp_path / "run")
    np.testing.assert_array_equal(capture.payload(0, segment, key, [1, 5, 4, 1, 6]), array.T[1:])
    np.testing.assert_array_equal(capture.payload(0, segment, key, (2, 4, 2, 6, 1)), array[:, 2:4])
    assert capture.payload(0, segment, key, [23]).tolist() == 23.0
    assert capture.payload(0, segment, key, [24, 0, 1]).shape == (0,)


@pytest.mark.parametrize(
    "view", [[], [0, 25, 1], [1, 24, 1], [0, 2, 24], [-1, 2, 1], [0, -2, 1], [0, 2, -1], [0, 5, 5, 0, 0], [0, 2], ["x"], [0] * 131]
)
def test_a_view_beyond_its_payload_is_refused(view: list[int], tmp_path: Path) -> None:
    out = writer(tmp_path / "run")
    segment, key = out.add_payload("0" * 16, "float32", (24,), bytes(96))
    out.close()
    with pytest.raises(TrueupError, match=r"the view of tensor .* is damaged"):
        open_capture(tmp_path / "run").payload(0, segment, key, view)
