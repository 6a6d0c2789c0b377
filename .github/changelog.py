"""Print the changelog's section of a tag (``v0.2.0``), once all places that name the version agree with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "src/trueup/foundation/version.py": r'^VERSION = "(.+)"',
    "pyproject.toml": r'^version = "(.+)"',
    "compat-packages/pyproject.toml": r'^version = "(.+)"',
}


def section(version: str) -> str:
    """Return the text below ``## VERSION``, or ``## [VERSION] - DATE``.

    Raises:
        ValueError: a place names another version, or the changelog has no such section.
    """
    for place, pattern in PLACES.items():
        found = re.search(pattern, (ROOT / place).read_text("utf-8"), re.MULTILINE)
        if found is None or found[1] != version:
            raise ValueError(f"{place} names version {found[1] if found else 'none'}, expected {version}")
    for part in re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if re.match(rf"\[?{re.escape(version)}\]?(\s|$)", head) and body.strip():
            return body.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section '## {version}' with text in it: rename '## Unreleased'")


if __name__ == "__main__":
    try:
        print(section(sys.argv[1].removeprefix("v")), end="")
    except (IndexError, ValueError) as error:
        sys.exit(f"changelog.py: {error}")
