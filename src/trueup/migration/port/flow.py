"""Which values are devices: where a function takes one, and from there back to what was written.

A text is a device because it reaches a place that takes one, through variables, attributes, arguments, options and dicts; never
because of its letters. What reaches no such place is left alone.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from trueup.migration.port.reading import FUNCTIONS, Function, Script
from trueup.migration.port.rules import Kind, Rules

Place: TypeAlias = "tuple[object, ...]"
"""Where a value is kept: a variable of a scope, an attribute of a class, a field of a variable, a key, an option, a return."""
SHAPES: dict[Kind, re.Pattern[str]] = {
    "device": re.compile(r"cuda(:(\d+|%[ds]|\{.*\})?)?"),
    "backend": re.compile(r"(?i:nccl|cpu:gloo,cuda:nccl)"),  # PyTorch reads a backend in small letters
    "type": re.compile(r"torch\.cuda\.\w+Tensor"),
}
"""How a text reads that is such a value."""
PASSED_ON = {"format", "lower", "strip", "split", "replace", "rsplit", "partition"}
"""Methods of a text whose result is made of it."""

NAMESPACES = set("SimpleNamespace Namespace EasyDict edict AttrDict Munch DotMap Box ConfigDict CfgNode create".split())
"""Functions whose result keeps what they are given, under the same names."""
MADE_OF = {"torch.device", "os.getenv", "dataclasses.field"}
"""Functions whose result is made of their arguments."""


@dataclass
class Project:
    """Scripts that were read together, and what flows where in them."""

    scripts: list[Script]
    rules: Rules
    values: dict[Place, list[tuple[Script, ast.AST]]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, tuple[Script, ast.ClassDef]] = field(default_factory=dict)
    functions: dict[str, tuple[Script, Function]] = field(default_factory=dict)
    instances: dict[Place, tuple[Script, ast.ClassDef]] = field(default_factory=dict)
    """Of which class of the project the object is that is kept somewhere."""
    lambdas: dict[Place, tuple[Script, Function]] = field(default_factory=dict)
    """Which function without a name is kept somewhere."""
    literals: dict[ast.AST, Kind] = field(default_factory=dict)
    """Texts that reach a place that takes such a value."""
    reached: dict[Place, Kind] = field(default_factory=dict)
    """Places whose values do."""
    options: dict[ast.AST, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Names of the options that a script adds to its command line."""
    added: dict[str, list[tuple[Script, ast.Call]]] = field(default_factory=lambda: defaultdict(list))
    """The calls that add an option of a name."""
    spread: set[Script] = field(default_factory=set)
    """The scripts of a training that several processes are to share."""
    chosen: bool = False
    """Whether a variable of the environment is to choose the device."""

    def __post_init__(self) -> None:
        self.modules = {script.module: script for script in reversed(self.scripts)}
        for script in self.scripts:
            for node, scope in script.scopes.items():
                if scope.node is script.tree and isinstance(node, ast.ClassDef):
                    self.classes[f"{script.module}.{node.name}"] = script, node
                elif scope.node is script.tree and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.functions[f"{script.module}.{node.name}"] = script, node
        for script in self.scripts:
            for node in script.scopes:
                self._note_instance(script, node)
                if isinstance(node, ast.Call) and (option := option_of(node)) is not None:
                    self.options[script.tree].add(option)
                    self.added[option].append((script, node))
        wanted: list[tuple[Script, ast.AST, Kind]] = []
        nodes = [(script, node) for script in self.scripts for node in script.scopes]
        for script, node in nodes:
            self._note(script, node)
        for script, node in nodes:
            if isinstance(node, ast.Call):
                wanted += [(script, expression, kind) for expression, kind in self.sinks(script, node)]
        self._back(wanted)
        self._ahead()

    def numbered(self, script: Script) -> bool:
        """Return whether the number of a device stays as a script has it."""
        return not (script in self.spread or self.chosen)

    # ---- what a call takes ----

    def sinks(self, script: Script, call: ast.Call) -> Iterator[tuple[ast.AST, Kind]]:
        """Yield the arguments of a call that are devices, backends or names of types."""
        callee, arguments = call.func, call.args
        if script.qualified(callee) == "functools.partial" and arguments:
            callee, arguments = arguments[0], arguments[1:]
        if self.called(script, callee) is not None:
            return  # its parameters are followed
        qualified = script.qualified(callee)
        method = callee.attr if isinstance(callee, ast.Attribute) and qualified is None else None
        if method is not None and self.is_foreign(script, callee.value):  # type: ignore[attr-defined]
            return
        for rule in self.rules.sinks(qualified, method):
            if rule.position is not None and rule.position < len(arguments):
                yield arguments[rule.position], rule.kind
            for keyword in call.keywords:
                if keyword.arg in rule.keywords:
                    yield keyword.value, rule.kind
                elif keyword.arg is None:
                    yield from ((one, rule.kind) for one in self._of_keys(script, keyword.value, rule.keywords))

    def _of_keys(self, script: Script, given: ast.AST, keys: tuple[object, ...]) -> Iterator[ast.AST]:
        """Yield what ``**given`` holds under some keys."""
        pairs = _pairs(given)
        if pairs is not None:
            yield from (value for key, value in pairs if key in keys)
        else:
            place = self.place(script, given)
            for _, value in [one for key in keys if place for one in self.values.get(("key", place, key), ())]:
                yield value

    def called(self, script: Script, callee: ast.AST) -> tuple[Script, Function] | None:
        """Return the function of the project that is called; of a class its ``__init__``."""
        owner = self.class_of(script, callee.value) if isinstance(callee, ast.Attribute) else None
        if owner is not None and (found := self.method(owner, callee.attr)) is not None:  # type: ignore[attr-defined]
            return found
        if (kept := self.lambdas.get(self.place(script, callee) or ())) is not None:
            return kept
        name = script.qualified(callee)
        if name is None and isinstance(callee, ast.Name):
            scope = script.scopes[callee].owner(callee.id)
            if scope is not None and scope.node is not script.tree:
                inner = [n for n, s in script.scopes.items() if s is scope and isinstance(n, FUNCTIONS[:2]) and n.name == callee.id]
                return (script, inner[0]) if inner else None
            name = f"{script.module}.{callee.id}" if scope is not None else None
        if name in self.functions:
            return self.functions[name]
        return self.method(self.classes[name], "__init__") if name in self.classes else None

    def method(self, of: tuple[Script, ast.ClassDef], name: str) -> tuple[Script, Function] | None:
        """Return a method of a class of the project, or of a class of the project that it inherits from."""
        seen: set[ast.ClassDef] = set()
        todo = [of]
        while todo:
            script, node = todo.pop(0)
            if node in seen:
                continue
            seen.add(node)
            for one in node.body:
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name == name:
                    return script, one
            todo += [found for base in node.bases if (found := self._class(script, base)) is not None]
        return None

    def class_of(self, script: Script, expression: ast.AST) -> tuple[Script, ast.ClassDef] | None:
        """Return the class of the project that an object is of, where that is written down."""
        if isinstance(expression, ast.Call):
            made = self._class(script, expression.func)
            return made if made is not None else self._itself(script, expression.func)
        if isinstance(expression, ast.Name) and expression.id in ("self", "cls"):
            around = script.within(expression, ast.ClassDef)
            return (script, around) if isinstance(around, ast.ClassDef) else None
        place = self.place(script, expression)
        return None if place is None else self.instances.get(place)

    def _itself(self, script: Script, callee: ast.AST) -> tuple[Script, ast.ClassDef] | None:
        """Return the class of what a method returns, where that is the object itself."""
        owner = self.class_of(script, callee.value) if isinstance(callee, ast.Attribute) else None
        found = None if owner is None else self.method(owner, callee.attr)  # type: ignore[attr-defined]
        returns = [] if found is None else [node for node in ast.walk(found[1]) if isinstance(node, ast.Return)]
        return owner if any(isinstance(one.value, ast.Name) and one.value.id == "self" for one in returns) else None

    def _class(self, script: Script, name: ast.AST) -> tuple[Script, ast.ClassDef] | None:
        full = script.qualified(name)
        if full is None and isinstance(name, ast.Name):
            full = f"{script.module}.{name.id}"
        return self.classes.get(full or "")

    def is_foreign(self, script: Script, receiver: ast.AST) -> bool:
        """Return whether an object is of a class of the project that has nothing of PyTorch: its methods are its own."""
        found = self.class_of(script, receiver)
        return found is not None and not self._of_torch(*found, set())

    def _of_torch(self, script: Script, node: ast.ClassDef, seen: set[ast.ClassDef]) -> bool:
        """A class that inherits from another library's may be a module: what is not known is taken for one."""
        seen.add(node)
        for base in node.bases:
            inside = self._class(script, base)
            if inside is None:
                if script.qualified(base) not in (None, "abc.ABC", "enum.Enum", "typing.NamedTuple", "typing.Protocol"):
                    return True
            elif inside[1] not in seen and self._of_torch(*inside, seen):
                return True
        return False

    def is_own(self, script: Script, node: ast.Attribute) -> bool:
        """Return whether an attribute of an object is one that a class of the project gives it."""
        owner = self.class_of(script, node.value)
        return owner is not None and (not self._of_torch(*owner, set()) or self.method(owner, node.attr) is not None)

    # ---- where values are kept ----

    def place(self, script: Script, node: ast.AST) -> Place | None:
        """Return where an expression's value is kept; None for a value that is made there."""
        if isinstance(node, ast.Name):
            if (qualified := script.qualified(node)) is not None:
                return self._module_place(qualified)
            owner = script.scopes[node].owner(node.id)
            return None if owner is None else self._variable(owner.node, node.id)
        if isinstance(node, ast.Attribute):
            if (qualified := script.qualified(node)) is not None:
                return self._module_place(qualified)
            owned = self.class_of(script, node.value)
            if owned is not None:
                return "attribute", owned[1], node.attr
            of = node.value.func if isinstance(node.value, ast.Call) else node.value  # parser.parse_args().device
            asked = of is node.value or getattr(of, "attr", "") in ("parse_args", "parse_known_args")
            root = None if not asked else of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", None)
            return None if root is None else ("field", root, node.attr)
        if isinstance(node, ast.Subscript) and (key := _constant(node.slice)) is not None:
            inside = self.place(script, node.value)
            return None if inside is None else ("key", inside, key)
        return None

    def _variable(self, scope: ast.AST, name: str) -> Place:
        return ("attribute", scope, name) if isinstance(scope, ast.ClassDef) else ("name", scope, name)

    def _module_place(self, qualified: str) -> Place | None:
        """Return the variable of another module of the project."""
        module, _, name = qualified.rpartition(".")
        found = self.modules.get(module)
        return None if found is None else ("name", found.tree, name)

    def _note(self, script: Script, node: ast.AST) -> None:
        """Note what a statement keeps where."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._keep(script, target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            self._keep(script, node.target, node.value)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._keep(script, node.target, node.iter)
        elif isinstance(node, FUNCTIONS):
            self._note_function(script, node)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.values["return", script.within(node, FUNCTIONS)].append((script, node.value))
        elif isinstance(node, ast.Call):
            self._note_call(script, node)

    def _note_instance(self, script: Script, node: ast.AST) -> None:
        found: tuple[Script, ast.ClassDef] | None = None
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            places = [self.place(script, one) for one in node.targets]
            self.lambdas.update({place: (script, node.value) for place in places if place is not None})
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found = self.class_of(script, node.value)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            found = self._class(script, node.annotation)
        if found is not None:
            function = script.parents.get(script.parents.get(node)) if isinstance(node, ast.arg) else None  # type: ignore[arg-type]
            targets = node.targets if isinstance(node, ast.Assign) else []
            kept = [("name", function, node.arg)] if isinstance(node, ast.arg) else [self.place(script, one) for one in targets]
            self.instances.update({place: found for place in kept if place is not None})

    def _keep(self, script: Script, target: ast.AST, value: ast.AST) -> None:
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else None
        for key, one in self._fields(script, value) if name is not None else ():
            self.values["field", name, key].append((script, one))
        if isinstance(target, (ast.Tuple, ast.List)):
            for where, values in self._unpacked(script, value, len(target.elts)):
                for one, part in zip(target.elts, values, strict=True):
                    if where is script:
                        self._keep(script, one, part)
                    elif (place := self.place(script, one)) is not None:
                        self._put(where, place, part)
        elif (place := self.place(script, target)) is not None:
            self._put(script, place, value)

    def _fields(self, script: Script, value: ast.AST) -> list[tuple[object, ast.AST]]:
        """Return what an object is made with that keeps it under the same names: ``SimpleNamespace(device="cuda")``."""
        if not isinstance(value, ast.Call) or self.called(script, value.func) is not None:
            return []
        last = script.text(value.func).rpartition(".")[2]
        if last not in NAMESPACES:
            return []
        return [pair for given in (value, *value.args) for pair in _pairs(given) or _keywords(given)]

    def _unpacked(self, script: Script, value: ast.AST, length: int) -> list[tuple[Script, list[ast.AST]]]:
        """Return the parts of a value that is taken apart, for each way it is made; the value itself where nothing shows them."""
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == length:
            return [(script, [*value.elts])]
        found = self.called(script, value.func) if isinstance(value, ast.Call) else None
        if found is not None:
            where, function = found
            returns = [one for one in ast.walk(function) if isinstance(one, ast.Return)]
            made = [one.value for one in returns if where.within(one, FUNCTIONS) is function]
            tuples = [one for one in made if isinstance(one, ast.Tuple) and len(one.elts) == length]
            if tuples and len(tuples) == len(made):
                return [(where, [*one.elts]) for one in tuples]
        return [(script, [value] * length)]

    def _put(self, script: Script, place: Place, value: ast.AST) -> None:
        self.values[place].append((script, value))
        for key, one in _pairs(value) or ():
            if key is not None:
                self._put(script, ("key", place, key), one)

    def _note_function(self, script: Script, node: Function) -> None:
        given = node.args
        positional = [*given.posonlyargs, *given.args]
        pairs = [*zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)]
        pairs += [(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None]
        for argument, default in pairs:
            self.values["name", node, argument.arg].append((script, default))
        if isinstance(node, ast.Lambda):
            self.values["return", node].append((script, node.body))

    def _note_call(self, script: Script, call: ast.Call) -> None:
        named = {one.arg: one.value for one in call.keywords if one.arg is not None}
        if self.called(script, call.func) is not None:
            self._note_given(script, call.func, call.args, named)
            return
        self._note_fields(script, call)
        qualified, tuples = script.qualified(call.func) or "", (ast.Tuple, ast.List)
        given = named.get("args")
        values = given.elts if isinstance(given, tuples) else []
        if "target" in named:  # Process(target=work, args=(x, "cuda"), kwargs={"where": "cuda"})
            pairs = _pairs(named["kwargs"]) if "kwargs" in named else None
            self._note_given(script, named["target"], values, {str(key): value for key, value in pairs or ()})
        elif qualified.startswith("torch.multiprocessing.") and qualified.endswith("spawn"):  # behind the number of the process
            for work in [*call.args[:1], *(value for name, value in named.items() if name == "fn")]:
                self._note_given(script, work, [ast.Constant(0), *values], {})
        elif qualified == "functools.partial" and call.args:
            self._note_given(script, call.args[0], call.args[1:], named)

    def _note_given(self, script: Script, callee: ast.AST, values: Sequence[ast.AST], named: Mapping[str, ast.AST]) -> None:
        """Note what the parameters of a function of the project are given."""
        found = self.called(script, callee)
        if found is None:
            return
        function = found[1]
        positional = [*function.args.posonlyargs, *function.args.args]
        if isinstance(callee, ast.Attribute) or self._class(script, callee) is not None:
            positional = positional[1:] if positional and positional[0].arg in ("self", "cls") else positional
        for argument, value in zip(positional, values, strict=False):
            self.values["name", function, argument.arg].append((script, value))
        for name, value in named.items():
            self.values["name", function, name].append((script, value))

    def _note_fields(self, script: Script, call: ast.Call) -> None:
        """A class without ``__init__`` (a dataclass) keeps its arguments under their names."""
        owner = self._class(script, call.func)
        for keyword in call.keywords if owner is not None else ():
            if keyword.arg is not None:
                self.values["attribute", owner[1], keyword.arg].append((script, keyword.value))  # type: ignore[index]

    # ---- from places that take a device back to texts, and ahead to what is compared ----

    def origins(self, script: Script, node: ast.AST) -> Iterator[ast.AST | Place]:
        """Yield what a value is made of: texts as they are written, and places where it was kept."""
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            yield node
        elif isinstance(node, ast.BinOp):
            yield from self.origins(script, node.left)
        elif isinstance(node, ast.IfExp):
            yield from (*self.origins(script, node.body), *self.origins(script, node.orelse))
        elif isinstance(node, (ast.BoolOp, ast.Tuple, ast.List, ast.Set)):
            for one in node.values if isinstance(node, ast.BoolOp) else node.elts:
                yield from self.origins(script, one)
        elif isinstance(node, ast.Dict):  # map_location = {"cuda:0": "cuda:1"}
            for part in (*node.keys, *node.values):
                yield from self.origins(script, part) if part is not None else ()
        elif isinstance(node, (ast.NamedExpr, ast.Await, ast.Starred)):
            yield from self.origins(script, node.value)
        elif isinstance(node, ast.Call):
            yield from self._origins_of_call(script, node)
        elif (place := self.place(script, node)) is not None:
            yield place
            if place[0] == "field":
                yield self._option(script, place[2])
            if place[0] == "attribute":
                yield from (("attribute", base, place[2]) for base in self._bases(place[1]))
        elif isinstance(node, ast.Subscript):
            yield from self.origins(script, node.value)

    def _option(self, script: Script, name: object) -> Place:
        """Return an option of the command line: of the script's own if it has one of that name, else of any script's."""
        return "option", script.tree if name in self.options.get(script.tree, ()) else None, name

    def _bases(self, node: object) -> Iterator[ast.ClassDef]:
        for script, known in self.classes.values():
            if known is node:
                yield from (found[1] for base in known.bases if (found := self._class(script, base)) is not None)

    def _origins_of_call(self, script: Script, call: ast.Call) -> Iterator[ast.AST | Place]:
        found = self.called(script, call.func)
        if found is not None:
            yield "return", found[1]
        elif script.qualified(call.func) in MADE_OF or getattr(call.func, "id", None) in ("str", "getattr"):
            name = getattr(call.func, "id", None)
            if name == "getattr" and len(call.args) > 1 and (attribute := _constant(call.args[1])) is not None:
                yield self._option(script, attribute)
            for one in call.args[2:] if name == "getattr" else call.args:
                yield from self.origins(script, one)
            yield from (one for keyword in call.keywords for one in self.origins(script, keyword.value))
        elif isinstance(call.func, ast.Attribute):
            if call.func.attr in ("get", "pop", "setdefault") and call.args:
                inside, key = self.place(script, call.func.value), _constant(call.args[0])
                if inside is not None and key is not None:
                    yield "key", inside, key
                yield from (one for argument in call.args[1:] for one in self.origins(script, argument))
            elif call.func.attr in PASSED_ON:
                yield from self.origins(script, call.func.value)

    def _back(self, wanted: list[tuple[Script, ast.AST, Kind]]) -> None:
        followed: set[tuple[Place, ast.AST]] = set()
        while wanted:
            script, expression, kind = wanted.pop()
            for origin in self.origins(script, expression):
                if not isinstance(origin, tuple):
                    if _shape(script, origin, kind):
                        self.literals[origin] = kind
                    continue
                self.reached.setdefault(origin, kind)
                for where, value in self.values.get(origin, ()):
                    if (origin, value) not in followed and not self._overwritten(script, expression, origin, value):
                        followed.add((origin, value))
                        wanted.append((where, value, kind))

    def _overwritten(self, script: Script, expression: ast.AST, place: Place, value: ast.AST) -> bool:
        """Return whether a variable has another value for certain where it is read: it was assigned again in between."""
        if place[0] != "name":
            return False
        reads = [n for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id == place[2] and n in script.scopes]
        return bool(reads) and all(self._assigned_again(script, read, place, value) for read in reads)

    def _assigned_again(self, script: Script, read: ast.AST, place: Place, value: ast.AST) -> bool:
        first = script.parents.get(value)
        if not isinstance(first, ast.Assign) or script.scopes[read].node is not place[1]:
            return False
        block = script.block(first)
        around = next((one for one in block if one is read or script.is_within(read, one)), None)
        if around is None:
            return False
        between = block[block.index(first) + 1 : block.index(around)]
        return any(isinstance(one, ast.Assign) and any(self.place(script, to) == place for to in one.targets) for one in between)

    def _ahead(self) -> None:
        """Reach the places that are made of what was reached: ``kind = device.split(":")[0]``."""
        before = -1
        while before != len(self.reached):
            before = len(self.reached)
            for place, values in list(self.values.items()):
                if place not in self.reached:
                    kind = next((kind for where, value in values if (kind := self.kind(where, value)) is not None), None)
                    if kind is not None:
                        self.reached[place] = kind

    def kind(self, script: Script, expression: ast.AST) -> Kind | None:
        """Return what a value is: a device, a backend; None where nothing shows it, or no rule has a place that takes one."""
        if not self.rules.sink:
            return None
        if isinstance(expression, ast.Attribute) and expression.attr in ("type", "device") and script.qualified(expression) is None:
            if expression.attr == "device" and self.is_foreign(script, expression.value):
                return self.reached.get(self.place(script, expression) or ())
            if expression.attr == "device" or self.kind(script, expression.value) == "device":
                return "device"
        inner = _inner(expression)
        if inner is not None and (found := self.kind(script, inner)) is not None:
            return found
        if isinstance(expression, ast.Call) and script.qualified(expression.func) == "torch.device":
            return "device"
        if isinstance(expression, ast.Call) and self._asks_type(script, expression):
            return "type"
        if isinstance(expression, ast.Call) and script.qualified(expression.func) == "torch.distributed.get_backend":
            return "backend"
        for origin in self.origins(script, expression):
            found = self.reached.get(origin) if isinstance(origin, tuple) else self.literals.get(origin)
            if found is not None:
                return found
        return None


    def _asks_type(self, script: Script, call: ast.Call) -> bool:
        """``x.type()`` of a tensor is the name of its type."""
        method = call.func
        if not isinstance(method, ast.Attribute) or method.attr != "type" or call.args or call.keywords:
            return False
        if script.qualified(method) is not None:
            return False
        return self.called(script, method) is None and not self.is_foreign(script, method.value)


def _inner(node: ast.AST) -> ast.AST | None:
    """Return the value that a text is made of: of ``str(x)``, ``x.split(":")``, ``x[0]``."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "str" and node.args:
        return node.args[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PASSED_ON:
        return node.func.value
    return node.value if isinstance(node, ast.Subscript) else None


def _pairs(value: ast.AST) -> list[tuple[object, ast.AST]] | None:
    """Return keys and values of a dict that is written out, a key that is computed as None; None for anything else."""
    if isinstance(value, ast.Dict):
        return [(_constant(key), one) for key, one in zip(value.keys, value.values, strict=True)]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        return [(keyword.arg, keyword.value) for keyword in value.keywords]
    return None


def _keywords(node: ast.AST) -> list[tuple[object, ast.AST]]:
    return [(one.arg, one.value) for one in node.keywords] if isinstance(node, ast.Call) else []


def _constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def option_of(call: ast.Call) -> str | None:
    """Return the name under which an option of argparse or click is kept; None for a call that adds none."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("add_argument", "option"):
        return None
    for keyword in call.keywords:
        if keyword.arg == "dest" and isinstance(name := _constant(keyword.value), str):
            return name
    flags = [one for argument in call.args if isinstance(one := _constant(argument), str)]
    long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else None)
    return None if long is None else long.lstrip("-").replace("-", "_")


def is_translated(script: Script, call: ast.Call, kind: Kind) -> bool:
    """Return whether the words of an option are translated where they come in: those of a device are, of a backend where the script
    names NCCL, and none where it has a ``type`` of its own."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "type" in given and script.text(given["type"]) != "str":
        return False
    words = [one for name in ("choices", "default") if name in given for one in ast.walk(given[name])]
    return kind == "device" or any(isinstance(one, ast.Constant) and "nccl" in str(one.value) for one in words)


def _shape(script: Script, node: ast.AST, kind: Kind) -> bool:
    """Return whether a text reads as such a value."""
    if isinstance(node, ast.JoinedStr):
        inside = literal(script.text(node))
        return kind == "device" and (inside == "cuda" or inside.startswith("cuda:"))
    value = _constant(node)
    return isinstance(value, str) and SHAPES[kind].fullmatch(value) is not None


def literal(text: str) -> str:
    """Return what stands between the quotes of a text as it is written."""
    return re.sub(r"^[a-zA-Z]*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", text)
