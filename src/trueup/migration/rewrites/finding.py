"""Rewrites of the catalogue in a script: found by form, at lines that ran, and the patch that makes them.

Successive assignments of which each reads the one before are one expression, if nobody else reads what lies between:

    x = x.view(n, groups, c // groups, h, w)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(n, -1, h, w)

Expressions of Python in one form, and whether one has the form of another.

In a pattern a name in capitals stands for any expression, the same one wherever it stands again; ``*S`` for arguments, ``**K``
for none or a ``dtype=``. ``torch.f(x, ...)`` and ``x.f(...)``, ``reshape``, ``view`` and ``contiguous().view``,
``permute(0, 2, 1, ...)``, ``swapaxes(1, 2)`` and ``transpose(1, 2)``, ``x ** 2`` and ``x.pow(2)``, ``x.mul(y)`` and ``x * y``,
``dim=`` and its place, ``.values`` and ``[0]`` are one form; so are the terms of a sum and the factors of a product in any order,
and a number and what is computed of numbers.
"""

from __future__ import annotations

import ast
import copy
import io
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trueup.foundation.words.wording import unified_diff
from trueup.migration.rewrites.catalogue import Kind, Rewrite, asked_of, catalogue, note_masks


@dataclass(frozen=True)
class Found:
    """A rewrite at lines ``first`` to ``last`` of a file: its row, the lines as they are, and what takes their place."""

    file: str
    first: int
    last: int
    row: Rewrite
    before: str
    after: str


def find(file: Path, text: str, ran: Collection[int]) -> list[Found]:
    """Return the rewrites in a script's text, with its own line ends; ``ran`` are its lines at which operators of PyTorch ran. A
    form is offered where one of its lines did, or where it names a function that the script imports: what looks like it in NumPy
    is not."""
    if re.search(r"\r(?!\n)", text):
        return []  # a patch has no such lines
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    aliases = _aliases(tree)
    torch = next((name for name, whole in aliases.items() if whole == "torch"), None)
    if torch is None:
        return []
    lines = io.StringIO(text).readlines()
    found: list[Found] = []
    note_masks(tree)
    for statements in _blocks(tree):
        for chain in _chains(statements, tree):
            found += _at(file, lines, chain, aliases, torch, ran)
    unique: dict[int, Found] = {}
    for one in sorted(found, key=lambda each: (_rank(each.row), each.last - each.first, each.first)):
        if not any(other.first <= one.last and one.first <= other.last for other in unique.values()):
            unique[one.first] = one
    return sorted(unique.values(), key=lambda each: each.first)


def patch(found: Sequence[Found], texts: Mapping[str, str]) -> str:
    """Return a unified diff that makes rewrites, of files whose text stands in ``texts``; what would not be Python is left out."""
    made = ""
    for file, text in texts.items():
        lines = io.StringIO(text).readlines()
        new = list(lines)
        for one in sorted((each for each in found if each.file == file), key=lambda each: -each.first):
            new[one.first - 1 : one.last] = [one.after]
        try:
            ast.parse("".join(new))
        except SyntaxError:
            continue
        made += unified_diff(lines, new, file)
    return made


def _rank(row: Rewrite) -> int:
    """Return the place of a row; a form that says more comes first."""
    return -len(row.before)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a script imports mean."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
                          for one in node.names})  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names if one.name != "*"})
    return found


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            held = getattr(node, name, None)
            if isinstance(held, list) and held and isinstance(held[0], ast.stmt):
                yield held


def _chains(statements: list[ast.stmt], tree: ast.Module) -> Iterator[tuple[list[ast.stmt], Any]]:
    """Give each statement with its expression, and each run of assignments that is one expression, longest first."""
    for last, statement in enumerate(statements):
        value = _value(statement)
        if value is None:
            if isinstance(statement, ast.Assign):
                yield [statement], statement
            continue
        grown, first = value, last
        versions = [(statements[last : last + 1], value)]
        while first > 0:
            before = statements[first - 1]
            name, inner = _target(before), _value(before)
            if name is None or inner is None or not _only_there(name, grown, statements, first, tree):
                break
            grown, first = _Put(name, inner).visit(ast.parse(ast.unparse(grown), mode="eval").body), first - 1
            versions.append((statements[first : last + 1], grown))
        yield from reversed(versions)


