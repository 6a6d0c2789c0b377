"""What starting costs: no framework, and nothing heavy."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from test_documentation import ROOT
from trueup.doors.cli import loading
from trueup.doors.cli.app import COMMANDS
from verdict.captures import Recording

FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax")
HEAVY = (*FRAMEWORKS, "numpy", "pyarrow", "pandas", "bokeh", "duckdb", "jinja2")


def imported(code: str) -> set[str]:
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in ran.stderr.split()}


def test_import_trueup() -> None:
    assert imported("import trueup") - imported("pass") == {"trueup", "__future__", "importlib", "warnings"}


HELP = "sys.argv[1:] = ['--help']; from trueup.doors.cli import main; main()"


def test_help_imports_nothing_heavy() -> None:
    assert not imported(HELP) & set(HEAVY)


def test_what_a_small_image_takes_out_of_arrow_is_never_missed(tmp_path: Path) -> None:
    """Its command is executed over a copy; a comparison then reads, judges and writes."""
    import pyarrow

    lines = (ROOT / "docs/install.md").read_text("utf-8").splitlines()
    (remove,) = [line[2:] for line in lines if line.startswith("$ rm -rf include")]
    arrow = Path(shutil.copytree(Path(pyarrow.__file__).parent, tmp_path / "pyarrow", copy_function=linked))
    before = sum(file.stat().st_size for file in arrow.rglob("*"))
    subprocess.run(["sh", "-c", remove], cwd=arrow, check=True)
    assert before - sum(file.stat().st_size for file in arrow.rglob("*")) > 50e6
    run = Recording()
    run.call("aten::neg", [np.ones(4)], [-np.ones(4)])
    run.write(tmp_path / "run")
    code = "import pyarrow, sys; from trueup.doors.cli import main; print(pyarrow.__file__); sys.exit(main(sys.argv[1:]))"
    words = ["compare", "run", "run", "-o", "report", "--csv", "rows.csv"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"{arrow / '__init__.py'}\nALIGNED")


def linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # the temporary folder is on another disk
        shutil.copy2(source, target)
    return target


@pytest.mark.parametrize(
    "module", ["trueup.doors.report", "trueup.foundation.words.sentence", "trueup.doors.report.terminal", "trueup.doors.cli.app"]
)
def test_text_needs_no_numbers(module: str) -> None:
    assert not imported(f"import {module}") & set(HEAVY)


ARMED = {"sitecustomize", "trueup", "trueup.recording.arming"}


def loaded(**more: str) -> set[str]:
    """Modules of an interpreter that does nothing."""
    ran = subprocess.run(
        [sys.executable, "-c", "import sys; print('\\n'.join(sys.modules))"], check=True, capture_output=True, text=True,
        env={**os.environ, **more},
    )  # fmt: skip
    return set(ran.stdout.split())


def test_an_armed_process_loads_next_to_nothing() -> None:
    """Every Python of the command pays for it, launchers and data workers too."""
    import trueup
    from trueup.recording.arming import SITE, VARIABLE

    order = '{"directory": "", "options": "{}", "root": {}}'
    path = os.pathsep.join([SITE, str(Path(trueup.__file__).parents[1])])
    more = loaded(**{VARIABLE: order, "PYTHONPATH": path}) - loaded()
    assert more >= ARMED
    assert not more & {"typing", "pathlib", "importlib.abc", "json", "tempfile", "subprocess", "dataclasses"}


def test_capture_loads_nothing_heavy_before_the_command_runs() -> None:
    run = "sys.argv[1:] = ['capture', '-o', '/nowhere/c', '--', 'no-such-program']; from trueup.doors.cli import main; main()"
    found = imported(run)
    assert "trueup" in found
    assert not found & set(HEAVY)
    if tuple(map(int, version("typer").split(".")[:2])) < (0, 29):  # from then on typer reads values with pydantic: 80 ms
        assert "pydantic" not in found


def modules(*words: str) -> set[str]:
    """Modules of the folder of commands that a command line loads."""
    code = f"sys.argv[1:] = {list(words)}; from trueup.doors.cli import main; main()"
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return {name.removeprefix("trueup.doors.cli.") for name in ran.stderr.split() if name.startswith("trueup.doors.cli.")}


PLACES = {place for place, _, _ in COMMANDS.values()}


def test_a_list_of_the_commands_loads_none() -> None:
    for words in (["--help"], ["monitors"]):
        assert not modules(*words) & PLACES


def test_help_draws_without_markdown_and_leaves_it_to_others() -> None:
    code = f"{HELP}\nfinally: print('rich.markdown' in sys.modules); import rich.markdown; rich.markdown.Markdown('a').parsed"
    ran = subprocess.run([sys.executable, "-c", f"import sys\ntry: {code}"], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", ["compare", "import", "simdev"])
def test_a_command_loads_no_other(name: str) -> None:
    assert modules(name, "--help") & PLACES == {COMMANDS[name][0]}


def test_a_name_that_is_nearly_a_command_is_put_right() -> None:
    ran = subprocess.run([sys.executable, "-m", "trueup", "monitors"], capture_output=True, text=True)
    assert ran.returncode == 64
    assert ran.stderr == "trueup: No such command 'monitors'. Did you mean 'monitor'?\n  next:     trueup --help\n"


def test_loading_keeps_the_collector_away_and_leaves_it_as_it_was() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(ImportError), loading():
                assert not gc.isenabled()
                raise ImportError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
            gc.unfreeze()
