"""The pages as a site: each is in its contents, links go where they went, and every command that is written there can be given."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trueup.doors.cli.app import COMMANDS, app

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "tools/site.py")
assert _spec is not None
assert _spec.loader is not None
site: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = site
_spec.loader.exec_module(site)

PAGES = sorted(path for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "README.md"])


def written(page: Path) -> Iterator[str]:
    """Yield each command line of a page's consoles: continued lines joined, comments and what follows a pipe left out."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```(?:console|sh|bash|shell)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*trueup .*)$", block, re.MULTILINE):
            yield re.sub(r"^(?:[A-Z_]+=\S+ )*", "", line)


def words(line: str) -> list[str]:
    read = shlex.split(re.sub(r"\s#.*", "", line))  # a # inside a word is no comment
    ends = [k for k, word in enumerate(read) if word in ("|", "&&", ";", "||", "&") or re.match(r"\d?[<>]", word)]
    return read[1 : min(ends, default=len(read))]


def refused(line: str) -> str:
    """Return why the command line refuses a line; empty where it reads it."""
    root: Any = get_command(app)
    name, *rest = words(line)
    command = root.get_command(None, name) if name in COMMANDS else root if name.startswith("-") else None
    try:
        if command is root:
            return ""
        assert command is not None, "no such command"
        with command.make_context(name, list(rest)) as context:
            if hasattr(command, "commands"):
                command.commands[rest[0]].make_context(rest[0], rest[1:], parent=context).close()
    except Exception as error:  # noqa: BLE001 - typer's own, and ours
        return f"{type(error).__name__}: {getattr(error, 'message', None) or error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_on_a_page_can_be_given(page: Path) -> None:
    """Each is read as the command line reads it: a command, an option or a word too many that is not there is refused."""
    assert [f"{line}: {why}" for line in written(page) if (why := refused(line))] == []


def test_commands_in_the_text_can_be_given() -> None:
    """Those between backticks, too; many name a command, or an option, and say no more."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for line in {" ".join(span.split()) for span in re.findall(r"`(trueup [^`]+)`", text)}:
            named = len(words(line)) == 1 or words(line)[0] == "COMMAND"
            why = "" if named and words(line)[0] in {*COMMANDS, "COMMAND"} else refused(line)
            if why and not why.startswith(("MissingParameter", "BadOptionUsage")):
                wrong.append(f"{page.name}: {line}: {why}")
    assert wrong == []


def test_all_commands_are_shown_somewhere() -> None:
    shown = {words(line)[0] for page in PAGES for line in written(page)}
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert [name for name in COMMANDS if name not in shown and f"trueup {name}" not in text] == []


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:\n")[2]
    named = re.findall(r": (\S+)$", contents, re.MULTILINE)
    pages = [page for source, page in site.PAGES.items() if not source.startswith("docs/decisions/")]
    assert sorted(named) == sorted([*pages, "decisions/", "reference/commands.md", "reference/python.md"])


@pytest.mark.parametrize(
    ("source", "text", "there"),
    [
        ("README.md", "[how](docs/ci.md#goldens)", "[how](ci.md#goldens)"),
        ("docs/ci.md", "[the story](../examples/centernet/README.md)", "[the story](examples/centernet.md)"),
        ("examples/centernet/README.md", "[limits](../../docs/limits.md)", "[limits](../limits.md)"),
        ("docs/decisions/README.md", "[format](../format.md) [one](0002-parquet-and-safetensors.md)", None),
        ("docs/ci.md", "[action.yml](../action.yml)", "action.yml"),
        ("docs/tour.md", "[judge](../src/trueup/comparison/verdict/judge.py)", "judge (`src/trueup/comparison/verdict/judge.py`)"),
        ("docs/ci.md", "[pytest](https://docs.pytest.org) [here](#goldens)", None),
        ("README.md", "```\n[a](docs/ci.md)\n```\n[a](docs/decisions)", "```\n[a](docs/ci.md)\n```\n[a](decisions/README.md)"),
    ],
)
def test_links_go_where_they_went(source: str, text: str, there: str | None) -> None:
    assert site.moved(text, source, site.PAGES[source]) == (text if there is None else there)


def test_the_reference_has_every_command_and_every_name() -> None:
    import trueup

    made = site.commands()
    assert re.findall(r"^## trueup (\S+)", made, re.MULTILINE)[0] == "capture"
    assert set(re.findall(r"^## trueup (\S+)", made, re.MULTILINE)) == set(COMMANDS)
    assert "| `--steps` | `STEPS` | 0:3 (steps 0, 1, 2), 5: or 0,2,5; else all. |" in made
    assert "default: stats" in made
    names = set(re.findall(r"^::: [\w.]+\.(\w+)$", site.python(), re.MULTILINE))
    assert names == {name for name in trueup.__all__ if not name.startswith("_")} - {"LightningCallback", "TrainerCallback"}