def _value(statement: ast.stmt) -> Any:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and not isinstance(statement.targets[0], ast.Subscript):
        return statement.value
    return statement.value if isinstance(statement, (ast.Return, ast.Expr)) else None


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None


def _reads(node: ast.AST, name: str) -> int:
    return sum(isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load) for one in ast.walk(node))


def _only_there(name: str, expression: Any, statements: list[ast.stmt], at: int, tree: ast.Module) -> bool:
    """Return whether an expression is the only reader of what the statement before it assigned: later ones read what a statement in
    it assigns, or nobody reads the name any more, and no loop comes back to it."""
    if not _reads(expression, name):
        return False
    if _target(statements[at]) == name:
        return True
    line = statements[at].lineno
    around = [one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and _spans(one, line)]
    scope = min(around, key=lambda one: (one.end_lineno or 0) - one.lineno, default=tree)
    if any(isinstance(one, (ast.For, ast.While, ast.AsyncFor)) and _spans(one, line) for one in ast.walk(scope)):
        return False
    end = statements[at].end_lineno or line
    later = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == name and one.lineno > end]
    return not any(isinstance(one.ctx, ast.Load) for one in later)


def _spans(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= (node.end_lineno or node.lineno))


class _Put(ast.NodeTransformer):
    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.parse(ast.unparse(self._value), mode="eval").body if node.id == self._name else node


def _at(
    file: Path, lines: list[str], chain: tuple[list[ast.stmt], Any], aliases: Mapping[str, str], torch: str, ran: Collection[int]
) -> Iterator[Found]:  # fmt: skip
    statements, expression = chain
    first, last = statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno
    if not _alone(statements, lines):
        return
    written = isinstance(expression, ast.Assign)
    parts = [formed(one, aliases) for one in ((expression.targets[0], expression.value) if written else (expression,))]
    for row in catalogue():
        wanted = _wanted(row.before)
        if written != (len(wanted) == 2):
            continue
        made = (_written if written else _replaced)(row, wanted, expression, parts, torch)
        named = row.before.startswith(("torch.", "apex.")) and "(" in row.before
        if made is None or not (named or any(first <= line <= last for line in ran)):
            continue
        indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
        head = _head(statements[-1])
        text = f"{indent}{head}{made}" + ("\r\n" if lines[last - 1].endswith("\r\n") else "\n")
        yield Found(str(file), first, last, row, "".join(lines[first - 1 : last]), text)


def _alone(statements: Sequence[ast.stmt], lines: Sequence[str]) -> bool:
    """Return whether statements have their lines for themselves: a patch is of lines."""
    begin, end = statements[0], statements[-1]
    before = lines[begin.lineno - 1].encode()[: begin.col_offset]
    behind = lines[(end.end_lineno or end.lineno) - 1].encode()[end.end_col_offset or 0 :]
    return not before.strip() and (not behind.strip() or behind.strip().startswith(b"#"))


def _head(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Return):
        return "return "
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        return f"{ast.unparse(target)[1:-1] if isinstance(target, ast.Tuple) else ast.unparse(target)} = "
    return ""


@cache
def _wanted(before: str) -> tuple[Any, ...]:
    """Return a pattern in the one form: what is written to, and the value, or an expression."""
    pattern: Any = ast.parse(before).body[0]
    parts = (pattern.targets[0], pattern.value) if isinstance(pattern, ast.Assign) else (pattern.value,)
    return tuple(formed(one, {}) for one in parts)


def _written(row: Rewrite, wanted: Sequence[Any], statement: ast.Assign, parts: Sequence[Any], torch: str) -> str | None:
    """Return what takes the place of ``X[M] = V``; ``parts`` of the statement are in the one form."""
    bound: dict[str, Any] = {}
    if len(statement.targets) != 1:
        return None
    if not all(matches(one, its, bound, row.where) for one, its in zip(wanted, parts, strict=True)) or not _asks_of(bound):
        return None
    return ast.unparse(_filled(row.after, bound, torch))


