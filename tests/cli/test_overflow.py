"""`trueup overflow`: exit codes, what it prints, overflow.json, the page, and messages for bad usage."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from trueup.doors.cli import main
from verdict.captures import Recording, normal


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    recording = Recording()
    x = np.full((4, 8), 60000, np.float16)
    y = np.full((4, 8), np.inf, np.float16)
    z = np.full((4, 8), np.nan, np.float16)
    recording.call("torch.Tensor.half", [normal(4, 8)], [x], level="api", scope="<b>in\x1b[2Jner")
    recording.call("torch.Tensor.add", [x, x], [y], level="api", scope="crf", source="/a/crf.py:12 in partition")
    recording.call("torch.Tensor.sub", [y, y], [z], level="api", scope="crf")
    return recording.write(tmp_path / "bad")


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    recording = Recording()
    scores, masked = normal(4, 4), np.where(np.tri(4), 0.0, -math.inf).astype(np.float32)
    recording.call("torch.Tensor.masked_fill", [scores], [masked], level="api", arguments={"2": "-inf"})
    recording.call("torch.Tensor.softmax", [masked], [normal(4, 4)], level="api")
    return recording.write(tmp_path / "clean")


def test_found(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["overflow", str(bad), "-o", str(tmp_path / "page"), "--json", str(tmp_path / "o.json")]) == 1
    out = capsys.readouterr().out
    said = "crf, forward, step 0, rank 0 (torch.Tensor.add): overflow: of clean inputs up to 60000 (float16) it made 32 +Inf of 32"
    assert out.startswith(f"FOUND  {said} elements in output.0\n")
    assert "unknown: no recorded call reads it" in out
    assert "your code: a/crf.py:12 in partition" in out
    assert "\x1b[2J" not in out
    assert re.search(r"input\.0 +float16 \[4, 8\] +60000 +60000", out)
    assert 'dtype = "float32"' in out
    assert f"trueup capture --detail tensor --steps 0:2 --stop -o {bad}-tensors -- COMMAND; trueup overflow {bad}-tensors" in out
    assert f"trueup heal {bad} -- COMMAND" in out
    document = json.loads((tmp_path / "o.json").read_text())
    assert (document["schema"], document["schema_version"], document["exit_code"]) == ("trueup-overflow", 1, 1)
    first = document["anomalies"][0]
    assert (first["kind"], first["call"]["scope"], first["call"]["seq"], first["carried"]) == ("overflow", "crf", 1, 1)
    assert first["slots"][2]["held"]["n_posinf"] == 32
    assert first["led"][0]["call"]["op"] == "torch.Tensor.half"
    page = (tmp_path / "page" / "index.html").read_text()
    assert (tmp_path / "page" / "overflow.json").read_bytes() == (tmp_path / "o.json").read_bytes()
    cause = "overflow in torch.Tensor.add: of clean inputs up to 60000 (float16) it made 32 +Inf of 32 elements in output.0"
    assert cause in page.partition("<h1>")[2].partition("</h1>")[0]
    assert "crf, forward, step 0, rank 0 (torch.Tensor.add)" in page
    assert "<b>in" not in page
    assert "\x1b" not in page
    assert "Content-Security-Policy" in page
    assert "http" not in page.replace("http-equiv", "")


def test_clean_says_what_was_expected(clean: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["overflow", str(clean)]) == 0
    assert capsys.readouterr().out == (
        "CLEAN  no NaN, no Inf that any call suffers from, nothing saturated, in 4 tensors of 1 step\n"
        "       1 call with infinities that are expected: all that read them give clean numbers (torch.Tensor.masked_fill)\n"
    )


def test_digests_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording(parts="digest")
    recording.call("aten::mm", [normal(2, 2)], [normal(2, 2)])
    assert main(["overflow", str(recording.write(tmp_path / "run"))]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("COULD NOT TELL whether anything overflowed: no statistics to judge by: it holds digests")
    assert "record with --detail stats" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "The capture has no such step.\n  expected: one of 0\n  got:      7\n"),
        (["--rank", "3"], "The capture has no such rank.\n  expected: one of 0\n  got:      3\n"),
        (["--would-overflow", "fp4"], "  expected: one of fp16, bf16, fp8_e4m3, fp8_e5m2\n  got:      'fp4'"),
    ],
)
def test_bad_usage(clean: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overflow", str(clean), *options]) == 2
    assert message in capsys.readouterr().err


def test_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overflow", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
