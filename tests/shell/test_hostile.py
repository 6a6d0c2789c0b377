"""Captures of strangers: names and manifests that hold what a terminal obeys; commands that they would like to be run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.written import capture
from trueup.doors.cli.app import run as run_command_line

from .conftest import MakeShell

EVIL = ("\x1b]0;owned\x07", "\x1b[5;7m", "\x9b2J", "\u202e")
NAME = f"x{''.join(EVIL)}y/op{EVIL[0]}\nz"


def hostile(folder: Path) -> tuple[Path, Path]:
    """Write two captures whose call, slot and manifest hold escape codes."""
    values = np.arange(1, 41, dtype=np.float32)
    for name, factor in (("base", 1), ("cand", -1)):
        capture(folder / name, {NAME: {"output.0": values * factor, f"input.{EVIL[0]}": values}})
        manifest = folder / name / "manifest.json"
        content = json.loads(manifest.read_text())
        content["command"] = ["sh", "-c", f"touch {folder / 'pwned'}{EVIL[1]}"]
        manifest.write_text(json.dumps(content))
    return folder / "base", folder / "cand"


LINES = (
    "ac -c", "vc", "vcs -c 1", "ls", "ls -t '*'", "ls -n x", "ni 0", "pt 0:output.0", "cp 0:output.0 -p 3", "run", "ni zz", "help",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_no_escape_code_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    base, cand = hostile(tmp_path)
    run_command_line(["shell", str(base), str(cand), "-c", line])
    got = capsys.readouterr()
    text = got.out + got.err
    assert text
    for sequence in EVIL:
        assert sequence not in text
    assert "\x1b" not in text.replace("\x1b[0m", "")
    assert not (tmp_path / "pwned").exists()


def test_a_table_of_a_stranger(shell: MakeShell, tmp_path: Path) -> None:
    base, cand = hostile(tmp_path)
    table = tmp_path / "result_1.csv"
    table.write_text(
        "Index,LeftOp,RightOp,TensorIndex,CosineSimilarity,MaxAbsoluteError\n"
        f"0,conv{EVIL[0]},conv,conv:output:0,0.5,1.0\n"
        "1,relu,relu,relu:input:0,0.1,1\n"
        "2,relu,relu,relu:output:0,0.99,0.1\n"
        "3,*,lost,lost:output:0,*,*\n"
        "4,nan,nan,nan:output:0,NaN,NaN\n"
    )
    code, text = shell(base, cand)(f"vcs -f {table}")
    assert code == 1
    assert EVIL[0] not in text
    assert text.count("╭") == 1
    assert "output  output.0 0.500000" in text
    assert "1 call with an output whose cosine is 0.98 or less, of 2 compared calls" in text
    assert "could not tell: 2 calls could not be measured" in text
    assert "no table of a vector comparison" in shell(base, cand).fails(f"vcs -f {tmp_path / 'base' / 'manifest.json'}")