def _replaced(row: Rewrite, wanted: Sequence[Any], expression: Any, parts: Sequence[Any], torch: str) -> str | None:
    """Return an expression with the first part that has the form replaced; the rest stays as it is written."""
    for node in ast.walk(parts[0]):
        bound: dict[str, Any] = {}
        origin = getattr(node, "origin", None)
        if origin is None or not isinstance(node, ast.expr):
            continue
        if not matches(wanted[0], node, bound, row.where) or not _asks_of(bound):
            continue
        copies: dict[int, Any] = {}
        copied = copy.deepcopy(expression, copies)
        return ast.unparse(_Swap(copies[id(origin)], _filled(row.after, bound, torch)).visit(copied))
    return None


class _Swap(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _asks_of(bound: Mapping[str, Any]) -> bool:
    """Return whether a condition asks about each element of the tensor that it selects from, or of one of its shape: a number, or a
    part of the tensor, would select otherwise."""
    if "M" not in bound or "X" not in bound:
        return True
    mask = bound["M"]
    return bound["X"].id in (getattr(mask, "asks", ()) if isinstance(mask, ast.Name) else asked_of(mask) or ())


def _filled(after: str, bound: Mapping[str, Any], torch: str) -> ast.expr:
    """Return what takes the place of a form, with what its names stand for as the script has it."""
    tree = ast.parse(re.sub(r"\btorch\.", f"{torch}.", after), mode="eval").body

    def own(node: Any) -> Any:
        return getattr(node, "origin", node)

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> Any:
            return own(bound.get(node.id, node))

        def visit_Call(self, node: ast.Call) -> Any:
            rest = {one.value.id for one in (*node.args, *node.keywords) if _is_rest(one)}  # type: ignore[attr-defined]
            node.args = [one for one in node.args if not _is_rest(one)]
            node.keywords = [one for one in node.keywords if not _is_rest(one)]
            self.generic_visit(node)
            for one in (part for name in sorted(rest) for part in bound[name]):
                if isinstance(one, ast.expr):
                    node.args.append(own(one))
                else:
                    node.keywords.insert(0, ast.keyword(one.arg, own(one.value)))
            return node

    made: ast.expr = Fill().visit(tree)
    return made


def _is_rest(one: ast.AST) -> bool:
    """Return whether an argument of a form is ``*S`` or ``**K``."""
    return isinstance(one, ast.Starred) or (isinstance(one, ast.keyword) and one.arg is None)


METHODS = frozenset((
    "transpose", "swapaxes", "swapdims", "permute", "reshape", "view", "contiguous", "max", "sum", "mean", "exp", "rsqrt", "pow",
    "square", "sqrt", "flatten", "index_select", "std_mean", "var", "var_mean", "sigmoid", "tanh", "erf", "softmax", "chunk", "mul",
    "add", "matmul", "masked_fill",
))  # fmt: skip
"""Functions of torch that are methods of its tensors, too."""
BY_DIMENSION = frozenset(("max", "sum", "mean", "std_mean", "var", "var_mean", "softmax"))
"""Methods whose first argument is the dimension."""
OPERATORS: dict[str, type[ast.operator]] = {"mul": ast.Mult, "add": ast.Add, "matmul": ast.MatMult}
"""Methods that have a sign."""
HOMES = (("torch",), ("torch", "nn", "functional"))
"""Where functions are that are methods, too."""
MOST = 5
"""Factors or terms that are tried in any order."""
NEAR = 1e-9
"""The relative difference of two numbers that are written for the same one (0.7978845608 for the root of 2 / pi)."""
INFINITE = (("math", "inf"), ("torch", "inf"), ("numpy", "inf"))
ROOTS = ("math.sqrt", "numpy.sqrt")
PI = ("math.pi", "numpy.pi", "torch.pi")


class _Form(ast.NodeTransformer):
    """Writes an expression anew; each node knows as ``origin`` what it was in the script."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases

    def visit(self, node: ast.AST) -> Any:
        new: Any = super().visit(node)
        if not isinstance(new, ast.Constant) and (value := _number(new)) is not None:
            new = ast.Constant(value)
        if new is not node:
            new.origin = getattr(node, "origin", node)
        return new

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = self._aliases.get(node.id)
        return node if known is None else ast.parse(known, mode="eval").body

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = copy.copy(node)
        node.func, node.args = self.visit(node.func), [self.visit(one) for one in node.args]
        node.keywords = [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords]
        if not isinstance(node.func, ast.Attribute):
            return node
        name, of = node.func.attr, node.func.value
        if _dotted(of) in HOMES and name in METHODS and node.args:
            of, node.args = node.args[0], node.args[1:]
        if len(node.args) == 1 and isinstance(node.args[0], (ast.Tuple, ast.List)) and name in ("view", "reshape", "permute"):
            node.args = node.args[0].elts
        dims = [one for one in node.keywords if one.arg in ("dim", "axis")]
        if dims and len(node.args) == {"chunk": 1}.get(name, 0 if name in BY_DIMENSION else -1):
            node.args, node.keywords = [*node.args, dims[0].value], [one for one in node.keywords if one is not dims[0]]
        numbers = [_signed(one) for one in node.args]
        if name == "permute" and numbers[:3] == [0, 2, 1] and numbers[3:] == list(range(3, len(numbers))):
            name, node.args = "transpose", [ast.Constant(1), ast.Constant(2)]
        elif name in ("transpose", "swapaxes", "swapdims") and numbers in ([2, 1], [-1, -2]):
            node.args = node.args[::-1]
        elif name == "square" and not node.args:
            name, node.args = "pow", [ast.Constant(2)]
        elif name in OPERATORS and len(node.args) == 1 and not node.keywords:
            return ast.BinOp(of, OPERATORS[name](), node.args[0])
        name = {"reshape": "view", "swapaxes": "transpose", "swapdims": "transpose"}.get(name, name)
        if name == "view" and isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "contiguous":
            of = of.func.value  # a view of what is not contiguous does not exist, and reshape copies by itself
        node.func = ast.Attribute(of, name, ast.Load())
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(right, ast.Constant) and _number(left) is None:
            return ast.Call(ast.Attribute(left, "pow", ast.Load()), [right], [])
        return ast.BinOp(left, node.op, right)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of = self.visit(node.value)
        if node.attr == "values" and isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "max":
            return ast.Subscript(of, ast.Constant(0), ast.Load())
        return ast.Attribute(of, node.attr, ast.Load())


def formed(node: Any, aliases: Mapping[str, str]) -> Any:
    """Return an expression in the one form; ``aliases`` are names of the script's and the dotted names that they mean. Where a node
    of it is made of one of the script's, that is its ``origin``."""
    copied = copy.deepcopy(node)
    for one, its in zip(ast.walk(copied), ast.walk(node), strict=True):
        one.origin = its  # type: ignore[attr-defined]
    return _Form(aliases).visit(copied)


def matches(pattern: Any, node: Any, bound: dict[str, Any], where: Mapping[str, Kind]) -> bool:
    """Return whether an expression has a form; ``bound`` gets what each name in capitals stands for. Both are in the one form."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if not isinstance(node, ast.expr) or not _may_be(where.get(pattern.id), node):
            return False
        held = bound.setdefault(pattern.id, node)
        return ast.dump(held) == ast.dump(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Constant) and isinstance(pattern.value, float):
        return isinstance(node.value, (int, float)) and math.isclose(pattern.value, node.value, rel_tol=NEAR)
    if isinstance(pattern, ast.BinOp) and isinstance(pattern.op, (ast.Mult, ast.Add)) and type(pattern.op) is type(node.op):
        return _in_some_order(pattern, node, bound, where)
    for name in pattern._fields:
        if name in ("ctx", "kind", "type_comment"):
            continue
        mine, its = getattr(pattern, name), getattr(node, name)
        if isinstance(mine, list):
            if not _all_match(mine, its, bound, where):
                return False
        elif isinstance(mine, ast.AST):
            if not matches(mine, its, bound, where):
                return False
        elif mine != its:
            return False
    return True


def _in_some_order(pattern: ast.BinOp, node: ast.BinOp, bound: dict[str, Any], where: Mapping[str, Kind]) -> bool:
    """Return whether the parts of a sum or a product have the forms of another's parts, in any order."""
    wanted, given = list(_parts(pattern, type(pattern.op))), list(_parts(node, type(pattern.op)))
    if len(wanted) != len(given) or len(wanted) > MOST:
        return False
    for order in itertools.permutations(given):
        trial = dict(bound)
        if all(matches(one, its, trial, where) for one, its in zip(wanted, order, strict=True)):
            bound.update(trial)
            return True
    return False


def _parts(node: Any, sign: type[ast.operator]) -> Iterator[Any]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, sign):
        yield from (*_parts(node.left, sign), *_parts(node.right, sign))
    else:
        yield node


