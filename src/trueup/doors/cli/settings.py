"""``[tool.trueup]`` of a project: what its commands are given unless a command line says otherwise.

    [tool.trueup.compare]           # in pyproject.toml, of this folder or the next one above that has it
    criterion = "criteria.toml"     # --criterion criteria.toml
    map = "map.toml"
    level = ["module", "api"]       # an option that may be repeated

    [tool.trueup.capture]
    steps = "0:3"
    stop = true
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trueup.foundation.model import UsageError

TABLE = "tool.trueup"


def defaults(command: Any, name: str) -> dict[str, Any]:
    """Return what a project gives a command, by parameter; raises UsageError where its table is none, or names no option."""
    found = _file()
    if found is None:
        return {}
    file, data = found
    table = _table(file, data, name)
    return _of(command, table, f"{TABLE}.{name}", file)


def _file() -> tuple[Path, bytes] | None:
    """Return the nearest pyproject.toml and what it holds, None where it has no table of ours."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            data = file.read_bytes()
            return (file, data) if f"[{TABLE}".encode() in data else None
    return None


def _table(file: Path, data: bytes, name: str) -> dict[str, Any]:
    from trueup.doors.cli.app import COMMANDS
    from trueup.foundation.toml import parsed

    try:
        held = parsed(data.decode("utf-8"))["tool"]["trueup"]
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(file, TABLE, "a table", f"what cannot be read: {error}") from None
    if not isinstance(held, dict):
        raise _refused(file, TABLE, "a table", type(held).__name__)
    if unknown := next((key for key in held if key not in COMMANDS), None):
        raise _refused(file, TABLE, "a table for each command, as [tool.trueup.compare]", repr(unknown))
    found = held.get(name, {})
    if not isinstance(found, dict):
        raise _refused(file, f"{TABLE}.{name}", "a table", type(found).__name__)
    return found


def _of(command: Any, table: dict[str, Any], where: str, file: Path) -> dict[str, Any]:
    inner = getattr(command, "commands", {})
    options = {word.removeprefix("--"): one for one in command.params for word in one.opts if word.startswith("--")}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in inner and isinstance(value, dict):
            found[key] = _of(inner[key], value, f"{where}.{key}", file)
        elif key not in options:
            known = ", ".join(sorted([*options, *inner]))
            raise _refused(file, where, f"options of the command: {known}", repr(key))
        else:
            found[options[key].name] = _value(options[key], value, f"{where}.{key}", file)
    return found


def _value(option: Any, value: Any, where: str, file: Path) -> Any:
    several = option.multiple or option.nargs != 1
    flag = bool(getattr(option, "is_flag", False))
    listed = value if isinstance(value, list) else [value]
    scalar = all(isinstance(one, (str, int, float)) and (flag or not isinstance(one, bool)) for one in listed)
    if not scalar or (flag and not isinstance(value, bool)) or (isinstance(value, list) and not several):
        expected = "true or false" if flag else "a list of texts or numbers" if several else "a text or a number"
        raise _refused(file, where, expected, repr(value)[:80])
    words = [str(one) for one in listed]
    return value if flag else words if several else words[0]


def _refused(file: Path, where: str, expected: str, got: str) -> UsageError:
    return UsageError(
        f"Settings of the project cannot be used.\n  where:    {where} in {file}\n  expected: {expected}\n  got:      {got}\n"
        "  next:     correct it, or leave it out"
    )
