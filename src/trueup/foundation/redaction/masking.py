"""The one function that masks secrets, in text, command lines and nested data, and its form for lines of source code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trueup.foundation.redaction.names import is_compound, is_secret
from trueup.foundation.redaction.shapes import SHAPES

MASK = "***"
PLAIN = frozenset({"", "true", "false", "none", "null", MASK})
"""Values that are no secret under any name: switches (``use_auth_token=True``), and what is masked already."""

_NAME = r"(?P<name>-{0,2}[A-Za-z_][\w.-]{0,200})"
_ASSIGNED = re.compile(rf"(?<![\w.-]){_NAME}\\*[\"']?\]?\s{{0,8}}(?:=>|:=|=(?!=\s)|:)\s{{0,8}}")
"""``name=``, ``name: ``, ``"name": ``, ``x["name"] = ``."""
_LISTED = re.compile(rf"(?<=[\"']){_NAME}\\*[\"']\s{{0,8}},\s{{0,8}}(?=\\*[\"'])")
"""``'--name', '`` and ``setdefault("NAME", "``."""
_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]{0,200})[ \t]+(?!--)")
"""``--name ``."""
_LITERAL = re.compile(
    r"""[bBrRfFuU]{0,2}(?:\\+(?P<e>["']).*?(?:\\+(?P=e)|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)|'(?:\\.|[^'\\])*(?:'|\Z))""", re.DOTALL
)
_VALUE = re.compile(
    rf"""{_LITERAL.pattern}(?=[\s,;:)}}\]]|\Z)|(?:"(?:\\.|[^"\\])*(?:"|\Z)|'[^']*(?:'|\Z)|[^\s"'])+""", re.DOTALL
)
"""A literal, or all up to the next space outside quotes: rather too much than a part of a password that holds a comma."""
_QUOTE = re.compile(r"""[bBrRfFuU]{0,2}(\\*["'])""")

_ELEMENT = re.compile(r"(?P<name>[-+]{0,2}[A-Za-z_][\w.-]{0,200})(?P<gap>[=:])(?P<value>.*)", re.DOTALL)
"""``--name=value``, one word of a command line, spaces included."""
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")


def redacted(value: Any, name: str = "") -> Any:
    """Return text, a command line or nested data with its secrets masked; what holds none comes back equal.

    Args:
        value: text; a list or tuple, in which ``--token`` and its value may be two items; a mapping, whose keys are names; anything
            else is returned as it is.
        name: what the value goes by, where its place tells.
    """
    if isinstance(value, str):
        if is_secret(name):
            return value if value.lower() in PLAIN else MASK
        return _in_text(value)
    if isinstance(value, Mapping):
        return {key: redacted(one, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return _in_sequence(value, name)
    return value


def redacted_code(line: str) -> str:
    """Return a line of source code with its secrets masked: literals only, for ``key=key`` names a variable."""
    text = _shapes(line, code=True)
    return _behind(_LISTED, _LITERAL, _behind(_ASSIGNED, _LITERAL, text))


@lru_cache(maxsize=1 << 12)
def conceals(text: str, name: str = "") -> bool:
    """Tell whether `redacted` changes a text that goes by this name."""
    return bool(redacted(text, name) != text)


def _in_sequence(values: list[Any] | tuple[Any, ...], name: str) -> list[Any]:
    """Mask items one by one, and what follows an option that wants a secret: all up to the next option, if its name is a plural."""
    found: list[Any] = []
    wanted = ""
    for value in values:
        if not isinstance(value, str):
            found.append(redacted(value, name))
            wanted = ""
        elif wanted and not value.startswith("--"):
            found.append(MASK)
            wanted = wanted if wanted.endswith("s") else ""
        else:
            found.append(redacted(value, name) if name else _element(value))
            wanted = value if _FLAG.fullmatch(value) and is_secret(value) else ""
    return found


def _element(word: str) -> str:
    """Mask one word of a command line: of ``--name=value`` all that follows, spaces included."""
    match = _ELEMENT.fullmatch(word)
    if match is None or not is_secret(match["name"]) or match["value"].lower() in PLAIN:
        return _in_text(word)
    return f"{match['name']}{match['gap']}{MASK}"


def _in_text(text: str) -> str:
    text = _shapes(text, code=False)
    for head in (_ASSIGNED, _LISTED, _OPTION):
        text = _behind(head, _VALUE, text)
    return text


def _shapes(text: str, *, code: bool) -> str:
    for shape in SHAPES:
        if shape.in_code or not code:
            text = shape.pattern.sub(shape.instead, text)
    return text


def _behind(head: re.Pattern[str], value: re.Pattern[str], text: str) -> str:
    """Mask the value behind each head whose name is a secret's; ``("query", "key", "value")`` is no list of names and values."""
    found: list[str] = []
    end = 0
    for match in head.finditer(text):
        if match.start() < end or not is_secret(match["name"]) or (head is _LISTED and not is_compound(match["name"])):
            continue
        told = value.match(text, match.end())
        if told is None or told[0].strip("\\\"'").lower() in PLAIN:
            continue
        quote = _QUOTE.match(told[0])
        around = quote[1] if quote else ""
        found += [text[end : match.end()], around, MASK, around]
        end = told.end()
    return "".join([*found, text[end:]])
