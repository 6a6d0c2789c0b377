"""Files in TOML: those that come along, and those that somebody wrote, read into structs that say what they may hold."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from trueup.foundation.model import TrueupError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1 << 20  # bytes that a file may have that somebody wrote

Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]  # a finite number above 0
T = TypeVar("T")


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """What a table may hold; its ``__post_init__`` raises ValueError where values do not fit together."""


def packaged(package: str, *path: str) -> dict[str, Any]:
    """Read a file that comes along with a package."""
    return tomllib.loads(text_along(package, *path))


def text_along(package: str, *path: str) -> str:
    """Return the text of a file that comes along with a package."""
    return resources.files(package).joinpath(*path).read_text("utf-8")


def read(file: Path, what: str, see: str) -> dict[str, Any]:
    """Read a file that somebody wrote: a map file, a criterion file. Raises TrueupError if it cannot be read, or is no TOML."""
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise ValueError(f"it has {size} bytes, expected at most {LARGEST}; is it the right file?")
        return parsed(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise TrueupError(f"{what} {file} cannot be read: {error}; {see}") from None


def parsed(text: str) -> dict[str, Any]:
    """Read the text of a file that somebody wrote; raises ValueError if it is no TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too much nesting") from None


def text_of(file: Path, expected: str, next_step: str, most: int = LARGEST) -> str:
    """Read a small text file that somebody wrote. Raises TrueupError if it cannot be read, is too large, or is no UTF-8."""
    try:
        with file.open("rb") as opened:
            data = opened.read(most + 1)
        if len(data) <= most:
            return data.decode("utf-8")
        why = f"more than {most >> 20} MB"
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise TrueupError(f"{file} cannot be read.\n  expected: {expected}\n  got:      {why}\n  next:     {next_step}")


def checked(content: Any, kind: type[T], at: str = "") -> T:
    """Return content that `read` returned, or a part of it at the place ``at`` (``step 2: ``), as the ``kind`` that it must be: a
    `Table`, or any other type that msgspec converts to (a ``re.Pattern`` is written as text). Else raises ValueError, which names
    the place; tables count from 1."""
    try:
        return msgspec.convert(content, kind, dec_hook=_pattern)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at ")
        steps = STEP.findall(path)
        places = [f"{name} {int(number) + 1}: " if number.isdigit() else f"{name}." for name, number in steps]
        place = (at + "".join(places)).rstrip(".: ")
        said = _in_words(said, _type(kind, steps, of_a_key=path.startswith("`key`")), steps[-1][0] if steps else "")
        raise ValueError(place + said if place else said.removeprefix(":").strip()) from None


def _pattern(_: type, text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from None


STEP = re.compile(r"\.(\w+)(?:\[(\d+|\.\.\.)\])?")
"""A step of a path of msgspec's: ``.row[2]``, or ``.limits[...]`` for the values of a table."""
WORDS = {
    "float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false", "array": "a list", "object": "a table",
}  # fmt: skip


TABLES = (msgspec.inspect.StructType, msgspec.inspect.DictType)


def _in_words(said: str, info: Any, key: str) -> str:
    """Return what msgspec says, in our words, and with what was expected where it does not say that."""
    values = sorted(map(str, getattr(info, "values", ())))
    known = ", ".join([field.name for field in getattr(info, "fields", ())] or values)
    missing = re.fullmatch("Object missing required field `(.+)`", said)
    if missing is not None:
        return f": {missing[1]} is missing"
    unknown = re.fullmatch("Object contains unknown field `(.+)`", said)
    if unknown is not None:
        return f": {unknown[1]!r} is unknown: expected {known}"
    if said.startswith("Invalid enum value "):
        return f" {said.removeprefix('Invalid enum value ')} is unknown: expected {known}"
    if isinstance(info, msgspec.inspect.VarTupleType) and isinstance(info.item_type, TABLES):
        return f": expected tables, each headed [[{key}]]"
    said = re.sub(r"`([a-z]+)(?: \| null)?`", lambda found: WORDS.get(found[1], found[1]), said)
    return f": {said[0].lower()}{said[1:]}"


def _type(kind: Any, steps: list[tuple[str, str]], *, of_a_key: bool) -> Any:
    """Return the type of what stands at a path into a type."""
    info: Any = msgspec.inspect.type_info(kind)
    for name, number in steps:
        info = next(field.type for field in _plain(info).fields if field.name == name)
        inside = _plain(info)
        info = inside.item_type if number.isdigit() else inside.value_type if number else inside
    info = _plain(info)
    return _plain(info.key_type) if of_a_key else info


def _plain(info: Any) -> Any:
    """Return what may be there of what may be there or not."""
    return next((one for one in getattr(info, "types", ()) if not isinstance(one, msgspec.inspect.NoneType)), info)
