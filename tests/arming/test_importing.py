"""A process is armed by the first real import of the framework, and by nothing less."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from trueup.recording.arming import SITE, VARIABLE, WhenImported


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Watch for a framework of our own; what would begin is written down."""
    orders: list[tuple[str, str]] = []
    (tmp_path / "fakeframework.py").write_text("import os\nif os.environ.get('BROKEN'): raise OSError('no driver')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trueup.recording.arming.process.begin", lambda *order: orders.append(order))
    finder = WhenImported("fakeframework", "the order")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield orders
    sys.modules.pop("fakeframework", None)


def test_importing_arms_once(armed: list[tuple[str, str]]) -> None:
    module = importlib.import_module("fakeframework")
    importlib.reload(module)
    assert armed == [("the order", "fakeframework")]
    assert type(module.__loader__).__module__ == type(module.__spec__.loader).__module__ != WhenImported.__module__


def test_asking_whether_it_is_there_does_not_use_it_up(armed: list[tuple[str, str]]) -> None:
    assert importlib.util.find_spec("fakeframework") is not None
    assert armed == []
    importlib.import_module("fakeframework")
    assert armed == [("the order", "fakeframework")]


def test_a_failing_import_does_not_use_it_up(armed: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(OSError, match="no driver"):
        importlib.import_module("fakeframework")
    assert armed == []
    monkeypatch.delenv("BROKEN")
    importlib.import_module("fakeframework")
    assert armed == [("the order", "fakeframework")]


def test_an_import_on_another_thread_misses_no_finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It walks along the list of finders; what leaves meanwhile must not shift the rest of them."""
    leaving = WhenImported("never", "")

    class Meanwhile:
        def find_spec(self, *_: object) -> None:
            leaving.remove()

    (tmp_path / "imported_meanwhile.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    at = sys.meta_path.index(PathFinder)
    monkeypatch.setattr(sys, "meta_path", [leaving, *sys.meta_path[:at], Meanwhile(), PathFinder])
    assert importlib.import_module("imported_meanwhile")
    assert leaving not in sys.meta_path


def test_a_python_without_trueup_says_so_and_runs_on(tmp_path: Path) -> None:
    (tmp_path / "trueup.py").write_text("raise ImportError('No module named trueup')\n")
    path = os.pathsep.join([SITE, str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: "{}"}
    command = [sys.executable, "-c", "print(1)"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "1\n"
    assert run.stderr == (
        f"trueup: {sys.executable} cannot import trueup, so this process is not captured: No module named trueup\n"
    )
