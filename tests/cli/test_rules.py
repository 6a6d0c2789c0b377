"""One command line: the same option has the same name, form and help in all commands."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import trueup as package
from trueup.doors.cli.app import COMMANDS, app
from trueup.doors.cli.options import ADDS, FILES, KINDS, PAGES
from verdict.captures import Recording

Trueup = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/cli.md").read_text("utf-8")


class Context:
    resilient_parsing = True


def leaves() -> Iterator[tuple[str, Any]]:
    root: Any = get_command(app)
    for name in COMMANDS:
        command = root.get_command(Context, name)
        for inner, leaf in (getattr(command, "commands", None) or {"": command}).items():
            yield f"{name} {inner}".strip(), leaf


LEAVES = dict(leaves())
NO_DOCUMENT = {"shell", "simdev run", "simdev list"}
"""Commands whose result is a prompt or another command's."""
METAVARS = {
    "--output": {"DIR", "FILE"}, "--json": {"FILE"}, "--html": {"FILE"}, "--map": {"FILE"}, "--patch": {"FILE"},
    "--policy": {"FILE"}, "--limit": {"N"}, "--jobs": {"N"}, "--level": {"LEVEL"}, "--phase": {"PHASE"}, "--rank": {"N"},
    "--step": {"N", "REGEX"}, "--steps": {"STEPS", "N"}, "--timeout": {"SECONDS"}, "--against": {"BASE", "DEVICE"},
    "--check": {"COMMAND", "FILE"}, "--baseline": {"CAPTURE", "TRACE"}, "--device": {"DEVICE"},
    "--ranks": {"RANKS"}, "--to": {"FRAMEWORK", "npu|portable", "TRACKER"},
}  # fmt: skip
"""What an option of several commands takes; another word is another thing."""
ONE_HELP = {"--json", "--html", "--quiet", "--verbose", "--overwrite", "--simulated", "--help"}


def options(command: Any) -> Iterator[tuple[str, Any]]:
    for option in command.params:
        long = [word for word in option.opts if word.startswith("--")]
        if long and not getattr(option, "hidden", False):
            yield long[0], option


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_keeps_the_rules(name: str) -> None:
    command = LEAVES[name]
    held = dict(options(command))
    assert "--quiet" in held
    assert ("--json" in held) == (name not in NO_DOCUMENT)
    for long, option in held.items():
        assert option.help, f"{long} says nothing"
        assert option.help.endswith((".", ").")), f"{long}: {option.help}"
        flag = option.is_flag or option.metavar is None
        assert flag or option.metavar in METAVARS.get(long, {option.metavar}), f"{long} takes {option.metavar}"
    assert all(one.help for one in command.params if not getattr(one, "hidden", False)), "an argument says nothing"
    assert (command.help or "").strip()


@pytest.mark.parametrize("name", LEAVES)
def test_a_help_page_has_an_example_and_what_is_required(trueup: Trueup, name: str) -> None:
    """The example is read by the command itself; a call that is wrong ends with 64 and one message that says what is right."""
    command, page = LEAVES[name], " ".join(trueup(*name.split(), "--help").out.split())
    (example,) = re.findall(rf"Example: (trueup {name}\b.*)$", page)
    required = [one for one in command.params if one.required]
    assert page.count("[required]") == len(required)
    with command.make_context(name, shlex.split(example)[1 + len(name.split()) :]):
        pass
    ran = trueup(*name.split(), "--no-such-option")
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (64, "", 2)
    if required:
        ran = trueup(*name.split())
        assert (ran.code, ran.out) == (64, "")
        assert ran.err.splitlines()[1:] == [f"  next:     {example}"]


def test_what_a_command_leaves_can_be_overwritten() -> None:
    """Each command with -o has the option, and knows what it may remove, or removes it itself."""
    left = {**PAGES, **KINDS, **FILES}
    for name, command in LEAVES.items():
        if "--output" in dict(options(command)) and name not in ADDS:
            assert "--overwrite" in dict(options(command)), name
            assert (name.split()[-1] in left) != command.overwrites_by_itself, name


