"""`trueup capture --compile off|through` on a script that compiles its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from nursery import Nursery
from trueup.foundation.store import open_capture

from .running import SCRIPTS, script, trueup_run

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def plain(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = nursery.script(tmp_path_factory.mktemp("plain") / "log", SCRIPTS / "compiled.py")
    assert run.wait() == 0, run.complained
    return run.said.splitlines()


def test_through_runs_compiled(plain: list[str], tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--compile", "through", "--steps", "1:", "--", *script("compiled.py"))
    assert run.stdout.splitlines() == plain, run.stderr
    assert plain[-1].startswith("graphs 1, ")
    capture = open_capture(out)
    assert [note.partition(":")[0] for note in capture.ranks[0]["notes"]] == ["torch.compile was used"]
    assert "through" in capture.ranks[0]["notes"][0]
    assert capture.steps == [1, 2]
    assert set(capture.records(level="module")["op"].to_pylist()) == {"Sequential"}


def test_off_runs_the_python_code(tmp_path: Path) -> None:
    out = tmp_path / "capture"
    run = trueup_run("capture", "-o", out, "--", *script("compiled.py"))
    assert run.stdout.splitlines()[-1] == "graphs 0, operators 0", run.stderr
    capture = open_capture(out)
    assert ["--compile=off" in note for note in capture.ranks[0]["notes"]] == [True]
    assert {"Linear", "GELU", "Sequential"} <= set(capture.records(level="module")["op"].to_pylist())


def test_another_word_is_refused(tmp_path: Path) -> None:
    run = trueup_run("capture", "-o", tmp_path / "capture", "--compile", "no", "--", *script("compiled.py"))
    assert (run.returncode, run.stderr) == (64, "trueup: compile 'no' is unknown: expected off or through\n")
