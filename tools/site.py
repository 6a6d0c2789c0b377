"""What MkDocs builds beside the pages of docs/ (mkdocs.yml names this file as its hook).

    index.md                 README.md
    examples/centernet.md    examples/centernet/README.md; likewise the other examples
    contributing.md, changelog.md
    notebook.md              docs/notebook.ipynb, which lies beside it
    reference/commands.md    every command with its options, from the command line itself
    reference/python.md      every public name of `trueup`, from its docstring
    assets/worker.js         tools/site_worker.js: the search, where the site is opened from disk

Pages link to files of the repository. A link to a page is kept, from where the page is now; the site has no sources, so a link
to one becomes its text and its path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
WORKER = "assets/worker.js"
FOREIGN = re.compile(r'<script src="https://[^"]*iframe-worker[^"]*"></script>')
FENCE = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Return the page of each Markdown file of the repository that is one: path in the repository -> path in the site."""
    found = {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    examples = [path.parent.name for path in ROOT.glob("examples/*/README.md")]
    found |= {f"examples/{name}/README.md": f"examples/{name}.md" for name in examples}
    found["docs/notebook.ipynb"] = "notebook.md"
    return found | {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


PAGES = sources()
HOMES = {page: source for source, page in PAGES.items()}


def moved(text: str, source: str, page: str) -> str:
    """Return a page's text with its links as the site has them."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):  # what is code stays
        parts += [_linked(text[at : fence.start()], source, page), fence[0]]
        at = fence.end()
    return "".join([*parts, _linked(text[at:], source, page)])


def _linked(text: str, source: str, page: str) -> str:
    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        there = os.path.normpath(PurePosixPath(source).parent / path)
        there = f"{there}/README.md" if f"{there}/README.md" in PAGES else there
        if there not in PAGES:
            return label if there in label.replace("`", "") else f"{label} (`{there}`)"
        return f"[{label}]({os.path.relpath(PAGES[there], PurePosixPath(page).parent)}{mark}{anchor})"

    return LINK.sub(link, text)


def notebook() -> str:
    """Return the notebook's cells as a page."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    is_text = [cell["cell_type"] == "markdown" for cell in cells]
    shown = [text if plain else f"```python\n{text}\n```" for text, plain in zip(texts, is_text, strict=True)]
    return "\n\n".join([shown[0], "[Take it along](notebook.ipynb), to run it.", *shown[1:]])


def leaves() -> Iterator[tuple[str, Any, Any]]:
    """Yield the line that names each command, the command, and the group with the example."""
    from typer.main import get_command

    from trueup.doors.cli.app import COMMANDS, app

    root = get_command(app)
    for name in COMMANDS:
        command = root.get_command(None, name)  # type: ignore[attr-defined]
        for inner, leaf in (getattr(command, "commands", None) or {"": command}).items():
            yield f"trueup {name} {inner}".strip(), leaf, command


def commands() -> str:
    """Return the reference of all commands."""
    parts = ["# All commands\n\n`trueup COMMAND --help` says the same. [What holds for all of them](../cli.md).\n"]
    for line, leaf, group in leaves():
        shown = [one for one in leaf.params if not getattr(one, "hidden", False)]
        arguments = [one for one in shown if not one.opts[0].startswith("-")]
        usage = " ".join([line, "[OPTIONS]", *(one.metavar or one.name for one in arguments)])
        parts += [f"## {line}\n", f"```\n{usage}\n```\n", f"{_plain(leaf.help or '')}\n"]
        rows = [_row(one) for one in shown]
        parts += ["| | | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"] if rows else []
        if group.epilog:
            parts += [f"```\n{group.epilog.removeprefix('Example: ')}\n```\n"]
    return "\n".join(parts)


def _row(one: Any) -> str:
    is_option = one.opts[0].startswith("-")
    names = ", ".join(f"`{word}`" for word in [*one.opts, *one.secondary_opts]) if is_option else ""
    takes = "" if getattr(one, "is_flag", False) else one.metavar or "|".join(getattr(one.type, "choices", ()))
    more = ["required"] if one.required else []
    if is_option and one.default not in (None, False, "", ()) and not callable(one.default):
        more.append(f"default: {getattr(one.default, 'value', one.default)}")
    if is_option and one.multiple:
        more.append("may be repeated")
    said = " ".join([_plain(one.help or ""), *([f"*{', '.join(more)}*"] if more else [])])
    return f"| {names} | {_code(takes)} | {said} |"


def _code(text: str) -> str:
    """Return a word as code; a bar would end the cell."""
    return "" if not text else f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _plain(text: str) -> str:
    escaped = " ".join(text.split()).replace("<", "&lt;").replace("|", "&#124;").replace("*", "\\*").replace("_", "\\_")
    return escaped.replace("[", "\\[").replace("]", "\\]")


def python() -> str:
    """Return the reference of all public names."""
    import trueup

    trainers = "trueup.recording.adapters.torch.trainers"  # made when a trainer's library is there: trainers.md has both
    names = [name for name in trueup.__all__ if not name.startswith("_") and trueup._HOMES[name] != trainers]
    homes = [f"::: {trueup._HOMES[name]}.{name}\n" for name in sorted(names, key=lambda name: (name[0].isupper(), name))]
    head = "# Python\n\n`import trueup` costs little, and imports no framework. [Callbacks of trainers](../trainers.md)."
    return "\n\n".join([head, *homes])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text("utf-8") for source, page in PAGES.items() if not source.startswith("docs/")}
    made |= {"notebook.md": notebook(), "reference/commands.md": commands(), "reference/python.md": python()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, WORKER, content=(ROOT / "tools/site_worker.js").read_text("utf-8")))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Have the search work from disk without a network: the theme would load what it takes from a server."""
    up = "../" * page.url.count("/")
    return FOREIGN.sub(f'<script src="{up}{WORKER}"></script>', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """Likewise of the page for what is not there, which stands at the top."""
    return FOREIGN.sub(f'<script src="{WORKER}"></script>', output_content)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set a page's links right."""
    place = page.file.src_uri
    return moved(markdown, HOMES[place], place) if place in HOMES else markdown