def _all_match(wanted: list[Any], given: list[Any], bound: dict[str, Any], where: Mapping[str, Kind]) -> bool:
    """Match a list; ``*S`` and ``**K`` at its end take what is left."""
    last = wanted[-1] if wanted else None
    if isinstance(last, ast.Starred) or (isinstance(last, ast.keyword) and last.arg is None):
        name, rest = last.value.id, given[len(wanted) - 1 :]  # type: ignore[attr-defined]
        known = [one for one in rest if isinstance(one, ast.expr) or one.arg == "dtype"]
        if len(known) != len(rest) or (isinstance(last, ast.Starred) and not rest):
            return False
        bound[name] = rest
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(matches(one, its, bound, where) for one, its in zip(wanted, given, strict=True))


def _dotted(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*_dotted(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ("",)


def _signed(node: ast.AST) -> object:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(value := _number(node.operand), int):
        return -value
    return node.value if isinstance(node, ast.Constant) else None


def _number(node: Any) -> float | None:
    """Return the number that an expression is, where it is computed of numbers alone."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, (int, float)) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.Attribute) and ".".join(_dotted(node)) in PI:
        return math.pi
    parts = []
    if isinstance(node, ast.BinOp):
        parts = [_number(node.left), _number(node.right)]
    elif isinstance(node, ast.Call) and ".".join(_dotted(node.func)) in ROOTS and len(node.args) == 1:
        parts = [_number(node.args[0]), 0.5]
    if not parts or None in parts:
        return None
    left, right = parts
    sign = ast.Pow if isinstance(node, ast.Call) else type(node.op)
    compute = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.Div: "__truediv__", ast.Pow: "__pow__"}.get(sign)
    try:
        value = None if compute is None or abs(left) > 1e6 or abs(right) > 1e3 else getattr(float(left), compute)(float(right))  # type: ignore[arg-type]
    except (ArithmeticError, ValueError):
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _may_be(kind: Kind | None, node: ast.expr) -> bool:
    if kind == "name":
        return isinstance(node, ast.Name)
    if kind == "plain":
        return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _may_be("plain", node.value))
    if kind == "size":
        return not isinstance(node, (ast.UnaryOp, ast.Starred))
    if kind == "number":
        inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        named = isinstance(inner, ast.Attribute) and _dotted(inner) in INFINITE
        written = (
            isinstance(inner, ast.Call)
            and _dotted(inner.func) == ("float",)
            and all(isinstance(a, ast.Constant) for a in inner.args)
        )
        return named or written or (isinstance(inner, ast.Constant) and type(inner.value) in (int, float))
    if kind == "scalar":
        return _is_scalar(node)
    if kind == "device":
        return _dotted(node)[-1] == "device" and "" not in _dotted(node)
    return kind is None or isinstance(node, ast.Name) or asked_of(node) is not None


def _is_scalar(node: ast.expr) -> bool:
    """Return whether an expression is a number of Python's for certain: a number, ``math.sqrt(...)``, or one over such."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_scalar(node.left) and _is_scalar(node.right)
    return _number(node) is not None or (isinstance(node, ast.Call) and _dotted(node.func) == ("math", "sqrt"))
