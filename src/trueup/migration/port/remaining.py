"""`remaining`: the lines of a script that have the letters (cuda, nccl, apex) and stay, each with the reason.

Kernels in CUDA that a project builds stay: where it loads them, and which conditions guard them. ``if has_kernels and x.is_cuda:
return FusedScan.apply(x)`` is left as it is: another device has no such kernels, and goes on behind.

What decides a device and stands in no script (a file of settings, a launch script, a value that a script reads from one) is not
rewritten, for others read it, too; each is listed with what to say there.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trueup.migration.port.flow import SHAPES, Place, Project, is_translated, literal
from trueup.migration.port.reading import FUNCTIONS, Script
from trueup.migration.port.rules import Kind

BUILDER = "torch.utils.cpp_extension"
LOADS = (f"{BUILDER}.load", f"{BUILDER}.load_inline")
NEXT = "write them with PyTorch's functions, run them on the CPU, or develop an operator for the device"
GUARD = "it guards kernels in CUDA, or cuDNN's: another device goes on where they are not"
CONDITIONS = (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Attribute, ast.NamedExpr)
"""What a condition is made of."""

LETTERS = re.compile(r"cuda|nccl|\Aapex\Z|\Aamp_C\Z|\Acpp_extension\Z", re.IGNORECASE)
FSTRING = tuple(getattr(tokenize, name) for name in ("FSTRING_START", "FSTRING_MIDDLE") if hasattr(tokenize, name))


class Kernels:
    """The kernels of a project. ``built`` says by module where a setup script builds it, as ``setup.py:29``."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.built = dict(self._built())
        self._places: set[Place] = set()
        self._units: set[ast.AST] = set()
        self._any = any(BUILDER.encode() in script.data for script in project.scripts)
        if not self._any:
            return
        self._whole = self._unguarded()
        self._imported()
        self._made()
        self._use()

    def guards(self, script: Script) -> set[ast.AST]:
        """Return all nodes of the conditions that guard kernels: what they ask about CUDA stays."""
        found = _asks_for_cudnn(script)
        for node in script.scopes if self._any else ():
            if isinstance(node, (ast.If, ast.IfExp)):
                region = [node.test, *(node.body if isinstance(node, ast.If) else [node.body])]
                guards = any(self._mentions(script, one) for one in region)
            elif isinstance(node, (ast.Assert, ast.While)):
                guards = self._mentions(script, node.test)
            elif isinstance(node, ast.BoolOp) and not isinstance(script.parents.get(node), CONDITIONS):
                if self._mentions(script, node):
                    found.update(ast.walk(node))
                continue
            else:
                continue
            around = script.within(node, ast.ClassDef)
            if guards or around in self._units:
                found.update(ast.walk(node.test))
        return found

    def needs(self, script: Script) -> Iterator[tuple[ast.AST, str, bool]]:
        """Yield where a script imports or builds kernels, where those are built, and whether it goes on without them."""
        for node in script.scopes if self._any else ():
            modules = dict.fromkeys(module for name in script.imports(node) if (module := self._of(name)) is not None)
            places = [f"built by {self.built[module]}" for module in modules]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _loads(script, node):
                places.append("built here")
            for place in places:
                yield node, place, _goes_on(script, node)

    # ---- what is built ----

    def _built(self) -> Iterator[tuple[str, str]]:
        for script in self.project.scripts:
            if b"CUDAExtension" not in script.data:
                continue
            for node in script.scopes:
                if isinstance(node, ast.Call) and self._is_builder(script, node.func):
                    given = [one.value for one in node.keywords if one.arg == "name"] or node.args[:1]
                    for name in given:
                        module = self._text(script, name)
                        if module and module not in self.project.modules:
                            yield module, f"{script.module.replace('.', '/')}.py:{node.lineno}"

    def _text(self, script: Script, node: ast.AST) -> str:
        """Return a text that is written out, or made of variables that have one value; empty for any other."""
        if isinstance(node, ast.JoinedStr):
            parts = [self._text(script, one.value if isinstance(one, ast.FormattedValue) else one) for one in node.values]
            return "".join(parts) if all(parts) else ""
        if isinstance(node, ast.Name):
            values = self.project.values.get(self.project.place(script, node) or (), ())
            return self._text(*values[0]) if len(values) == 1 and not isinstance(values[0][1], ast.Name) else ""
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""

    def _is_builder(self, script: Script, callee: ast.AST) -> bool:
        name = f"{BUILDER}.CUDAExtension"
        values = self.project.values.get(self.project.place(script, callee) or (), ())
        nodes = [(script, callee), *((where, one) for where, value in values for one in ast.walk(value))]
        return any(where.qualified(one) == name for where, one in nodes if isinstance(one, (ast.Name, ast.Attribute)))

    def _of(self, name: str | None) -> str | None:
        """Return the built module that a name is of."""
        while name:
            if name in self.built:
                return name
            name = name.rpartition(".")[0]
        return None

    # ---- what is a kernel: by name, by value, by use ----

    def _unguarded(self) -> set[str]:
        """Return the modules of the project that nobody can import without the kernels."""
        imports = {
            script.module: {
                name for node in script.tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for name in script.imports(node)
            }
            for script in self.project.scripts
        }
        found: set[str] = set()
        before = -1
        while before != len(found):
            before = len(found)
            needs = {module for module, names in imports.items() if any(self._of(one) or _within(one, found) for one in names)}
            found |= needs
        return found

    def _imported(self) -> None:
        """Note names that a ``try`` imports of kernels, and what it sets beside them: ``has_kernels = True``."""
        for script in self.project.scripts:
            for node in script.scopes:
                if not isinstance(node, ast.Try):
                    continue
                inside = [one for statement in node.body for one in ast.walk(statement)]
                names = [(one, name) for one in inside for name in script.imports(one)]
                if not any(self._of(name) or _within(name, self._whole) for _, name in names):
                    continue
                others = [one for part in (*node.handlers, *node.orelse) for one in ast.walk(part)]
                targets = [to for one in (*inside, *others) if isinstance(one, ast.Assign) for to in one.targets]
                self._places |= {place for to in targets if (place := self.project.place(script, to)) is not None}
                self._units |= {found for _, name in names if (found := self._definition(name)) is not None}

    def _definition(self, name: str) -> ast.AST | None:
        found = self.project.functions.get(name) or self.project.classes.get(name)
        return found[1] if found is not None else None

    def _made(self) -> None:
        """Note what is made by loading: a variable, and what a function that loads returns."""
        for script in self.project.scripts:
            for node in script.scopes:
                if isinstance(node, ast.Call) and _loads(script, node):
                    function = script.within(node, FUNCTIONS)
                    self._places |= {("return", function)} if function is not None else set()
        before = -1
        while before != len(self._places):
            before = len(self._places)
            self._places |= {
                place for place, values in self.project.values.items() if any(self._is_made(*value) for value in values)
            }

    def _is_made(self, script: Script, value: ast.AST) -> bool:
        if isinstance(value, ast.Call):
            found = self.project.called(script, value.func)
            return _loads(script, value) or (found is not None and ("return", found[1]) in self._places)
        return self.project.place(script, value) in self._places

    def _use(self) -> None:
        """Note the functions that use kernels, and the custom functions with a backward whose methods do."""
        used = {
            script.within(node, FUNCTIONS): script
            for script in self.project.scripts
            for node in script.scopes
            if isinstance(node, (ast.Name, ast.Attribute)) and self._is_kernel(script, node)
        }
        for function, script in used.items():
            around = script.within(function, ast.ClassDef) if function is not None else None
            bases = [script.qualified(base) or "" for base in around.bases] if isinstance(around, ast.ClassDef) else []
            if around is not None and any(base.endswith("autograd.Function") for base in bases):
                self._units.add(around)
                outer = script.within(around, FUNCTIONS)
                self._units |= {outer} if outer is not None else set()
            elif function is not None:
                self._units.add(function)

    def _is_kernel(self, script: Script, node: ast.AST) -> bool:
        qualified = script.qualified(node)
        if qualified is not None and (self._of(qualified) or qualified.startswith(f"{BUILDER}.")):
            return True
        return self.project.place(script, node) in self._places

    def _mentions(self, script: Script, node: ast.AST) -> bool:
        return any(
            self._is_kernel(script, one) or self._resolved(script, one) in self._units
            for one in ast.walk(node)
            if isinstance(one, (ast.Name, ast.Attribute)) and one in script.scopes
        )

    def _resolved(self, script: Script, node: ast.Name | ast.Attribute) -> ast.AST | None:
        """Return the function or class of the project that a name means."""
        qualified = script.qualified(node)
        if qualified is None and isinstance(node, ast.Name):
            qualified = f"{script.module}.{node.id}"
        return self._definition(qualified or "")


