"""`remaining`: the lines of a script that have the letters (cuda, nccl, apex) and stay, each with the reason.

What decides a device and stands in no script: a file of settings, a launch script, a value that a script reads from one.

None is rewritten, for others read them, too; each is listed with what to say there.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trueup.migration.port.flow import SHAPES, Place, Project, is_translated, literal
from trueup.migration.port.kernels import NEXT, Kernels
from trueup.migration.port.reading import FUNCTIONS, Script
from trueup.migration.port.rules import Kind

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


# ---------------------------------------------------------------- branches
# Where a script does something else because an accelerator is there: ``if use_cuda: options.update(shuffle=True)``. A proof runs
# the original on the CPU: where that takes another branch than a device does, both runs differ by no fault of the port.
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


SETTINGS = {".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".gin", ".sh", ".bash", ".slurm", ".sbatch"}
LARGEST = 1 << 20
"""Bytes of a file of settings: what is larger holds data."""
MOST = 50
"""Lines of one file that are listed."""
VALUE = re.compile(
    r"(?:[:=]\s*|--[\w.-]+[ =])(?P<quote>[\"']?)(?P<value>cuda(?::\d+)?|(?i:nccl))(?P=quote)\s*(?:[,}\])#;\\]|$|\s-)"
    r"|\b(?P<variable>CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|PYTORCH_CUDA_ALLOC_CONF)="
)
"""A value that reads as a device or a backend, an option with one, a variable of the environment that CUDA reads."""
SAY: dict[str, dict[str, str]] = {
    "npu": {"backend": "say hccl where it says nccl", "device": "say npu where it says cuda"},
    "agnostic": {
        "backend": "leave the backend out, or say what the device's own is (hccl for an NPU)",
        "device": "say the device that is there (npu, cuda)",
    },
}
VARIABLES = {"npu": "an NPU reads {new}", "agnostic": "only CUDA reads it: an NPU's is {new}"}


def in_settings(paths: Iterable[Path], to: str, names: dict[str, str]) -> Iterator[tuple[Path, int, str, str]]:
    """Yield path, line, text and reason of lines in files of settings that choose a device. ``names`` are an NPU's variables of the
    environment by CUDA's."""
    for path in paths:
        if path.suffix not in SETTINGS or path.stat().st_size > LARGEST:
            continue
        count = 0
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            found = None if line.lstrip().startswith(("#", ";", "//")) else VALUE.search(line)
            if found is None:
                continue
            kind = "backend" if (found["value"] or "").lower() == "nccl" else "device"
            say = VARIABLES[to].format(new=names[found["variable"]]) if found["variable"] else SAY[to][kind]
            yield path, number, line.strip()[:200], f"not in a script, so it was not rewritten: {say}"
            count += 1
            if count == MOST:
                break


def from_outside(project: Project, script: Script, to: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the arguments of a script's calls that are a backend or a device and come from no script, with the reason."""
    for node in sorted(script.scopes, key=lambda one: getattr(one, "lineno", 0)):
        for value, kind in project.sinks(script, node) if isinstance(node, ast.Call) else ():
            if kind != "type" and _is_from_outside(project, script, value, kind):
                yield value, f"a {kind} from outside of the scripts (a file of settings, a command line): {SAY[to][kind]}"


def _is_from_outside(project: Project, script: Script, value: ast.AST, kind: Kind) -> bool:
    """Return whether nothing shows what a value is: no text reaches it, and no option whose words are translated. Of devices those
    alone that are read by a name that says so (``settings["device"]``): what else is unknown is mostly a parameter."""
    if kind == "device" and "device" not in str(_key(value)).lower():
        return False
    seen: set[object] = set()
    todo: list[tuple[Script, ast.AST]] = [(script, value)]
    is_open = False
    while todo:
        where, expression = todo.pop()
        origins = list(project.origins(where, expression))
        is_open = is_open or not origins
        for origin in origins:
            if not isinstance(origin, tuple):
                return False
            if origin in seen:
                continue
            seen.add(origin)
            if origin[0] == "option" and any(is_translated(*one, kind) for one in project.added.get(str(origin[2]), ())):
                return False
            kept = project.values.get(origin, [])
            todo += kept
            is_open = is_open or not kept
    return is_open


def _key(expression: ast.AST) -> object:
    return expression.slice.value if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant) else None
