"""One script as a tree: what each name in it means, and which bytes are an expression's.

Python's own parser reads it, for the tree's places are the text's: a change is cut out of the bytes, and all else stays as it was
written, comments and blanks included. (LibCST keeps them too, but its names, scopes and places cost 690 lines a second.)
"""

from __future__ import annotations

import ast
import bisect
import io
import itertools
import re
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from trueup.foundation.model import TrueupError

LARGEST = 4 << 20
"""Bytes that a script may have."""
UTF_8 = "utf-8"
BLANK = re.compile(rb"(?:[\s\\]|#[^\r\n]*)*")
Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)
PYTHON_2 = re.compile(rb"^\s*print\s+[\"'\w]|^\s*except \w+, \w+:|\braise \w+, |^\s*exec\s+[\"']", re.MULTILINE)
"""Statements that Python 3 has no more."""


@dataclass(eq=False)
class Scope:
    """What binds names: a module, a class, a function, a comprehension."""

    node: ast.AST
    parent: Scope | None
    bound: set[str] = field(default_factory=set)
    imported: dict[str, str] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)  # global and nonlocal: bound further out

    def owner(self, name: str) -> Scope | None:
        """Return the scope that a name is of, seen from this one; none for a name that nobody binds, as Python's own."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bound and name not in scope.declared and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope
            scope = scope.parent
        return None


class Script:
    """A script that was read. Raises TrueupError if it is no Python that this interpreter reads.

    ``data`` is its text in UTF-8, in which all places count; ``encoding`` is the file's own (PEP 263), line ends are as they were.
    """

    def __init__(self, path: Path, data: bytes, module: str) -> None:
        self.path, self.module = path, module
        self.encoding = encoding_of(data)
        self.data = data if self.encoding == UTF_8 else _recoded(path, data, self.encoding)
        self.tree = _parsed(path, self.data)
        end = re.search(rb"\r\n?|\n", self.data)
        self.newline = end.group().decode() if end else "\n"
        mark = 3 if self.data.startswith(b"\xef\xbb\xbf") else 0  # the tree counts from behind the byte order mark
        self._starts = [mark]
        for line in self.data[mark:].splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.starred = any(one.name == "*" for node in self.tree.body if isinstance(node, ast.ImportFrom) for one in node.names)
        """Whether names come from a module that are not written down: torch is such a one, where nothing here binds it."""
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.opened: dict[ast.AST, Scope] = {self.tree: Scope(self.tree, None)}
        self._walk()
        self.misplaced = self._misplaced()
        """Nodes inside of formatted texts whose places are not the text's (Python before 3.12)."""

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the bytes of an expression or a statement, from and to."""
        first, column, last, end = (getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"))
        return self._starts[first - 1] + column, self._starts[last - 1] + end

    def text(self, node: ast.AST) -> str:
        """Return what is written there."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def line_start(self, line: int) -> int:
        """Return the byte where a line begins; lines count from 1. Behind the last one it is the end."""
        return self._starts[min(line, len(self._starts)) - 1]

    def line_at(self, place: int) -> int:
        """Return the line that a byte is of."""
        return max(1, bisect.bisect_right(self._starts, place))

    @property
    def lines(self) -> list[str]:
        """Return the lines as Python counts them, each with its end."""
        return [self.data[start:end].decode() for start, end in itertools.pairwise(self._starts)]

    def encoded(self, text: bytes) -> bytes:
        """Return a part of the text as the file has it. Raises UnicodeEncodeError where its encoding lacks a character."""
        return text if self.encoding == UTF_8 else text.decode().encode(self.encoding)

    def arguments(self, call: ast.Call) -> list[tuple[int, int]]:
        """Return the bytes of each argument of a call as they stand there, with brackets that are around it alone."""
        at, spans = self.opening(call), []
        nodes = [*call.args, *call.keywords]
        for one in sorted(nodes, key=lambda node: self.span(node)):
            start = self._skip(at)
            end = self.span(one)[1]
            depth = self.data[start : self.span(one)[0]].count(b"(")
            for _ in range(depth if self.data[start : start + 1] == b"(" else 0):
                end = self._skip(end) + 1
            spans.append((start, end))
            at = self._skip(end) + 1
        return spans

    def opening(self, call: ast.Call) -> int:
        """Return the byte behind a call's opening bracket."""
        end = self.span(call.func)[1]
        while self.data[(end := self._skip(end)) : end + 1] != b"(":
            end += 1
        return end + 1

    def behind_arguments(self, call: ast.Call) -> int:
        """Return the byte behind a call's last argument; behind the opening bracket where it has none."""
        return max((end for _, end in self.arguments(call)), default=self.opening(call))

    def _skip(self, place: int) -> int:
        """Return the next byte that is no blank, no line end and of no comment."""
        found = BLANK.match(self.data, place)
        return place if found is None else found.end()

    def qualified(self, node: ast.AST) -> str | None:
        """Return the full name of what a chain of names means, through the imports; None if it begins with no import.

        What comes from a module of the same project begins with that module's name.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        owner = self.scopes[node].owner(node.id)
        if owner is None:
            return ".".join(["torch", *reversed(parts)]) if node.id == "torch" and self.starred else None
        first = owner.imported.get(node.id)
        return None if first is None else ".".join([first, *reversed(parts)])

    def imports(self, node: ast.AST) -> list[str]:
        """Return the full names that a statement imports; all of a module's as its name with ``.*``."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        return [f"{self._absolute(node)}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []

    def called(self, module: str) -> str | None:
        """Return the name under which the script has a module that it imports as another alone; None if under its own."""
        aliases = [one for node in self.tree.body if isinstance(node, ast.Import) for one in node.names if one.name == module]
        return None if any(one.asname is None for one in aliases) else next((one.asname for one in aliases), None)

    def within(self, node: ast.AST, kinds: type[ast.AST] | tuple[type[ast.AST], ...]) -> ast.AST | None:
        """Return the innermost node of some kinds around a node."""
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            if isinstance(node, kinds):
                return node
        return None

    def is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        """Return whether a node is a part of another."""
        above: ast.AST | None = node
        while above is not None and above is not outer:
            above = self.parents.get(above)
        return above is outer

    def block(self, statement: ast.AST) -> list[ast.AST]:
        """Return the statements among which one stands, itself included."""
        for _, value in ast.iter_fields(self.parents[statement]):
            if isinstance(value, list) and any(one is statement for one in value):
                return value
        return [statement]

    def _misplaced(self) -> set[ast.AST]:
        found: set[ast.AST] = set()
        for node in self.scopes:
            if isinstance(node, ast.FormattedValue):
                try:
                    there = ast.dump(ast.parse(self.text(node.value).strip(), mode="eval").body)
                except (SyntaxError, ValueError):
                    there = ""
                if there != ast.dump(node.value):
                    found.update(ast.walk(node.value))
        return found

    def _walk(self) -> None:
        """Note each node's parent and scope, and what each scope binds."""
        todo: list[tuple[ast.AST, Scope]] = [(self.tree, self.opened[self.tree])]
        while todo:
            node, scope = todo.pop()
            self.scopes[node] = scope
            self._bind(node, scope)
            inner, outside = scope, _outside(node)
            if isinstance(node, SCOPES):
                inner = self.opened[node] = Scope(node, scope)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                todo.append((child, scope if child in outside else inner))
        self._aliases()

    def _aliases(self) -> None:
        """``use = torch.cuda``: a variable that is bound once, and to a name that was imported, is that name."""
        names = [(node, scope) for node, scope in self.scopes.items() if isinstance(node, ast.Name)]
        stored = Counter((scope.node, node.id) for node, scope in names if not isinstance(node.ctx, ast.Load))
        for node, scope in self.scopes.items():
            if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.value, ast.Attribute):
                continue
            to, qualified = node.targets[0], self.qualified(node.value)
            if not isinstance(to, ast.Name) or qualified is None or not qualified.startswith("torch."):
                continue
            if stored[scope.node, to.id] == 1 and to.id not in scope.declared:
                scope.imported.setdefault(to.id, qualified)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            scope.bound.add(node.id)
        elif isinstance(node, ast.arg):
            scope.bound.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bound.add(node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.declared.update(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                scope.bound.add(local)
                scope.imported[local] = alias.name if alias.asname or isinstance(node, ast.ImportFrom) else local
                if isinstance(node, ast.ImportFrom):
                    scope.imported[local] = f"{self._absolute(node)}.{alias.name}"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])