def _loads(script: Script, load: ast.Call) -> bool:
    """Return whether a call builds kernels in CUDA: not where its sources are written down, and none is CUDA's."""
    if script.qualified(load.func) not in LOADS:
        return False
    given = next((one.value for one in load.keywords if one.arg == "sources"), load.args[1] if len(load.args) > 1 else None)
    names = [one.value for one in given.elts if isinstance(one, ast.Constant)] if isinstance(given, (ast.List, ast.Tuple)) else []
    whole = bool(names) and len(names) == len(given.elts)  # type: ignore[union-attr]
    return not whole or not all(str(name).endswith((".cpp", ".cc", ".cxx", ".c")) for name in names)


def _goes_on(script: Script, node: ast.AST) -> bool:
    """Return whether what a statement raises is caught, and not raised again."""
    inner = node
    while (outer := script.parents.get(inner)) is not None and not isinstance(outer, FUNCTIONS):
        if isinstance(outer, ast.Try) and inner in outer.body and outer.handlers:
            return not any(isinstance(one, ast.Raise) for handler in outer.handlers for one in ast.walk(handler))
        inner = outer
    return False


def _within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _asks_for_cudnn(script: Script) -> set[ast.AST]:
    """Return the nodes of functions that say yes or no and ask for cuDNN on the way: they guard its own operators."""
    found: set[ast.AST] = set()
    for function in script.opened:
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        if isinstance(function, ast.FunctionDef) and returns and all(_says(node.value) for node in returns):
            names = (script.qualified(node) for node in ast.walk(function) if isinstance(node, ast.Attribute))
            if any((name or "").startswith("torch.backends.cudnn") for name in names):
                found.update(node for statement in function.body for node in ast.walk(statement))
    return found


def _says(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


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
