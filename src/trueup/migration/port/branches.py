"""Where a script does something else because an accelerator is there: ``if use_cuda: options.update(shuffle=True)``.

A proof runs the original on the CPU. Where that takes another branch than a device does, both runs differ by no fault of the port.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trueup.migration.port.flow import Place, Project
from trueup.migration.port.reading import Script

ASKS = {f"torch.{module}.{name}" for module in ("cuda", "accelerator", "npu") for name in ("is_available", "device_count")}


def branches(project: Project) -> Iterator[tuple[Script, int, str]]:
    """Yield the statements that depend on whether an accelerator is there and do more than choose one: script, line, and the
    condition with the settings that stand under it (``if use_cuda: num_workers, shuffle``)."""
    asked = _asked(project)
    for script in project.scripts:
        nodes = sorted((one for one in script.scopes if isinstance(one, ast.If)), key=lambda one: one.lineno)
        for node in nodes:
            if _depends(project, script, node.test, asked) and not _chooses(project, script, node):
                settings = ", ".join(list(dict.fromkeys(_settings(node)))[:6])
                yield script, node.lineno, " ".join(f"if {script.text(node.test)}{': ' if settings else ''}{settings}".split())


def _settings(node: ast.If) -> Iterator[str]:
    """Yield the names under which something is set: keys, arguments, attributes."""
    for one in [inner for statement in (*node.body, *node.orelse) for inner in ast.walk(statement)]:
        if isinstance(one, ast.Dict):
            yield from (str(key.value) for key in one.keys if isinstance(key, ast.Constant))
        elif isinstance(one, ast.keyword) and one.arg is not None:
            yield one.arg
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr


def _asked(project: Project) -> set[Place]:
    """Return the places that keep the answer to whether an accelerator is there."""
    found: set[Place] = set()
    before = -1
    while before != len(found):
        before = len(found)
        found |= {
            place
            for place, values in project.values.items()
            if any(_is_answer(script, value) and _depends(project, script, value, found) for script, value in values)
        }
    return found


def _is_answer(script: Script, value: ast.AST) -> bool:
    """Return whether a value is true or false: a question, what is made of some with ``and``, ``or``, ``not``, or a copy."""
    asked = isinstance(value, ast.Call) and (script.qualified(value.func) in ASKS or script.text(value.func) == "bool")
    return asked or isinstance(value, (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Name, ast.Attribute))


def _depends(project: Project, script: Script, node: ast.AST, asked: set[Place]) -> bool:
    if isinstance(node, (ast.BoolOp, ast.UnaryOp)):
        parts = node.values if isinstance(node, ast.BoolOp) else [node.operand]
        return any(_depends(project, script, one, asked) for one in parts)
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        nothing = any(isinstance(part, ast.Constant) and part.value is None for part in parts)
        return not nothing and any(project.kind(script, part) == "device" for part in parts)
    if isinstance(node, ast.Call):
        inner = node.args[:1] if script.text(node.func) == "bool" else []
        return script.qualified(node.func) in ASKS or any(_depends(project, script, one, asked) for one in inner)
    return isinstance(node, (ast.Name, ast.Attribute)) and project.place(script, node) in asked


def _chooses(project: Project, script: Script, statement: ast.stmt) -> bool:
    """Return whether a statement only says which device there is, moves something there, or prints."""
    if isinstance(statement, ast.If):
        return all(_chooses(project, script, one) for one in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.Assign):
        moved = isinstance(statement.value, ast.Call) and getattr(statement.value.func, "attr", None) in ("cuda", "npu", "to")
        switched = [(script.qualified(to) or "").startswith("torch.backends.") for to in statement.targets]
        return moved or all(switched) or all(project.place(script, to) in project.reached for to in statement.targets)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = script.text(statement.value.func)
        return called == "print" or called.endswith((".cuda", ".npu", ".to")) or called.startswith(("torch.cuda.", "torch.npu."))
    return isinstance(statement, (ast.Pass, ast.Raise))
