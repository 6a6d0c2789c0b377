"""Kernels in CUDA that a project builds: where it loads them, and which conditions guard them.

``if has_kernels and x.is_cuda: return FusedScan.apply(x)`` stays as it is: another device has no such kernels, and goes on behind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trueup.migration.port.flow import Place, Project
from trueup.migration.port.reading import FUNCTIONS, Script

BUILDER = "torch.utils.cpp_extension"
LOADS = (f"{BUILDER}.load", f"{BUILDER}.load_inline")
NEXT = "write them with PyTorch's functions, run them on the CPU, or develop an operator for the device"
GUARD = "it guards kernels in CUDA, or cuDNN's: another device goes on where they are not"
CONDITIONS = (ast.BoolOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Attribute, ast.NamedExpr)
"""What a condition is made of."""


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