def read(path: Path, module: str) -> Script:
    """Read a script, whose name as a module is given. Raises TrueupError with the line if it cannot be read."""
    try:
        with path.open("rb") as opened:
            data = opened.read(LARGEST + 1)
    except OSError as error:
        raise TrueupError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise TrueupError(f"{path} has more than {LARGEST >> 20} MB: is it a script?")
    return Script(path, data, module)


def encoding_of(data: bytes) -> str:
    """Return the encoding that a script says it has (PEP 263); UTF-8 where it says none that Python knows."""
    lines = re.split(rb"\r\n?|\n", data, maxsplit=2)[:2]
    try:
        found, _ = tokenize.detect_encoding(io.BytesIO(b"\n".join(lines)).readline)
        return UTF_8 if found in (UTF_8, "utf-8-sig") else found
    except SyntaxError:
        return UTF_8


def _recoded(path: Path, data: bytes, encoding: str) -> bytes:
    """Return a text in UTF-8; raises TrueupError where it would not become the same bytes again."""
    try:
        text = data.decode(encoding)
        parts = b"".join(line.encode(encoding) for line in re.split(r"(?<=\n)", text))
    except UnicodeError:
        parts = b""
    if parts != data:
        raise TrueupError(f"{path} says it is {encoding}, and its bytes are not: save it as UTF-8 first")
    return text.encode()


