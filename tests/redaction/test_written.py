"""A run that is given secrets in every way leaves none of them in any file of its capture, nor in what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from launch.running import trueup_run
from nursery import Nursery
from trueup import open_capture
from trueup.analysis.triage.running import load
from trueup.foundation.redaction import MASK, _table, is_recorded, is_secret, recorded, redacted

TRAINED = Path(__file__).with_name("trained.py")
GIVEN = {
    "TF_VAR_db_password": "hunter2", "tf_token": "hunter2", "CUDA_SECRET": "hunter2", "TORCH_HUB_TOKEN": "hunter2",
    "FLAGS_password": "hunter2", "NCCL_CONF_FILE": "/hunter2", "NVTE_API_KEY": "hunter2", "ASCEND_db": "hunter2",
    "TF_CONFIG": '{"password": "hunter2"}', "XLA_FLAGS": "--xla_x=1 --db=s3://me:hunter2@h/x", "NVTE_FLASH_ATTN": "0",
}  # fmt: skip
ARGUMENTS = ["--token", "hunter2", "--api-key=hunter2", "--db=postgres://me:hunter2@h/x", "password=hunter2", "--lr", "0.1"]
SHOWN = ["--token", MASK, f"--api-key={MASK}", f"--db=postgres://{MASK}@h/x", f"password={MASK}", "--lr", "0.1"]


@pytest.fixture(scope="module")
def captured(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("secrets") / "run"
    command = [nursery.python, str(TRAINED), *ARGUMENTS]
    run = trueup_run("capture", "-o", out, "--detail", "tensor", "--", *command, **GIVEN)
    assert run.returncode == 1, run.stderr
    assert "captured " in run.stderr
    return out


def content(path: Path) -> str:
    """Return all text of a file; of a table that of its cells, which Parquet compresses."""
    return str(pq.read_table(path).to_pylist()) if path.suffix == ".parquet" else path.read_text("latin-1")


def test_no_file_holds_a_secret(captured: Path) -> None:
    files = [path for path in captured.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".parquet", ".safetensors"}
    assert [str(path) for path in files if "hunter2" in content(path)] == []


def test_the_rest_is_there(captured: Path) -> None:
    capture = open_capture(captured)
    rank = capture.ranks[0]
    assert capture.root["command"][2:] == rank["argv"][1:] == SHOWN
    (process,) = [one for one in capture.processes() if one.get("calls")]
    assert process["argv"][1:] == SHOWN
    assert any(f"ValueError: cannot reach postgres://{MASK}@host/runs" in note for note in rank["notes"])
    kept = rank["environment"]
    assert kept["XLA_FLAGS"] == f"--xla_x=1 --db=s3://{MASK}@h/x"
    assert kept["NVTE_FLASH_ATTN"] == "0"
    assert kept["OMP_NUM_THREADS"] == "1"
    assert not [name for name in kept if is_secret(name) or name in ("TF_CONFIG", "NCCL_CONF_FILE", "ASCEND_db")]


def test_a_call_shows_its_arguments_without_them(captured: Path) -> None:
    rows = open_capture(captured).records(op="redaction::scaled", slot="arguments").to_pylist()
    assert rows
    for row in rows:
        assert f"s3://{MASK}@host/x" in row["value"]
        invocation = json.loads(row["invocation"])
        assert invocation["args"][1] == invocation["kwargs"]["api_key"] == {"other": "secret"}  # so that nobody executes it without
    sites = open_capture(captured).sites(0)
    assert any(f'"s3://{MASK}@host/x", api_key="{MASK}")' in (text or "") for _, text in sites.values())


def test_a_manifest_without_secrets_is_written_as_it_is(captured: Path) -> None:
    for path in captured.rglob("*.json"):
        told: Any = json.loads(path.read_text())
        assert redacted(told) == told


# ---------------------------------------------------------------- environment variables
def test_variables_are_those_of_the_table() -> None:
    there = dict.fromkeys([*GIVEN, "HOME", "PATH", "omp_num_threads", "TF_ENABLE_ONEDNN_OPTS", "TORCHINDUCTOR_CACHE_DIR"], "1")
    assert recorded(there) == {"NVTE_FLASH_ATTN": "1", "TF_ENABLE_ONEDNN_OPTS": "1", "XLA_FLAGS": "1"}


def test_the_table_holds_no_name_of_a_secret_twice_or_in_a_family() -> None:
    names, families, left_out = _table()
    assert not [name for name in names if is_secret(name)]
    assert not [name for name in names if name.startswith(families)]
    assert all(name.startswith(families) for name in left_out)


def test_what_triage_switches_is_recorded() -> None:
    frameworks, devices = ("torch", "paddle", "tensorflow"), ["cpu", "cuda", "npu"]
    names = {name for framework in frameworks for switch in load().top(framework, devices) for name in switch.environment}
    assert names
    assert [name for name in sorted(names) if not is_recorded(name)] == []
