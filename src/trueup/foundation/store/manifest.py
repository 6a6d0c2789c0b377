"""Reading manifests: small JSON objects that anyone may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.store.layout import FORMAT_VERSION, MANIFEST, real_file

SIZE_LIMIT = 16 * 2**20
"""Largest manifest that is read, in bytes."""


def read_object(root: Path, path: Path) -> dict[str, Any]:
    """Read a JSON object of the capture ``root``.

    Raises:
        FileNotFoundError: there is no such file.
        TrueupError: it cannot be read, is too large, is a link, or is no JSON object.
    """
    size = real_file(root, path).stat().st_size
    if size > SIZE_LIMIT:
        raise TrueupError(f"{path} is not read: expected at most {SIZE_LIMIT} bytes, got {size}; is it a manifest?")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise TrueupError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise TrueupError(f"{path} is damaged: expected JSON, got {reason}; restore it or record again") from None
    if not isinstance(content, dict):
        raise TrueupError(f"{path} is damaged: expected a JSON object, got {type(content).__name__}; record again")
    return content


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (_texts, "a list of names"),
    "notes": (_texts, "a list of sentences"),
    **dict.fromkeys(("environment", "seeds", "versions"), (lambda value: isinstance(value, dict), "an object")),
    "imported": (lambda value: isinstance(value, dict) and _texts(value.get("lost", [])), "an object with a list lost"),
}
"""Fields of a rank's manifest that are read later, what their values must be, and that in words."""


def check_rank(content: dict[str, Any]) -> list[str]:
    """Take the fields out that are not what they must be; return a sentence for each."""
    wrong = [name for name, (is_right, _) in FIELDS.items() if name in content and not is_right(content[name])]
    return [
        f"{MANIFEST} has no {name} that can be read: expected {FIELDS[name][1]}, got {type(content.pop(name)).__name__}"
        for name in wrong
    ]


def read_root(root: Path) -> dict[str, Any]:
    """Read a capture's own manifest and check its format.

    Raises:
        TrueupError: missing directory, not a capture, a newer format, or an unreadable manifest.
    """
    path = root / MANIFEST
    try:
        if not root.is_dir():
            found = "a file" if root.exists() else "nothing"
            raise TrueupError(f"{root} is not a capture: expected a directory, got {found}; check the path")
        content = read_object(root, path)
    except FileNotFoundError:
        raise TrueupError(
            f"{root} is not a capture: expected {MANIFEST} in it, got none; give the directory that was passed to -o"
        ) from None
    except OSError as error:
        raise TrueupError(f"{root} cannot be read: {error.strerror}; check its permissions") from None
    version = content.get("format_version")
    if type(version) is not int or version < 1:
        raise TrueupError(
            f"{path} is no manifest of a capture: expected a format_version of at least 1, got {repr(version)[:40]}; "
            "give the directory that was passed to -o"
        )
    if version > FORMAT_VERSION:
        raise TrueupError(
            f"{root} was recorded in a newer format: expected format_version up to {FORMAT_VERSION}, got {version}; "
            "upgrade trueup to read it"
        )
    return content