def _parsed(path: Path, data: bytes) -> ast.Module:
    try:
        return ast.parse(data.decode("utf-8-sig"), str(path))  # of a text, what it says of its encoding is not asked
    except UnicodeDecodeError as error:
        raise TrueupError(f"{path} is no UTF-8 (byte {error.start}): save it as UTF-8 first") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if PYTHON_2.search(data):
            raise TrueupError(f"{path} is Python 2: convert it to Python 3 first") from None
        line = f", line {error.lineno}," if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else "it is nested too deep, or holds a null byte"
        raise TrueupError(f"{path}{line} cannot be read as Python: {why}") from None


def _outside(node: ast.AST) -> set[ast.AST]:
    """Return the parts of a function or class that are read in the scope around it: decorators, defaults, bases."""
    if isinstance(node, FUNCTIONS):
        defaults = [*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
        return {*getattr(node, "decorator_list", ()), *defaults}
    if isinstance(node, ast.ClassDef):
        return {*node.decorator_list, *node.bases, *node.keywords}
    return set()


def behind_imports(script: Script) -> int:
    """Return the byte where an import more belongs: behind that of torch, else behind the others, else behind the docstring."""
    body = script.tree.body
    top = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    whole = [node for node in top if isinstance(node, ast.Import) and any(one.name == "torch" for one in node.names)]
    parts = [node for node in top if "torch" in roots(node)]
    docstring = [node for node in body[:1] if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    behind = next(iter([*whole[-1:], *parts[:1], *top[-1:], *docstring]), None)
    if behind is not None and any(one.lineno == behind.end_lineno and one is not behind for one in body):
        return script.line_start(behind.lineno)  # import torch; torch.ones(2)
    return script.line_start(1 if behind is None else (behind.end_lineno or 0) + 1)


def roots(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the first names of what a statement imports from."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return {name.partition(".")[0] for name in names}
