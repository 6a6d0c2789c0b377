from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import trueup as package
from report.results import culprit, result
from trueup.doors.cli import main
from trueup.doors.cli.app import COMMANDS, app
from trueup.foundation.model import LEVELS, Result, TrueupError
from trueup.simdev.tables import Fault, Noise
from verdict.captures import Recording

Trueup = Callable[..., Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], list[str]]]:
    """What ``trueup capture`` would have run; the command "ends" with 7."""
    calls: list[tuple[dict[str, Any], list[str]]] = []

    def run(options: dict[str, Any], command: list[str], see: Callable[[dict[str, Any]], object] | None = None) -> int:
        assert see is None
        calls.append((options, command))
        return 7

    made = ModuleType("trueup.recording.recorder.launch")
    made.run = run  # type: ignore[attr-defined]
    import trueup.recording.recorder

    monkeypatch.setattr(trueup.recording.recorder, "launch", made, raising=False)
    return calls


def compared(monkeypatch: pytest.MonkeyPatch, answer: Result | Exception) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def compare(baseline: Path, candidate: Path, *, level: Any, criterion: str, **_: Any) -> Result:
        asked.append((str(baseline), str(candidate), level, criterion))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("trueup.doors.comparing.compare", compare, raising=False)
    return asked


def test_capture_passes_everything_on(trueup: Trueup, launched: list[Any]) -> None:
    ran = trueup(
        "capture", "-o", "runs/a", "--level", "aten", "--level", "api", "--detail", "tensor",
        "--steps", "0:3", "--ranks", "0,2", "--on-error", "stop", "--compile", "through",
        "--include", "neck.*", "--include", "/layers\\.[0-3]/", "--exclude", "*dropout*", "--phase", "backward",
        "--", "python", "train.py", "--steps", "9",
    )  # fmt: skip
    assert (ran.code, ran.err) == (7, "")
    options, command = launched[0]
    assert command == ["python", "train.py", "--steps", "9"]
    assert options == {
        "directory": "runs/a", "level": ("aten", "api"), "detail": "tensor", "steps": "0:3", "ranks": "0,2",
        "include": ("neck.*", "/layers\\.[0-3]/"), "exclude": ("*dropout*",), "phase": ("backward",),
        "on_error": "stop", "compile": "through", "policy": None, "stop": False,
    }  # fmt: skip


def test_capture_of_everything(trueup: Trueup, launched: list[Any]) -> None:
    assert trueup("capture", "-o", "runs/a", "python", "train.py", "-o", "theirs").code == 7
    options, command = launched[0]
    assert command == ["python", "train.py", "-o", "theirs"]
    assert (options["level"], options["detail"], options["steps"], options["include"]) == (LEVELS, "stats", None, None)
    trueup("capture", "-o", "runs/a", "--level", "all", "python")
    assert launched[1][0]["level"] == LEVELS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["-o", "runs/a"], "a command to run")],
)
def test_capture_of_nothing(trueup: Trueup, launched: list[Any], arguments: list[str], expected: str) -> None:
    ran = trueup("capture", *arguments)
    assert ran.code == 64
    assert ran.err.splitlines() == [
        "trueup: There is nothing to capture.",
        f"  expected: {expected}",
        "  got:      none",
        "  next:     trueup capture -o runs/cpu -- python train.py",
    ]
    assert not launched


@pytest.mark.parametrize(("verdict", "code"), [("aligned", 0), ("deviates", 1), ("inconclusive", 2)])
def test_compare(trueup: Trueup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: str, code: int) -> None:
    asked = compared(monkeypatch, result(verdict))
    ran = trueup("compare", "runs/cpu", "runs/npu", "-o", tmp_path / "report")
    assert (ran.code, ran.err) == (code, "")
    assert asked == [("runs/cpu", "runs/npu", None, "default")]
    assert ran.out.splitlines()[0].startswith({0: "ALIGNED  ", 1: "DEVIATES  ", 2: "COULD NOT TELL  "}[code])
    assert ran.out.splitlines()[-1] == f"report  {tmp_path / 'report' / 'index.html'}"
    assert json.loads((tmp_path / "report" / "verdict.json").read_text())["exit_code"] == code


