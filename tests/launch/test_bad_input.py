"""`trueup compare` on what is broken or does not belong together: one clear message, exit code 2, never "aligned"."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .running import cli, trueup_run

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def broken(tmp_path: Path, complete: Path) -> Path:
    """A copy of a good capture, to break."""
    return shutil.copytree(complete, tmp_path / "broken")


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(capture: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    for path in capture.rglob("records-*.parquet"):
        pq.write_table(change(pq.read_table(path, partitioning=None)), path)


def refused(capsys: Capsys, *arguments: str | Path) -> str:
    """Compare, expect a refusal, return its message."""
    code, out, err = cli(capsys, "compare", *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.startswith("trueup: ")
    return err.removeprefix("trueup: ").rstrip("\n")


def test_no_capture(tmp_path: Path, complete: Path, capsys: Capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    give = "give the directory that was passed to -o"
    for name, reason in {
        "missing": "expected a directory, got nothing; check the path",
        "file": "expected a directory, got a file; check the path",
        "empty": f"expected manifest.json in it, got none; {give}",
    }.items():
        path = tmp_path / name
        assert refused(capsys, complete, path) == f"{path} is not a capture: {reason}"
        assert refused(capsys, path, complete) == f"{path} is not a capture: {reason}"


def test_as_a_process_of_its_own(tmp_path: Path, complete: Path) -> None:
    run = trueup_run("compare", complete, tmp_path / "missing")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"trueup: {tmp_path / 'missing'} is not a capture: expected a directory, got nothing; check the path\n"
    )


def test_newer_format(broken: Path, complete: Path, capsys: Capsys) -> None:
    edit(broken / "manifest.json", format_version=3)
    assert refused(capsys, complete, broken) == (
        f"{broken} was recorded in a newer format: expected format_version up to 2, got 3; upgrade trueup to read it"
    )


def test_damaged_manifest(broken: Path, complete: Path, capsys: Capsys) -> None:
    path = broken / "manifest.json"
    path.write_text("{")
    message = refused(capsys, complete, broken)
    assert message.startswith(f"{path} is damaged: expected JSON, got ")
    assert message.endswith("; restore it or record again")


def test_other_framework(broken: Path, complete: Path, capsys: Capsys) -> None:
    edit(broken / "rank-00000/manifest.json", framework="jax")
    assert refused(capsys, complete, broken) == (
        f"the captures are of different frameworks: {complete} of torch, {broken} of jax; "
        "common names are known of torch, paddle and tensorflow"
    )


def elsewhere(name: str, by: int) -> Callable[[pa.Table], pa.Table]:
    """Return a change of the records' rank or step."""

    def change(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, table.schema.field(place), pa.array(table[name].to_numpy() + by, pa.int32()))

    return change


def test_no_common_ranks(broken: Path, complete: Path, capsys: Capsys) -> None:
    rewrite(broken, elsewhere("rank", 3))
    (broken / "rank-00000").rename(broken / "rank-00003")
    assert refused(capsys, complete, broken) == (
        f"the captures have no ranks in common: {complete} holds 0, {broken} holds 3; "
        "capture the same ranks on both sides"
    )


def test_records_of_another_place_are_lost(broken: Path, complete: Path, capsys: Capsys) -> None:
    (broken / "rank-00000").rename(broken / "rank-00003")
    message = refused(capsys, complete, broken)
    assert message.startswith(f"{broken} holds no records: rank 3 step 0: records-0000.parquet is truncated or damaged (rows are")
    assert "not of rank 3, as the folder is" in message


def test_no_common_steps(broken: Path, complete: Path, capsys: Capsys) -> None:
    rewrite(broken, elsewhere("step", 5))
    for step in (0, 1, 2):
        (broken / f"rank-00000/step-00000{step}").rename(broken / f"rank-00000/step-00000{step + 5}")
    assert refused(capsys, complete, broken) == (
        f"the captures have no steps in common: {complete} holds 0-2, {broken} holds 5-7; "
        "capture the same steps on both sides"
    )


def test_no_common_levels(broken: Path, complete: Path, capsys: Capsys) -> None:
    rewrite(broken, lambda table: table.filter(pa.compute.equal(table["level"], "module")))
    assert refused(capsys, complete, broken, "--level", "aten") == (
        f"the captures have no level in common among aten: {complete} holds module, api, aten, {broken} holds module; "
        "capture both with the same --level"
    )


def test_nothing_recorded(broken: Path, complete: Path, capsys: Capsys) -> None:
    for path in broken.rglob("records-*.parquet"):
        path.write_bytes(path.read_bytes()[:100])
    message = refused(capsys, complete, broken)
    assert message.startswith(
        f"{broken} holds no records: rank 0 step 0: records-0000.parquet is truncated or damaged ("
    )
    assert message.endswith("skipped, its calls are missing; record again")


