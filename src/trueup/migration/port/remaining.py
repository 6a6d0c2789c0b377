"""`remaining`: the lines of a script that have the letters (cuda, nccl, apex) and stay, each with the reason."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trueup.migration.port.flow import SHAPES, Project, literal
from trueup.migration.port.kernels import NEXT, Kernels
from trueup.migration.port.reading import FUNCTIONS, Script

LETTERS = re.compile(r"cuda|nccl|\Aapex\Z|\Aamp_C\Z|\Acpp_extension\Z", re.IGNORECASE)
FSTRING = tuple(getattr(tokenize, name) for name in ("FSTRING_START", "FSTRING_MIDDLE") if hasattr(tokenize, name))


@dataclass(frozen=True)
class Left:
    """A line that has the letters and stays. ``look``: somebody has to look at it, for it will not do on the device."""

    line: int
    text: str
    reason: str
    look: bool = False


def remaining(
    project: Project,
    script: Script,
    changed: Collection[tuple[int, int]],
    reasons: Mapping[int, tuple[str, bool]],
    kernels: Kernels | None,
) -> list[Left]:
    """Return what stays of a script; ``changed`` are the bytes that changes replace, ``reasons`` is by the byte where it holds."""
    spans = [(start, end) for start, end in changed if end > start]
    docstrings = {node.body[0].value.lineno for node in script.scopes if _has_docstring(node)}  # type: ignore[attr-defined]
    lines = script.lines
    ends = iter([line.rstrip("\r\n") + "\n" for line in lines])
    left: list[Left] = []
    for token in tokenize.generate_tokens(lambda: next(ends, "")):
        if token.type not in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT, *FSTRING) or not LETTERS.search(token.string):
            continue
        row, column = token.start
        at = script.line_start(row) + len(lines[row - 1][:column].encode())
        end = at + len(token.string.encode())
        if any(start < end and at < stop for start, stop in spans):
            continue
        reason, look = _reason(script, token, at, docstrings, reasons)
        shown = lines[row - 1].strip() if token.type != tokenize.COMMENT else token.string
        found = Left(row, shown[:200], reason, look)
        if not left or left[-1] != found:
            left.append(found)
    for node in script.scopes if script not in project.spread else ():  # else they become processes
        named = script.qualified(node.func) if isinstance(node, ast.Call) else None
        stays = project.rules.stays.get(named or "")
        if stays is None or LETTERS.search(named or ""):
            continue
        if not any(start <= script.span(node)[0] < stop for start, stop in spans):
            left.append(Left(node.lineno, script.text(node)[:200], stays.reason, stays.unsupported))  # type: ignore[attr-defined]
    for node, place, goes_on in kernels.needs(script) if kernels is not None else ():
        why = f"kernels in CUDA, {place}: " + ("the script goes on without them" if goes_on else NEXT)
        line: int = node.lineno  # type: ignore[attr-defined]
        left.append(Left(line, lines[line - 1].strip()[:200], why, not goes_on))
    return left


def _reason(
    script: Script, token: tokenize.TokenInfo, at: int, docstrings: set[int], reasons: Mapping[int, tuple[str, bool]]
) -> tuple[str, bool]:
    if token.type == tokenize.COMMENT:
        return "a comment", False
    if at in reasons:
        return reasons[at]
    row = token.start[0]
    before = [start for start in reasons if script.line_start(row) <= start <= at]
    if token.type == tokenize.NAME:
        if before and script.line_at(max(before)) == row:
            return reasons[max(before)]
        return "a name, and no value of a device", False
    if row in docstrings:
        return "a docstring", False
    if any(shape.fullmatch(literal(token.string)) for shape in SHAPES.values()):
        return "reads as a device, but nothing shows that it reaches one", True
    return "a text that reaches nothing which takes a device", False


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS[:2])) and ast.get_docstring(node, clean=False) is not None
