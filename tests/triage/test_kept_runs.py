from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trueup.analysis.kept_runs import FILE, KeptRuns
from trueup.foundation.model import TrueupError
from trueup.recording.recorder import launch


def ended(folder: Path, code: int = 0) -> Callable[[], int]:
    """Return what leaves a folder with its number of runs, and ends with a code."""

    def run() -> int:
        folder.mkdir(parents=True)
        (folder / "made").touch()
        return code

    return run


def not_again() -> int:
    raise AssertionError("run again")


def test_the_same_search_goes_on_after_what_ended(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), KeptRuns(folder, ["python", "train.py"], ["triage", 3]) as kept:
        assert kept.made("run-1", "as it is", [folder / "run-1"], ended(folder / "run-1", 3))[0] == 3
        kept.made("run-2", "without", [folder / "run-2"], ended(folder / "run-2", 130))
    with (folder / FILE).open("a") as file:
        file.write('{"run": "run-2", "or')  # killed while it wrote
    for command, question in ((["python", "other.py"], ["triage", 3]), (["python", "train.py"], ["triage", 4])):
        with pytest.raises(TrueupError, match="is not empty"):
            KeptRuns(folder, command, question)
    with KeptRuns(folder, ["python", "train.py"], ["triage", 3]) as kept:
        assert kept.made("run-1", "as it is", [folder / "run-1"], not_again)[0] == 3
        assert kept.made("run-2", "without", [folder / "run-2"], ended(folder / "run-2"))[0] == 0  # what it left was removed
        assert kept.made("run-1", "otherwise", [folder / "run-1"], ended(folder / "run-1"))[0] == 0
    with pytest.raises(TrueupError, match="is not empty"):  # it is over
        KeptRuns(folder, ["python", "train.py"], ["triage", 3])


@pytest.mark.parametrize("text", ["", "[", "[]\n", "{}\n", "null\n", '{"version": 1, "command": ["a"], "question": 1}\n{}\n'])
def test_what_is_no_list_of_runs_is_not_gone_on_with(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(TrueupError, match="is not empty"):
        KeptRuns(tmp_path, ["a"], 1)


def test_a_search_without_a_run_leaves_nothing(tmp_path: Path) -> None:
    with KeptRuns(tmp_path / "out", ["a"], 1):
        pass
    assert not (tmp_path / "out").exists()


def test_a_command_that_was_ending_anyway_was_interrupted_all_the_same() -> None:
    """It gets the signal, and leaves with 0."""
    script = "trap 'exit 0' INT; kill -INT $PPID; while :; do sleep 0.01; done"
    code = launch.run_to_the_end(["sh", "-c", script], {"PATH": "/usr/bin:/bin"}, None, 60.0)
    assert code == 0
    with pytest.raises(KeyboardInterrupt):
        launch.uninterrupted(code)
    assert launch.uninterrupted(launch.run_to_the_end(["true"], {"PATH": "/usr/bin:/bin"}, None, None)) == 0