def test_an_option_is_one_thing_in_all_commands() -> None:
    short, said, used = defaultdict(set), defaultdict(set), defaultdict(int)
    for command in LEAVES.values():
        for long, option in options(command):
            short[long].add(tuple(sorted(word for word in option.opts if not word.startswith("--"))))
            said[long].add(option.help)
            used[long] += 1
    assert {long: forms for long, forms in short.items() if len(forms) > 1} == {}
    assert {long: texts for long, texts in said.items() if long in ONE_HELP and len(texts) > 1} == {}
    names = [name for forms in short.values() for form in forms for name in form]
    assert sorted(names) == sorted(set(names)), "a letter stands for two options"
    unruled = {long for long, count in used.items() if count > 2} - set(METAVARS) - ONE_HELP
    assert unruled == set(), "rule what they take"


@pytest.mark.parametrize(("line", "most"), [("--help", 0.3), ("checkpoint repair --help", 0.5), ("capture --help", 0.5)])
def test_help_is_there_at_once(line: str, most: float) -> None:
    """Seconds of the processor: the clock's are the machine's."""
    taken = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "trueup", *line.split()], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(taken) < most * 1.5  # a core that two processes share is slower


def test_usage_has_no_word_that_is_refused(trueup: Trueup) -> None:
    usage = trueup("compare", "--help").out.split("Compare two")[0]
    assert "BASE" in usage
    assert "BASE3" not in usage


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, factor in (("cpu", 1), ("npu", 2)):
        run = Recording()
        run.call("aten::neg", [np.ones(4, np.float32)], [-factor * np.ones(4, np.float32)], scope="a")
        run.call("aten::abs", [np.ones(4, np.float32)], [np.ones(4, np.float32)], scope="b")
        run.write(tmp_path / "runs" / name)
    return tmp_path


def test_settings_of_a_project(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    example = PAGE.split("```toml\n")[1].split("```")[0]
    (runs / "pyproject.toml").write_text(example)
    (runs / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(runs / "deep/er")
    found = json.loads(trueup("show", "../../runs/cpu", "--json", "-").out)
    assert (found["calls_in_all"], [one["scope"] for one in found["calls"]]) == (2, ["a"])
    assert len(json.loads(trueup("show", "../../runs/cpu", "--limit", "9", "--json", "-").out)["calls"]) == 2
    (runs / "deep/pyproject.toml").write_text("[tool.other]\n")  # the nearest is the project's
    assert len(json.loads(trueup("show", "../../runs/cpu", "--json", "-").out)["calls"]) == 2


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("[tool.trueup.show]\nlimits = 1", "options of the command: against, call,", "'limits'"),
        ("[tool.trueup.show]\nlimit = [1]", "a text or a number", "[1]"),
        ("[tool.trueup.show]\ntree = 'yes'", "true or false", "'yes'"),
        ("[tool.trueup.show]\nscope = {a = 1}", "a text or a number", "{'a': 1}"),
        ("[tool.trueup.comapre]\nlevel = 1", "a table for each command", "'comapre'"),
        ("[tool.trueup]\nshow = 3", "a table", "int"),
        ("[tool.trueup\n", "a table", "what cannot be read"),
    ],
)
def test_settings_that_cannot_be_used(runs: Path, trueup: Trueup, text: str, expected: str, got: str) -> None:
    (runs / "pyproject.toml").write_text(text)
    ran = trueup("show", "runs/cpu")
    assert (ran.code, ran.out) == (64, "")
    lines = ran.err.splitlines()
    assert lines[0] == "trueup: Settings of the project cannot be used."
    assert lines[1].endswith(f"in {runs / 'pyproject.toml'}")
    assert lines[2].startswith(f"  expected: {expected}")
    assert lines[3].startswith(f"  got:      {got}")


def test_a_value_of_the_settings_is_checked_as_on_a_command_line(runs: Path, trueup: Trueup) -> None:
    (runs / "pyproject.toml").write_text("[tool.trueup.show]\nlimit = 0")
    ran = trueup("show", "runs/cpu")
    assert (ran.code, "--limit" in ran.err) == (64, True)