def test_compare_with_choices(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compared(monkeypatch, result())
    trueup("compare", "a", "b", "--level", "api,aten", "--criterion", "mine.toml")
    assert asked == [("a", "b", ("api", "aten"), "mine.toml")]


def test_a_report_that_cannot_be_written(trueup: Trueup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compared(monkeypatch, result("aligned"))
    ran = trueup("compare", "a", "b", "-o", tmp_path / "file")
    assert ran.code == 2
    assert ran.out.startswith("ALIGNED")  # the verdict is not lost
    assert ran.err.startswith("trueup: The report could not be written: File exists.")


def test_what_the_library_refuses_is_one_message(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, TrueupError("runs/a is not a capture: expected manifest.json\x1b[2J"))
    ran = trueup("compare", "a", "b")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "trueup: runs/a is not a capture: expected manifest.json\\x1b[2J\n"


def test_a_crash_is_no_verdict(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, ZeroDivisionError("division by zero"))
    ran = trueup("compare", "a", "b")
    assert ran.code == 2
    assert ran.err.splitlines() == [
        "trueup: Unexpected ZeroDivisionError: division by zero",
        "  next:     set TRUEUP_TRACEBACK=1 to see where, and report it: this is a bug",
    ]
    monkeypatch.setenv("TRUEUP_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        trueup("compare", "a", "b")


def test_an_interrupt_ends_with_130(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trueup.doors.comparing.compare", interrupt, raising=False)
    assert trueup("compare", "a", "b").code == 130


CAPTURE = "  next:     trueup capture -o runs/cpu --steps 0:3 -- python train.py"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "a"], ["trueup: Missing argument 'CAND'.", "  next:     trueup compare runs/cpu runs/npu -o report"]),
        (["capture", "--", "python"], ["trueup: Missing option '--output' / '-o'.", CAPTURE]),
        (["compare", "a", "b", "--bar"], ["trueup: No such option: --bar", "  next:     trueup compare --help"]),
        (["comapre", "a", "b"], ["trueup: No such command 'comapre'", "  next:     trueup --help"]),
        (["show", "a", "--step", "x"], ["trueup: Invalid value for '--step'", "  next:     trueup show --help"]),
        (["show", "a", "--limit", "0"], ["trueup: Invalid value for '--limit'", "  next:     trueup show --help"]),
        (["show", "a", "--level", "x"], ["trueup: --level cannot be read.", "  expected: one of module, api, aten"]),
        (["show", "a", "--tensor", "1"], ["trueup: Option '--tensor' requires", "  next:     trueup --help"]),
    ],
)  # fmt: skip
def test_bad_usage_is_one_message(trueup: Trueup, arguments: list[str], said: list[str]) -> None:
    ran = trueup(*arguments)
    assert (ran.code, ran.out) == (64, "")
    lines = ran.err.splitlines()
    assert lines[0].startswith(said[0])
    assert lines[1] == said[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_help_page_is_read(trueup: Trueup, name: str) -> None:
    example = COMMANDS[name][2]
    assert f"Example: trueup {name} {example}" in " ".join(trueup(name, "--help").out.split())
    command = get_command(app).get_command(None, name)  # type: ignore[attr-defined]
    words = shlex.split(example)
    with command.make_context(name, words) as context:
        if hasattr(command, "commands"):
            command.commands[words[0]].make_context(words[0], words[1:], parent=context).close()


@pytest.mark.parametrize(("line", "said"), [("trueup compar", "compare"), ("trueup compare --rec", "--recompute")])
def test_a_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    for name, value in (("_TRUEUP_COMPLETE", "complete_bash"), ("COMP_WORDS", line), ("COMP_CWORD", str(line.count(" ")))):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert (ended.value.code, capsys.readouterr().out.split()) == (0, [said])


def test_lines_are_broken_for_a_terminal_alone(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, result(culprits=[culprit()]))
    narrow = trueup("compare", "a", "b").out
    monkeypatch.delenv("COLUMNS")
    piped = trueup("compare", "a", "b").out
    assert piped.split() == narrow.split()
    assert len(piped.splitlines()) < len(narrow.splitlines())
    assert max(map(len, piped.splitlines())) < 400  # and nothing is filled up with blanks


def test_a_document_on_standard_output_stands_there_alone(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, result(verdict="deviates"))
    ran = trueup("compare", "a", "b", "--json", "-")
    assert (ran.code, json.loads(ran.out)["verdict"]) == (1, "deviates")
    assert "DEVIATES" in ran.err
    assert "DEVIATES" in trueup("compare", "a", "b").out  # standard output is what it was


def test_version_and_help(trueup: Trueup) -> None:
    ran = trueup("--version")
    assert (ran.code, ran.out) == (0, f"trueup {package.__version__}")
    assert trueup("--help").code == 0
    bare = trueup()
    assert (bare.code, bare.err) == (64, "")
    assert all(f" {command} " in bare.out for command in COMMANDS)
    assert all(f" {line} " in bare.out for _, line, _ in COMMANDS.values())  # whole on a terminal of 80 columns


def test_simdev_list(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    lstm = "aten::_thnn_fused_lstm_cell_backward"
    backward = Fault("lstm-backward-cell-gate", (lstm,), "backward", "the cell gate's gradient is halved", "torch.lstm")
    noise = Noise("hf32", ("aten::mm",), "forward", "products keep 11 bits", "nobody", 1e-3)
    monkeypatch.setattr("trueup.simdev.FAULTS", {backward.name: backward})
    monkeypatch.setattr("trueup.simdev.NOISE", {noise.name: noise})
    ran = trueup("simdev", "list")
    assert ran.code == 0
    assert [line.rstrip() for line in ran.out.splitlines()] == [
        "1 fault: the comparison must name them",
        "",
        "lstm-backward-cell-gate  aten::_thnn_fused_lstm_cell_backward, backward",
        "    the cell gate's gradient is halved",
        "    to blame: torch.lstm",
        "",
        "1 kind of noise: legitimate differences that it must not blame",
        "",
        "hf32  aten::mm, forward",
        "    products keep 11 bits",
        "    to blame: nobody",
    ]


def test_foreign_names_reach_the_terminal_spelled_out(trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, result(culprits=(culprit(scope="a\x1b[2J"),)))
    assert "\x1b" not in trueup("compare", "a", "b").out


def test_rows_of_tensors(trueup: Trueup, tmp_path: Path) -> None:
    pytest.importorskip("xlsxwriter", reason="xlsxwriter is not installed")
    sides = []
    for side in ("baseline", "candidate"):
        run = Recording()
        run.call("aten::neg", [np.ones(4, np.float32)], [-np.ones(4, np.float32)])
        sides.append(run.write(tmp_path / side))
    ran = trueup("compare", *sides, "--csv", tmp_path / "rows.csv", "--xlsx", tmp_path / "rows.xlsx")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-3:] == [f"rows  {tmp_path / 'rows.csv'}", "", f"rows  {tmp_path / 'rows.xlsx'}"]
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3
    assert (tmp_path / "rows.xlsx").read_bytes().startswith(b"PK")


def test_a_workbook_without_its_library_is_refused_before_the_comparison(
    trueup: Trueup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = compared(monkeypatch, result())
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    ran = trueup("compare", "a", "b", "--xlsx", tmp_path / "rows.xlsx")
    assert (ran.code, ran.out, asked) == (2, "", [])
    assert ran.err.startswith("trueup: An Excel workbook needs xlsxwriter, which is not installed.")
