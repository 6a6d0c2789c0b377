"""Expressions of Python in one form, and whether one has the form of another.

In a pattern a name in capitals stands for any expression, the same one wherever it stands again; ``*S`` for arguments, ``**K``
for none or a ``dtype=``. ``torch.f(x, ...)`` and ``x.f(...)``, ``reshape``, ``view`` and ``contiguous().view``,
``permute(0, 2, 1, ...)``, ``swapaxes(1, 2)`` and ``transpose(1, 2)``, ``x ** 2`` and ``x.pow(2)``, ``x.mul(y)`` and ``x * y``,
``dim=`` and its place, ``.values`` and ``[0]`` are one form; so are the terms of a sum and the factors of a product in any order,
and a number and what is computed of numbers.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from trueup.migration.rewrites.catalogue import Kind
from trueup.migration.rewrites.masks import asked_of

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