def test_every_variable_is_on_the_page() -> None:
    sources = [path.read_text("utf-8") for path in Path(package.__file__).parent.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"[\"'](TRUEUP_[A-Z_]+)[\"']", text)}
    assert named <= set(re.findall(r"`(TRUEUP_[A-Z_]+)`", PAGE))
    assert "TRUEUP_QUIET" in named


def test_only_a_capture_is_overwritten(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("trueup.recording.recorder.launch.run", lambda options, *_: made.append(options["directory"]) or 0)
    (runs / "mine").mkdir()
    (runs / "mine/thesis.tex").touch()
    ran = trueup("capture", "-o", "mine", "--overwrite", "--", "python")
    assert (ran.code, made) == (64, [])
    assert ran.err.splitlines()[:2] == ["trueup: Only a capture is overwritten.", "  where:    mine"]
    assert (runs / "mine/thesis.tex").exists()
    assert trueup("capture", "-o", "runs/cpu", "--overwrite", "--", "python").code == 0
    assert (made, (runs / "runs/cpu").exists()) == (["runs/cpu"], False)


def test_no_page_of_an_earlier_run_stays(runs: Path, trueup: Trueup) -> None:
    """Where the command fails, too; what else is in the folder stays, and without the option the page is replaced at the end."""
    assert trueup("compare", "runs/cpu", "runs/npu", "-o", "report").code == 1
    (runs / "report/mine.txt").touch()
    assert trueup("compare", "runs/cpu", "runs/none", "-o", "report").code == 2
    assert (runs / "report/index.html").exists()
    assert trueup("compare", "runs/cpu", "runs/none", "-o", "report", "--overwrite").code == 2
    assert [one.name for one in (runs / "report").iterdir()] == ["mine.txt"]
    (runs / "site").mkdir()
    (runs / "site/index.html").write_text("mine")
    assert trueup("compare", "runs/cpu", "runs/none", "-o", "site", "--overwrite").code == 2
    assert (runs / "site/index.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("heal runs/cpu -o kept --overwrite -- python", "Only a healing is overwritten."),
        ("capture -o runs --inputs-from runs/cpu --overwrite -- python", "It would remove what it reads."),
        ("invariants runs/cpu --check kept/x.json -o kept/x.json --overwrite", "It would remove what it reads."),
        ("checkpoint repair x.pth -o kept/x.json --overwrite", "Only a file that ends in .safetensors is overwritten."),
    ],
)  # fmt: skip
def test_what_is_no_earlier_run_is_not_overwritten(runs: Path, trueup: Trueup, line: str, said: str) -> None:
    (runs / "kept").mkdir()
    (runs / "kept/x.json").write_text("{}")
    ran = trueup(*line.split())
    assert (ran.code, ran.err.splitlines()[0]) == (64, f"trueup: {said}")
    assert (runs / "kept/x.json").exists()
    assert (runs / "runs/cpu/manifest.json").exists()


def test_documents_of_commands_that_had_none(runs: Path, trueup: Trueup) -> None:
    shown = json.loads(trueup("show", "runs/npu", "--call", "a/aten::neg#0", "--json", "-").out)
    assert [one["op"] for one in shown["calls"]] == ["aten::neg"]
    assert {slot["slot"]: slot["l2"] for slot in shown["calls"][0]["slots"]} == {"input.0": 2.0, "output.0": 4.0}
    none = json.loads(trueup("show", "runs/npu", "--nan", "--json", "-").out)
    assert (none["calls_in_all"], none["calls"]) == (0, [])


