"""What `trueup capture` says and returns, whatever the command does; none of these commands needs PyTorch."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from .running import PYTHON, TRUEUP, cli, environment, trueup_run

NEXT = "  next:     correct what follows -- (for example: trueup capture -o runs/cpu -- python train.py)"
EXPECTED = "  expected: a program on PATH, or the path of an executable"


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 2), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
)
def test_exit_code_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, code: int
) -> None:
    out = tmp_path / "capture"
    got, _, err = cli(capsys, "capture", "-o", out, "--", "sh", "-c", command)
    assert got == code
    ended = f"; the command ended with exit code {code}" if code != 2 else ""
    assert err.startswith(
        f"trueup: nothing was captured into {out}{ended}: no process of the command imported PyTorch, "
        "PaddlePaddle or TensorFlow\n"
    )
    assert not out.exists(), "the next attempt finds nothing in its way"


@pytest.mark.parametrize("words", [("capture", "-o", "out"), ("watch",), ("monitor", "-o", "out")])
def test_a_document_stands_alone_on_standard_output(tmp_path: Path, words: tuple[str, ...]) -> None:
    """What the command prints there goes to standard error then."""
    run = trueup_run(*words, "--json", "-", "--", "sh", "-c", "echo loss 0.5; exit 7", cwd=tmp_path)
    told = json.loads(run.stdout)
    assert (run.returncode, told["exit_code"], told["schema"]) == (7, 7, f"trueup-{words[0]}")
    assert run.stderr.startswith("loss 0.5\ntrueup: nothing was ")
    if words[0] == "capture":
        assert (told["command_exit_code"], told["captured"], told["rows"], told["bytes"]) == (7, False, 0, 0)
        assert told["notes"][0].startswith(f"nothing was captured into {tmp_path / 'out'}; the command ended with exit code 7: ")


def test_a_command_without_training_is_told_so(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", PYTHON, "-c", "pass")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines() == [
        f"trueup: nothing was captured into {out}: no process of the command imported PyTorch, "
        "PaddlePaddle or TensorFlow",
        "  expected: a Python process that imports torch, paddle or tensorflow, started with the environment of the command",
        "  got:      none",
        "  next:     name the training command; python -I, -E or -S, or a PYTHONPATH set anew, hides a process from "
        "Trueup",
    ]


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("no-such-program", "no program of that name on PATH"),
        ("./no-such-script", "no such file"),
        ("./script.py", "a file that is not executable"),
        ("script.py", "a file that is not on PATH; write ./script.py"),
        (".", "a directory"),
        ("./no-header", "./no-header: Exec format error"),
    ],
)
def test_a_command_that_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, got: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("pass\n")
    Path("no-header").write_text("pass\n")
    Path("no-header").chmod(0o755)
    code, stdout, err = cli(capsys, "capture", "-o", "deep/capture", "--", name)
    assert (code, stdout) == (2, "")
    assert err.splitlines() == [
        "trueup: The command cannot start; nothing was captured.",
        f"  where:    {name}",
        EXPECTED,
        f"  got:      {got}",
        NEXT,
    ]
    assert not Path("deep").exists()


def test_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, full, ran = tmp_path / "file", tmp_path / "full", tmp_path / "ran"
    file.touch()
    full.mkdir()
    (full / "thesis.tex").touch()
    locked = tmp_path / "locked"
    locked.mkdir()
    cases = {
        file: f"{file} is not a directory",
        file / "capture": f"{file} is not a directory",
        full: f"{full} is not empty",
        locked / "capture": f"{locked} is a directory: Permission denied",
    }
    make = Path.mkdir

    def mkdir(path: Path, *args: object, **kwargs: object) -> None:
        if path.parent == locked:  # the superuser, who runs many a test, may write anywhere
            raise PermissionError(13, "Permission denied", str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for out, got in cases.items():
        code, _, err = cli(capsys, "capture", "-o", out, "--", "touch", ran)
        assert code == 2
        assert err.splitlines() == [
            "trueup: The capture cannot be written; nothing was run.",
            f"  where:    {out}",
            "  expected: a new or an empty directory that can be written",
            f"  got:      {got}",
            "  next:     name another directory with -o, or remove this one",
        ]
    assert not ran.exists()
    assert (full / "thesis.tex").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    ready, done = tmp_path / "ready", tmp_path / "done"
    command = f'trap "touch {done}; exit 5" INT TERM; touch {ready}; while :; do sleep 0.05; done'
    process = subprocess.Popen(
        [*TRUEUP, "capture", "-o", str(tmp_path / "capture"), "--", "sh", "-c", command],
        env=environment(), stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    while not ready.exists():
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 5
    assert done.exists()
    assert "the command ended with exit code 5" in err
    assert "Traceback" not in err


def test_environment_of_the_user_is_kept(tmp_path: Path) -> None:
    """The user's PYTHONPATH and sitecustomize are still there; arguments and working directory are untouched."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import sys\nsys.customized = __name__\n")
    (mine / "module_of_mine.py").write_text("import os, sys\nprint(sys.customized, sys.argv[1:], os.getcwd())\n")
    path = os.pathsep.join([str(mine), environment()["PYTHONPATH"]])
    run = trueup_run(
        "capture", "-o", tmp_path / "c", "--", PYTHON, "-m", "module_of_mine", "-o", "--", "x y",
        cwd=tmp_path, PYTHONPATH=path,
    )  # fmt: skip
    assert run.stdout == f"sitecustomize ['-o', '--', 'x y'] {tmp_path}\n"


def test_a_broken_sitecustomize_is_reported_as_ever_and_the_process_armed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    show = "import sys; print([type(finder).__name__ for finder in sys.meta_path][:1])"
    run = trueup_run("capture", "-o", tmp_path / "c", "--", PYTHON, "-c", show, PYTHONPATH=path)
    assert run.stdout == "['WhenImported']\n"
    assert "RuntimeError: mine" in run.stderr


def test_a_script_with_a_header_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_text(f"#!{PYTHON}\nimport sys\nprint(type(sys.meta_path[0]).__name__)\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    run = trueup_run("capture", "-o", tmp_path / "c", "--", path)
    assert run.stdout == "WhenImported\n"
