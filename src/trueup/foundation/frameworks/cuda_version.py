"""Where a script reads ``torch.version.cuda`` as a text: ``torch.version.cuda.split(".")``, ``float(torch.version.cuda)``.

It is None in a build for another device, and there such a line ends in an AttributeError. A port writes ``(torch.version.cuda or
"0.0")`` there, and a process whose calls for CUDA are sent elsewhere answers ``"0.0"``: the same places, so they are found here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

NUMBERS = ("int", "float")


def read_as_text(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether an attribute, an item or a number of an expression is asked for, where nothing looks first whether it is one.

    Args:
        node: the expression, ``torch.version.cuda`` as the script has it.
        parents: by each node of the script's tree the one around it.
    """
    parent = parents.get(node)
    number = isinstance(parent, ast.Call) and node in parent.args and getattr(parent.func, "id", "") in NUMBERS
    asked = number or (isinstance(parent, (ast.Attribute, ast.Subscript)) and parent.value is node)
    written = ast.dump(node)
    while asked and parent is not None:
        tests = [parent.test] if isinstance(parent, (ast.If, ast.IfExp)) else []
        tests += parent.values[:1] if isinstance(parent, ast.BoolOp) else []
        looked = any(isinstance(one, type(node)) and ast.dump(one) == written for test in tests for one in ast.walk(test))
        asked = not looked and not isinstance(parent, ast.Try)
        parent = parents.get(parent)
    return asked


def lines(text: str) -> frozenset[int]:
    """Return the lines of a script that read ``version.cuda`` as a text; none of what is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    chains = [node for node in parents if isinstance(node, ast.Attribute) and node.attr == "cuda"]
    versions = [node for node in chains if getattr(node.value, "attr", getattr(node.value, "id", "")) == "version"]
    return frozenset(node.lineno for node in versions if read_as_text(node, parents))