def test_an_interrupt_says_how_to_go_on(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trueup.analysis.rerun.replay.run", interrupt)
    ran = trueup("replay", "runs/cpu", "--device", "cpu", "-o", "kept")
    assert ran.code == 130
    assert ran.err.splitlines()[-2:] == ["trueup: interrupted", "  what was executed is in kept: the same command goes on there"]
    assert "nothing was kept: with -o DIR" in trueup("replay", "runs/cpu", "--device", "cpu").err


def test_each_interrupt_says_what_is_left(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trueup.doors.comparing.compare", interrupt)
    ran = trueup("compare", "runs/cpu", "runs/npu", "-o", "report")
    assert (ran.code, (runs / "report").exists()) == (130, False)
    assert ran.err.endswith("nothing was written: a comparison is whole or none, and the same command begins again\n")
    monkeypatch.setattr("trueup.analysis.rerun.reproduce.reproduce", interrupt)
    assert "--overwrite begins again" in trueup("reproduce", "runs/cpu", "0", "-o", "repro").err
    monkeypatch.setattr("trueup.foundation.store.open_capture", interrupt)
    assert trueup("show", "runs/cpu").err == "trueup: interrupted\n  nothing is left of it: the same command begins again\n"


def test_an_interrupted_capture_says_that_it_can_be_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trueup.recording.recorder.launch import tell
    from trueup.recording.recorder.options import CaptureOptions

    assert tell(runs / "runs/cpu", CaptureOptions.of(), 130) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("runs/cpu; the command ended with exit code 130")
    assert said[-1].endswith("runs/cpu holds what was recorded, for trueup show and compare; --overwrite records it anew")


def test_ctrl_c_while_modules_are_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trueup.doors import cli

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "trueup.doors.cli.app":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "trueup.doors.cli.app")
    assert (cli.main(["--help"]), capsys.readouterr().err) == (130, "trueup: interrupted\n")


def test_verbose_shows_where_an_unexpected_error_came_from(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("trueup.foundation.store.open_capture", fail)
    plain, loud = trueup("show", "runs/cpu"), trueup("show", "runs/cpu", "--verbose")
    assert (plain.code, loud.code) == (2, 2)
    assert "Traceback" not in plain.err
    assert "in fail\n" in loud.err
    assert loud.err.endswith(plain.err)


def test_a_map_that_somebody_corrected_stays(runs: Path, trueup: Trueup, monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.analysis.pairing.models import Tree

    monkeypatch.setattr("trueup.analysis.pairing.models.tree_of_capture", lambda path: Tree("torch", {}))
    for _ in range(2):  # the same map again is no other one
        assert "map: map.toml" in trueup("map", "runs/cpu", "runs/npu").out
    corrected = (runs / "map.toml").read_text() + "# by hand\n"
    (runs / "map.toml").write_text(corrected)
    ran = trueup("map", "runs/cpu", "runs/npu")
    assert (ran.code, "There is another map already." in ran.err) == (64, True)
    assert (runs / "map.toml").read_text() == corrected
    trueup("map", "runs/cpu", "runs/npu", "--overwrite")
    assert "by hand" not in (runs / "map.toml").read_text()


def test_a_port_is_written_again_and_nothing_else_is(runs: Path, trueup: Trueup) -> None:
    (runs / "train.py").write_text("import torch\nx = torch.ones(2).cuda()\n")
    (runs / "mine").mkdir()
    (runs / "mine/thesis.tex").touch()
    assert trueup("port", "train.py", "-o", "ported").code == 0
    assert trueup("port", "train.py", "-o", "ported").code != 0
    assert trueup("port", "train.py", "-o", "ported", "--overwrite").code == 0
    assert trueup("port", "train.py", "-o", "mine", "--overwrite").code == 64
    assert (runs / "mine/thesis.tex").exists()
    assert trueup("port", "train.py", "-o", ".", "--overwrite").code == 0  # in place: the source is not taken away
    assert (runs / "train.py").exists()


def test_culprit_of_no_report(runs: Path, trueup: Trueup) -> None:
    for place, got in (("report", "no folder"), ("runs/cpu", "a folder without verdict.json")):
        ran = trueup("reproduce", place, "culprit.1", "-o", "repro")
        assert (ran.code, ran.err.splitlines()[:2]) == (2, [
            "trueup: There is no report that names a culprit.", f"  where:    {place}",
        ])  # fmt: skip
        assert ran.err.splitlines()[3] == f"  got:      {got}"
