"""`trueup check`: what it prints, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trueup.doors.cli import main
from verdict.captures import Recording, normal


def recorded(path: Path, *, bad: bool, dtype: object = np.float32) -> Path:
    recording = Recording()
    x = np.float32([1, 7e4 if bad else 6e4])
    with np.errstate(over="ignore"):
        where = {"scope": "in\x1b[2Jner", "source": "/a/b/net.py:7 in f"}
        recording.call("torch.Tensor.half", [x], [x.astype(np.float16)], level="api", **where)
    for scope in ("a", "b"):
        out = normal(4, 4).astype(dtype if scope == "b" else np.float32)  # type: ignore[call-overload]
        recording.call("torch.matmul", [out, out], [out], level="api", scope=scope)
    if bad:
        recording.call("torch.relu", [x], [x], level="api", scope="a")
    return recording.write(path)


def test_one_run_and_beside_another(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    base, cand = recorded(tmp_path / "base", bad=False), recorded(tmp_path / "cand", bad=True, dtype=ml_dtypes.bfloat16)
    assert main(["check", str(base)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "casts      no cast is dangerous: 1 looked at\n"
        "precision  mixed precision is off: all 2 matrix products and convolutions run in float32\n"
    )
    assert main(["check", str(cand), "--against", str(base), "--json", str(tmp_path / "c.json")]) == 1
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "casts      1 dangerous cast (1 looked at): in\\x1b[2Jner, forward, step 0, rank 0 (torch.Tensor.half), float32" in out
    assert "[b/net.py:7 in f]" in out
    assert "precision  mixed precision is on: 1 of 2 matrix products and convolutions run in float32, 1 in bfloat16: b torch" in out
    assert "1 of 2 kinds of matrix products and convolutions (operator, module, phase) run in another dtype: the first is b" in out
    assert "graph      the graphs are 85.71 % alike: the baseline makes 3 calls, the candidate has 1 that" in out
    document = json.loads((tmp_path / "c.json").read_text())
    assert (document["schema"], document["schema_version"], document["exit_code"]) == ("trueup-check", 1, 1)
    assert document["casts"]["casts"][0]["place"]["source"] == "/a/b/net.py:7 in f"
    assert document["graph"]["extra"][0]["op"] == "torch.relu"
    assert document["graph"]["edges"] == "NaN"


def test_could_not_tell_and_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording(parts="digest")
    recording.call("torch.Tensor.half", [normal(4)], [normal(4).astype(np.float16)], level="api")
    assert main(["check", str(recording.write(tmp_path / "run"))]) == 2
    assert "could not tell of 1 of 1 cast" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("trueup: ")
    assert main(["check", str(tmp_path / "run"), "--step", "9"]) == 2
    assert "The capture has no such step" in capsys.readouterr().err


def test_modules_alone_tell_nothing_of_casts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording()
    recording.call("Linear", [normal(4, 4)], [normal(4, 4)], level="module", scope="a")
    assert main(["check", str(recording.write(tmp_path / "run"))]) == 2
    assert "could not tell of casts: the capture holds modules alone" in capsys.readouterr().out


def steps(path: Path, count: int) -> Path:
    recording = Recording()
    for step in range(count):
        recording.call("torch.matmul", [normal(4, 4), normal(4, 4)], [normal(4, 4)], level="api", scope="a", step=step)
    return recording.write(path)


def test_runs_of_other_lengths_are_not_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, cand = steps(tmp_path / "base", 3), steps(tmp_path / "cand", 2)
    assert main(["check", str(cand), "--against", str(base)]) == 2
    assert "steps 2 are only in" in " ".join(capsys.readouterr().out.split())
    assert main(["check", str(base), "--against", str(base)]) == 0


def test_runs_without_products_are_not_of_the_same_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording()
    recording.call("torch.relu", [normal(4, 4)], [normal(4, 4)], level="api", scope="a")
    run = recording.write(tmp_path / "run")
    assert main(["check", str(run), "--against", str(run)]) == 2
    assert "could not tell whether the runs compute in the same dtypes" in capsys.readouterr().out
