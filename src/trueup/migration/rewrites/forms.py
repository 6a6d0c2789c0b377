"""Expressions of Python in one form, and whether one has the form of another.

In a pattern a name in capitals stands for any expression, the same one wherever it stands again. ``torch.f(x, ...)`` and
``x.f(...)``, ``reshape``, ``view`` and ``contiguous().view``, ``permute(0, 2, 1, ...)``, ``swapaxes(1, 2)`` and
``transpose(1, 2)``, ``x ** 2`` and ``x.pow(2)``, ``dim=`` and its place, ``.values`` and ``[0]`` are one form.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from typing import Any

from trueup.migration.rewrites.catalogue import Kind

METHODS = frozenset((
    "transpose", "swapaxes", "swapdims", "permute", "reshape", "view", "contiguous", "max", "sum", "mean", "exp", "rsqrt", "pow",
    "square", "sqrt", "flatten", "index_select", "std_mean", "var",
))  # fmt: skip
"""Functions of torch that are methods of its tensors, too."""
BY_DIMENSION = frozenset(("max", "sum", "mean", "std_mean", "var", "softmax"))
"""Methods whose first argument is the dimension."""


class _Form(ast.NodeTransformer):
    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases

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
        if isinstance(of, ast.Name) and of.id == "torch" and name in METHODS and node.args:
            of, node.args = node.args[0], node.args[1:]
        if len(node.args) == 1 and isinstance(node.args[0], (ast.Tuple, ast.List)) and name in ("view", "reshape", "permute"):
            node.args = node.args[0].elts
        dims = [one for one in node.keywords if one.arg in ("dim", "axis")]
        if name in BY_DIMENSION and dims and not node.args:
            node.args, node.keywords = [dims[0].value], [one for one in node.keywords if one is not dims[0]]
        numbers = [one.value if isinstance(one, ast.Constant) else None for one in node.args]
        if name == "permute" and numbers[:3] == [0, 2, 1] and numbers[3:] == list(range(3, len(numbers))):
            name, node.args = "transpose", [ast.Constant(1), ast.Constant(2)]
        elif name in ("transpose", "swapaxes", "swapdims") and numbers == [2, 1]:
            node.args = node.args[::-1]
        elif name == "square" and not node.args:
            name, node.args = "pow", [ast.Constant(2)]
        name = {"reshape": "view", "swapaxes": "transpose", "swapdims": "transpose"}.get(name, name)
        if name == "view" and isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "contiguous":
            of = of.func.value  # a view of what is not contiguous does not exist, and reshape copies by itself
        node.func = ast.Attribute(of, name, ast.Load())
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(right, ast.Constant) and right.value == 2:
            return ast.Call(ast.Attribute(left, "pow", ast.Load()), [right], [])
        return ast.BinOp(left, node.op, right)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of = self.visit(node.value)
        if node.attr == "values" and isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "max":
            return ast.Subscript(of, ast.Constant(0), ast.Load())
        return ast.Attribute(of, node.attr, ast.Load())


def formed(node: Any, aliases: Mapping[str, str]) -> Any:
    """Return an expression in the one form; ``aliases`` are names of the script's and the dotted names that they mean."""
    return _Form(aliases).visit(copy.deepcopy(node))


def matches(pattern: Any, node: Any, bound: dict[str, ast.expr], where: Mapping[str, Kind]) -> bool:
    """Return whether an expression has a form; ``bound`` gets what each name in capitals stands for. Both are in the one form."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if not isinstance(node, ast.expr) or not _may_be(where.get(pattern.id), node):
            return False
        held = bound.setdefault(pattern.id, node)
        return ast.dump(held) == ast.dump(node)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.BinOp) and isinstance(pattern.op, (ast.Mult, ast.Add)) and type(pattern.op) is type(node.op):
        for left, right in ((node.left, node.right), (node.right, node.left)):
            trial = dict(bound)
            if matches(pattern.left, left, trial, where) and matches(pattern.right, right, trial, where):
                bound.update(trial)
                return True
        return False
    for name in pattern._fields:
        if name in ("ctx", "kind", "type_comment"):
            continue
        mine, its = getattr(pattern, name), getattr(node, name)
        if isinstance(mine, list):
            if len(mine) != len(its) or not all(matches(one, other, bound, where) for one, other in zip(mine, its, strict=True)):
                return False
        elif isinstance(mine, ast.AST):
            if not matches(mine, its, bound, where):
                return False
        elif mine != its:
            return False
    return True


def _may_be(kind: Kind | None, node: ast.expr) -> bool:
    if kind == "name":
        return isinstance(node, ast.Name)
    if kind == "plain":
        return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _may_be("plain", node.value))
    if kind == "size":
        return not isinstance(node, (ast.UnaryOp, ast.Starred))
    if kind == "number":
        inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        return isinstance(inner, ast.Constant) and type(inner.value) in (int, float)
    return kind is None or (isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.ops[0], (ast.In, ast.Is)))