@pytest.mark.parametrize("step", [0, 2])
def test_truncated_part(broken: Path, complete: Path, capsys: Capsys, step: int) -> None:
    """A step that is lost on one side is not aligned, even where all other steps are."""
    for path in (broken / f"rank-00000/step-00000{step}").glob("*.parquet"):  # one, or more on a slow machine
        path.write_bytes(path.read_bytes()[:-100])
    code, out, err = cli(capsys, "compare", complete, broken)
    said = " ".join(out.split())
    assert (code, err) == (2, "")
    assert said.startswith("COULD NOT TELL because ")
    assert f"rank 0 step {step}: records-0000.parquet is truncated or damaged" in said
    assert "next: restore what is missing, or record that run again" in said


def test_bytes_changed_inside_a_part(broken: Path, complete: Path, capsys: Capsys) -> None:
    path = min((broken / "rank-00000/step-000001").glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[2000:2040] = bytes(40)
    path.write_bytes(content)
    code, out, err = cli(capsys, "compare", complete, broken)
    assert (code, err) == (2, "")
    assert "rank 0 step 1: records-0000.parquet is truncated or damaged" in " ".join(out.split())


def without_digests(table: pa.Table) -> pa.Table:
    """Make equal tensors look different, so that their payloads have to be read."""
    column = table.schema.get_field_index("digest")
    return table.set_column(column, "digest", pa.nulls(table.num_rows, pa.string()))


def test_missing_payload(broken: Path, complete: Path, capsys: Capsys) -> None:
    rewrite(broken, without_digests)
    code, out, _ = cli(capsys, "compare", complete, broken)
    assert (code, out[:7]) == (0, "ALIGNED")
    for segment in broken.rglob("*.safetensors"):
        segment.unlink()
    code, out, err = cli(capsys, "compare", complete, broken)
    assert (code, err) == (2, "")
    said = "".join(out.split())  # a terminal breaks the path wherever its length asks for it
    assert re.match(r"COULDNOTTELLbecause\dparts?ofthecapturescannotberead:rank0:", said)
    assert "tensors-0000.safetensorsismissing:itstensorscannotberead" in said


def test_a_culprit_is_found_beside_what_is_lost(broken: Path, complete: Path, capsys: Capsys) -> None:
    """The sketches still tell where the difference starts."""

    def halve(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        for row in rows:
            if row["op"] == "LSTM" or (row["scope"], row["phase"]) != ("neck", "forward"):
                continue
            if row["slot"] == "output.0":
                row["l2"], row["sketch"] = row["l2"] / 2, (np.frombuffer(row["sketch"]) / 2).tobytes()
        return pa.Table.from_pylist(rows, schema=table.schema)

    rewrite(broken, without_digests)
    rewrite(broken, halve)
    for segment in broken.rglob("*.safetensors"):
        segment.unlink()
    code, out, err = cli(capsys, "compare", complete, broken)
    assert (code, err) == (1, "")
    assert out.startswith("DEVIATES  first culprit: neck, forward, step 0, rank 0")
    assert "tensors-0000.safetensors is missing" not in err


def test_unwritable_report(tmp_path: Path, complete: Path, capsys: Capsys) -> None:
    (tmp_path / "file").touch()
    code, out, err = cli(capsys, "compare", complete, complete, "-o", tmp_path / "file/report")
    assert code == 2
    assert out.startswith("ALIGNED")
    assert err.splitlines() == [
        "trueup: The report could not be written: Not a directory.",
        f"  where:    {tmp_path / 'file/report'}",
        "  expected: a directory that can be made and written, for verdict.json, calls.parquet, index.html",
        f"  got:      {tmp_path / 'file'} is a file",
        "  next:     name another directory with -o, or make this one writable",
    ]


def test_unknown_names(complete: Path, capsys: Capsys) -> None:
    assert refused(capsys, complete, complete, "--level", "kernel") == (
        "level 'kernel' is unknown: expected module, api, aten"
    )
    assert refused(capsys, complete, complete, "--criterion", "strict") == (
        "criterion 'strict' is unknown: expected default, bitwise, ptdbg, ptdbg-summary, "
        "precision-tool, paddle, msprobe, or the path of a criterion file"
    )


NUMBERS = "name = 'mine'\nsuspect = 1\ncertain = 1\ninput_units = 1\nloss = 1\n"
CRITERIA = {
    "suspect = ": "cannot be read: Invalid value (at end of document); see docs/criteria.md",
    "name = 'mine'": "suspect is missing; see docs/criteria.md",
    NUMBERS: "it holds no rows; see docs/criteria.md",
    f"{NUMBERS}row = [{{name = 'x', ops = ['*'], own = {{kind = 'magic'}}, carry = {{kind = 'sum'}}}}]": (
        "own.kind 'magic' is unknown: expected accumulate, additive, average, bilinear, composite, elementwise, exact, reduction; "
        "see docs/criteria.md"
    ),
}


@pytest.mark.parametrize("content", CRITERIA)
def test_criterion_with_an_error(tmp_path: Path, complete: Path, capsys: Capsys, content: str) -> None:
    path = tmp_path / "criterion.toml"
    path.write_text(content)
    message = refused(capsys, complete, complete, "--criterion", path)
    assert message.startswith(f"criterion file {path}")
    assert message.endswith(CRITERIA[content])
    assert len(message.splitlines()) == 1
