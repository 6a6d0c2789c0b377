"""The changes of one script: which bytes become which, by which rule; and what has the letters and stays, with the reason."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trueup.foundation.frameworks.cuda_version import read_as_text
from trueup.migration.port.flow import SHAPES, Project, is_translated, literal, option_of
from trueup.migration.port.reading import FUNCTIONS, Script, behind_imports, roots
from trueup.migration.port.remaining import GUARD, Kernels, Left, from_outside, remaining
from trueup.migration.port.rules import Kind, Name, Own

NO_VERSION = "None in a build for another device, and read as a text here"
FIRST_PART = re.compile(r"(\w*)(\"\"\"|'''|\"|')(.*?)\2", re.DOTALL)
"""The first of the texts that stand side by side: its prefix, its quotes, what it says."""
SIGN = re.compile(rb"(?:[\s\\)]|#[^\r\n]*)*(==|!=|not\s+in|in|is\s+not|is)")
OF_CUDA = "the name of a type of CUDA's: say dtype= and device= in its place"
ASKING = {"comparison", "cuda-version", "variable"}
"""Rules of changes that only ask about a device, or name a variable: who made the device has imported its module."""
NUMBER = "each process, or DEVICE_ID, chooses the device: a number would choose it again"


@dataclass(frozen=True)
class Edit:
    """Bytes ``start`` to ``end`` of a script become a text."""

    start: int
    end: int
    text: str
    rule: str
    why: str


class Writer:
    """Finds the changes of a script. ``edits`` and ``left`` are what it found."""

    def __init__(
        self, project: Project, script: Script, target: str, own: Own, more: Sequence[Edit] = (), kernels: Kernels | None = None
    ) -> None:
        self.project, self.script, self.rules, self.own = project, script, project.rules, own
        self.name, self.target = target, self.rules.target[target]
        self.edits: list[Edit] = []
        self._reasons: dict[int, tuple[str, bool]] = {}  # by the byte where it begins
        self._torch = False  # whether a name that was written needs `import torch`
        self._called = script.called("torch")
        joined = [node for node in script.scopes if isinstance(node, ast.JoinedStr)]
        self._formatted = [script.span(node) for node in joined if '"' in script.text(node)[:3]]
        guards = set() if kernels is None else kernels.guards(script)
        for node in script.scopes:
            if node in guards:
                self._reasons.setdefault(script.span(node)[0], (GUARD, False)) if hasattr(node, "lineno") else None
            elif node not in script.misplaced:
                self._visit(node)
        self._imports(more)
        self.edits += more
        self.edits.sort(key=lambda edit: (edit.start, edit.end))
        self.left = remaining(project, script, [(edit.start, edit.end) for edit in self.edits], self._reasons, kernels)
        for value, reason in from_outside(project, script, target):
            self.left.append(Left(value.lineno, script.text(value)[:200], reason, look=True))  # type: ignore[attr-defined]

    @cached_property
    def text(self) -> bytes:
        """Return the script with its changes, in its encoding; raises UnicodeEncodeError where that lacks what is to be written."""
        parts, last = [], 0
        for edit in self.edits:
            parts += [self.script.data[last : edit.start], edit.text.encode()]
            last = edit.end
        return self.script.encoded(b"".join([*parts, self.script.data[last:]]))

    # ---- one node ----

    def _visit(self, node: ast.AST) -> None:
        if node in self.project.literals:
            self._literal(node)
        elif isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(self.script.parents.get(node), ast.Attribute):
            self._chain(node)
        elif isinstance(node, ast.Import):
            self._import(node)
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node)
        elif isinstance(node, ast.Compare):
            self._comparison(node)
        elif isinstance(node, ast.Constant) and node.value in self.rules.variable:
            self._variable(node)
        elif isinstance(node, ast.Subscript):
            self._looked_up(node)
        elif isinstance(node, ast.Match):
            self._cases(node)
        if isinstance(node, ast.Call):
            self._method(node)
            self._number(node)
            self._option(node)
            self._begins(node)
            self._switches(node)
            self._own_call(node)

    def _edit(self, start: int, end: int, text: str, rule: str, why: str) -> None:
        if any(first < start < last for first, last in self._formatted):
            text = text.replace('"', "'")  # before Python 3.12 a formatted text holds none of its own quotes
        if self._called is not None and rule != "own":
            text = re.sub(r"(?<![\w.\"'])torch\.", f"{self._called}.", text)
        self._torch = self._torch or (self._called is None and "torch." in text)
        self.edits.append(Edit(start, end, text, rule, why))

    def _own_call(self, call: ast.Call) -> None:
        """A user's rules for functions and their arguments."""
        qualified = self.script.qualified(call.func)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else None
        for given in self.own.rules.argument:
            if given.takes(qualified, method):
                named = [one.value for one in call.keywords if one.arg is not None and one.arg == given.keyword]
                at = given.position
                for value in named or (call.args[at : at + 1] if at is not None else []):
                    if self.script.text(value) != given.becomes:
                        self._edit(*self.script.span(value), given.becomes, given.id, "your rule")
        imported = isinstance(call.func, ast.Name) and qualified is not None
        written = qualified if imported and qualified is not None else self.script.text(call.func)
        names = {written, written.rpartition(".")[2], qualified}
        for function in self.own.converters.FuncNameModifyRule:
            if function.old_name in names and not (imported and "." not in function.new_name):  # else it is renamed at its import
                start, end = self.script.span(call.func)
                whole = function.old_name == written or isinstance(call.func, ast.Name) or "." in function.new_name
                self._edit(start if whole else end - len(function.old_name.encode()), end, function.new_name, "own", "your rule")
        for one in self.own.converters.ArgsModifyRule:
            given_there = call.args[one.arg_idx : one.arg_idx + 1] if one.func_name in names else []
            for value in given_there:
                if self.script.text(value) != one.arg_new:
                    self._edit(*self.script.span(value), one.arg_new, "own", "your rule")

    def _own_module(self, chain: ast.AST | None) -> bool:
        """Rename the module in a chain of names; what ``from`` or ``as`` imported has its new name from there."""
        while isinstance(chain, (ast.Name, ast.Attribute)):
            qualified = self.script.qualified(chain)
            for module in self.own.converters.ModuleNameModifyRule:
                if qualified == module.full and (isinstance(chain, ast.Attribute) or chain.id == module.full):
                    end = self.script.span(chain)[1]
                    self._edit(end - len(module.old_name.rpartition(".")[2].encode()), end, module.new_name, "own", "your rule")
                    return True
            chain = chain.value if isinstance(chain, ast.Attribute) else None
        return False

    def _chain(self, node: ast.AST) -> None:
        """A name, or a chain of names, that means something under torch.cuda."""
        chain: ast.AST | None = node
        if self._own_module(node):
            return None
        while isinstance(chain, (ast.Name, ast.Attribute)):
            qualified = self.script.qualified(chain)
            if qualified in self.rules.names:
                return self._named(chain, *self.rules.names[qualified])
            if qualified == self.rules.known.get("cuda-version", 0) and read_as_text(chain, self.script.parents):
                self._edit(*self.script.span(chain), f'({self.script.text(chain)} or "0.0")', "cuda-version", NO_VERSION)
                return None
            if qualified in self.rules.stays:
                stays = self.rules.stays[qualified]
                self._reasons[self.script.span(chain)[0]] = stays.reason, stays.unsupported
                return None
            if isinstance(chain, ast.Attribute) and chain.attr == self.rules.known.get("is-cuda") and qualified is None:
                return self._is_cuda(chain)
            chain = chain.value if isinstance(chain, ast.Attribute) else None
        qualified = self.script.qualified(node) or ""
        if qualified.startswith("torch.cuda."):
            self._reasons[self.script.span(node)[0]] = f"{qualified} is in no table: nobody knows what it is elsewhere", True
        return None

    def _new_name(self, rule: Name, name: str) -> str | None:
        text = rule.npu if self.name == "npu" else rule.agnostic
        return None if text is None else self.target.fill(text, name)

    def _named(self, node: ast.Name | ast.Attribute, rule: Name, name: str) -> None:
        new = self._new_name(rule, name)
        start, end = self.script.span(node)
        if new is None:
            self._reasons[start] = "no name for it runs on every device", True
            return
        imported_itself = isinstance(node, ast.Name)
        why = f"{rule.under}.{name}"
        if not (imported_itself and _importable(new)):
            if new != why:
                self._edit(start, end, new, rule.id, why)
        elif new.rpartition(".")[2] != name.rpartition(".")[2] and not self._renamed(node.id):  # type: ignore[union-attr]
            self._edit(start, end, new.rpartition(".")[2], rule.id, why)
        call = self.script.parents.get(node)
        if isinstance(call, ast.Call) and call.func is node:
            self._arguments(call, rule, why)
        elif rule.keyword and node in getattr(call, "decorator_list", ()):
            self._edit(end, end, f"({self.target.fill(rule.keyword)})", rule.id, why)

    def _renamed(self, local: str) -> bool:
        """Return whether a name was imported under another one, which stays."""
        return any(alias.asname == local for node in self.script.scopes if isinstance(node, ast.ImportFrom) for alias in node.names)

    def _arguments(self, call: ast.Call, rule: Name, why: str) -> None:
        """The device as an argument more, and names for arguments that would stand in another place behind it."""
        added = rule.first or rule.keyword
        if rule.keyword and any(one.arg == rule.keyword.partition("=")[0] for one in call.keywords):
            return  # it was ported before
        given = self.script.arguments(call)
        if added is not None:
            added = self.target.fill(added)
            if rule.first:
                opening = self.script.opening(call)
                self._edit(opening, opening, added + (", " if given else ""), rule.id, why)
            else:
                behind = self.script.behind_arguments(call)
                self._edit(behind, behind, (", " if given else "") + added, rule.id, why)
        for argument, name, (start, _) in zip(call.args, rule.positional, given, strict=False):
            if not isinstance(argument, ast.Starred):
                self._edit(start, start, f"{name}=", rule.id, why)

    def _is_cuda(self, node: ast.Attribute) -> None:
        if self.project.is_own(self.script, node) or not isinstance(node.ctx, ast.Load):
            self._reasons[self.script.span(node)[0]] = "an attribute of a class of the script's own", False
            return
        start, end = self.script.span(node)
        if self.name == "npu":
            self._edit(end - len("is_cuda"), end, "is_npu", "is-cuda", "Tensor.is_cuda")
        else:
            self._edit(start, start, "(", "is-cuda", "Tensor.is_cuda")
            self._edit(end - len("is_cuda"), end, 'device.type != "cpu")', "is-cuda", "Tensor.is_cuda")

    def _method(self, call: ast.Call) -> None:
        """``x.cuda(...)`` of a tensor or a module."""
        function = call.func
        if (
            not isinstance(function, ast.Attribute)
            or function.attr != self.rules.known.get("to-device")
            or self.script.qualified(function) is not None
        ):
            return
        start, end = self.script.span(function)
        found = self.project.called(self.script, function)
        if found is not None or self.project.is_foreign(self.script, function.value):
            self._reasons[start] = "a method of a class of the script's own", False
            return
        device = call.args[0] if call.args else next((one.value for one in call.keywords if one.arg == "device"), None)
        if self._is_number(device) and call.args:
            last = min([self.script.span(call)[1] - 1, *(self.script.span(one)[0] for one in call.keywords)])
            self._edit(self.script.span(call.args[0])[0], last, "", "to-device", NUMBER)
            device = None
        if self.name == "npu":
            self._edit(end - 4, end, "npu", "to-device", "Tensor.cuda, Module.cuda")
            return
        self._edit(end - 4, end, "to", "to-device", "Tensor.cuda, Module.cuda")
        if device is None:
            opening = self.script.opening(call)
            text = self.target.here + (", " if call.keywords else "")
            self._edit(opening, opening, text, "to-device", "the device that is there")
        elif not isinstance(device, (ast.Call, ast.JoinedStr)) and not self._is_some(device):
            first, text = self.script.span(device)[0], self.script.text(device)
            self._edit(first, first, f"{self.target.here} if {text} is None else ", "to-device", "None is the device there is")

    def _is_number(self, node: ast.AST | None) -> bool:
        """Return whether a device's number is written down, where each process or a variable has its own."""
        return isinstance(node, ast.Constant) and type(node.value) is int and not self.project.numbered(self.script)

    def _number(self, call: ast.Call) -> None:
        qualified = self.script.qualified(call.func)
        numbers = [one for one in call.args if self._is_number(one)]
        if qualified == "torch.device" and call.args[1:] == numbers != []:
            self._edit(self.script.span(call.args[0])[1], self.script.span(numbers[0])[1], "", "to-device", NUMBER)
        elif qualified in ("torch.cuda.set_device", "torch.cuda.device") and numbers:
            current, _ = self.rules.names["torch.cuda.current_device"]
            self._edit(*self.script.span(numbers[0]), f"{self._new_name(current, 'current_device')}()", "to-device", NUMBER)

    def _is_some(self, node: ast.AST) -> bool:
        """Return whether an argument is a device for certain, and no None."""
        place = self.project.place(self.script, node)
        values = self.project.values.get(place, []) if place is not None else []
        made = [where.qualified(one.func) for where, value in values for one in ast.walk(value) if isinstance(one, ast.Call)]
        return isinstance(node, ast.Constant) or "torch.device" in made

    # ---- texts that are devices ----

    def _literal(self, node: ast.AST) -> None:
        kind, script = self.project.literals[node], self.script
        text = script.text(node)
        if self._ported(node):
            self._reasons[script.span(node)[0]] = "ported already: a device on any machine", False
            return
        if self._in_option(node) or isinstance(script.parents.get(node), ast.Compare):
            return
        start, end = script.span(node)
        inside = str(node.value) if isinstance(node, ast.Constant) else literal(text)
        if "cuda" not in text and kind == "device":  # "cu" "da:0"
            text = f'"{inside}"'
        if kind == "type":
            if self.name == "npu" and inside.removeprefix("torch.cuda.") != "DoubleTensor":
                self._edit(start, end, text.replace("torch.cuda", "torch.npu"), "type-name", "the name of a type on the device")
            else:
                self._reasons[start] = OF_CUDA, True
        elif kind == "backend":
            whole = inside.lower() == "nccl" or self.name == "agnostic"
            new = self.target.backend if whole else text.lower().replace("cuda:nccl", "npu:hccl")
            self._edit(start, end, new, "backend", "the backend of a process group")
        elif inside == "cuda" or (not self.project.numbered(self.script) and re.fullmatch(r"cuda:\d+", inside)):
            owner = script.parents.get(node)
            made = isinstance(owner, ast.Call) and script.qualified(owner.func) == "torch.device" and owner.args == [node]
            new = f'{self.target.here} or "cuda"' if made and self.name == "agnostic" else self.target.device
            self._edit(start, end, _quoted_as(text, new), "device", self._reach(node))
        elif (
            isinstance(node, ast.JoinedStr)
            and self.name != "npu"
            and (first := FIRST_PART.match(text))
            and "f" not in first[1].lower()
        ):
            if set(first[3]) & set("{}") or first[1].lower() == "u":
                self._reasons[start] = "written in parts, the first with braces: say the device that is there", True
                return
            at = start + len(text[: first.start(3)].encode())
            self._edit(start, start, "f", "device", self._reach(node))
            self._edit(at, at + 4, self.target.word, "device", self._reach(node))
        elif isinstance(node, ast.JoinedStr) or (self.name == "npu" and "cuda" in script.text(node)):
            at = start + text.encode().index(b"cuda")
            self._edit(at, at + 4, self.target.word, "device", self._reach(node))
        elif self.name == "npu":
            self._edit(start, end, text.replace("cuda", self.target.word, 1), "device", self._reach(node))
        else:  # "cuda:0", "cuda:%d" % rank, "cuda:{}".format(rank): a formatted text would read our braces
            new = f"{self.target.device} + {text.replace('cuda', '', 1)}"
            alone = isinstance(script.parents.get(node), (ast.Call, ast.keyword, ast.Assign, ast.AnnAssign))
            self._edit(start, end, new if alone else f"({new})", "device", self._reach(node))

    def _reach(self, node: ast.AST) -> str:
        call = self.script.within(node, ast.Call)
        name = self.script.text(call.func) if isinstance(call, ast.Call) else ""
        known = name and "\n" not in name
        return f"a device: it is an argument of {name}" if known else "a device: it reaches a call that takes one"

    def _ported(self, node: ast.AST) -> bool:
        """``current_accelerator() or "cuda"`` is a device on any machine."""
        outer = self.script.parents.get(node)
        return isinstance(outer, ast.BoolOp) and any("current_accelerator" in self.script.text(one) for one in outer.values)

    def _in_option(self, node: ast.AST) -> bool:
        call = self.script.within(node, ast.Call)
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"

    def _comparison(self, node: ast.Compare) -> None:
        """``device.type == "cuda"``, ``"cuda" in device``: the same question about the device that is there."""
        if len(node.ops) != 1:
            return
        left, operator, right = node.left, node.ops[0], node.comparators[0]
        word, other = (left, right) if isinstance(left, ast.Constant) else (right, left)
        kind = self.project.kind(self.script, other) if isinstance(word, ast.Constant) else None
        if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            self._one_of(left, right)
        if kind is None or not isinstance(word.value, str) or SHAPES[kind].fullmatch(word.value) is None:  # type: ignore[attr-defined]
            return
        start, end = self.script.span(word)
        why = f"{self.script.text(other)} is a {kind}"
        if kind == "backend":
            self._edit(start, end, self.target.backend, "comparison", why)
        elif kind == "type" and self.name == "agnostic":
            self._reasons[start] = OF_CUDA, True
        elif self.name == "npu":
            text = self.script.text(word)
            self._edit(start, end, text.replace("cuda", "npu"), "comparison", why)
        elif word.value == "cuda":  # type: ignore[attr-defined]
            signs = {ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "!=", ast.IsNot: "=="}
            between = self._sign(self.script.span(left)[1], self.script.span(right)[0])
            self._edit(start, end, '"cpu"', "comparison", why)
            self._edit(*between, signs[type(operator)], "comparison", why)
        else:
            self._edit(start, end, f"{self.target.device} + {self.script.text(word).replace('cuda', '', 1)}", "comparison", why)

    def _sign(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the sign between two expressions, with which brackets and comments may stand."""
        found = SIGN.match(self.script.data, start, end)
        return (start, end) if found is None else found.span(1)

    def _one_of(self, value: ast.AST, words: ast.Tuple | ast.List | ast.Set) -> None:
        if self.project.kind(self.script, value) == "device":
            for word in words.elts:
                if isinstance(word, ast.Constant) and word.value == "cuda":
                    self._edit(*self.script.span(word), self.target.device, "comparison", f"{self.script.text(value)} is a device")

    def _looked_up(self, node: ast.Subscript) -> None:
        """``{"cuda": 8, "cpu": 2}[device.type]``: a device is what it is looked up by."""
        if self.project.kind(self.script, node.slice) != "device":
            return
        place = self.project.place(self.script, node.value)
        values = [value for where, value in self.project.values.get(place or (), ()) if where is self.script]
        for table in (node.value, *values):
            for key in table.keys if isinstance(table, ast.Dict) else ():
                span = self.script.span(key) if isinstance(key, ast.Constant) and key.value == "cuda" else None
                if span is not None and all((edit.start, edit.end) != span for edit in self.edits):
                    new = _quoted_as(self.script.text(key), self.target.device)  # type: ignore[arg-type]
                    self._edit(*span, new, "comparison", "it is looked up by a device")

    def _cases(self, node: ast.Match) -> None:
        if self.project.kind(self.script, node.subject) != "device":
            return
        for value in [one.value for case in node.cases for one in ast.walk(case.pattern) if isinstance(one, ast.MatchValue)]:
            if isinstance(value, ast.Constant) and value.value == "cuda":
                start, end = self.script.span(value)
                if self.name == "npu":
                    new = _quoted_as(self.script.text(value), self.target.device)
                    self._edit(start, end, new, "comparison", "it is compared with a device")
                else:
                    self._reasons[start] = "a case is a fixed text: write it as an if, with the device that is there", True

    def _option(self, call: ast.Call) -> None:
        """An option of the command line that is a device keeps its words: what is given is translated where it comes in."""
        kind = self._kind_of_option(call)
        if kind is not None and kind != "type" and is_translated(self.script, call, kind):
            self._translated(call, kind)

    def _kind_of_option(self, call: ast.Call) -> Kind | None:
        name, reached, function = option_of(call), self.project.reached, self.script.parents.get(call)
        if name is not None and isinstance(function, FUNCTIONS[:2]):  # click: an option is a parameter
            return reached.get(("name", function, name))
        return reached.get(("option", self.script.tree, name)) or reached.get(("option", None, name))

    def _translated(self, call: ast.Call, kind: str) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        choices = given.get("choices")
        words = [node for node in ast.walk(choices) if isinstance(node, ast.Constant)] if choices is not None else []
        default = given.get("default")
        old, new = ("cuda", self.target.device) if kind == "device" else ("nccl", self.target.backend)
        kinds = given.get("type")
        function, why = f'lambda name: name.replace("{old}", {new})', f"command lines keep their words: {old} is translated"
        if kinds is not None:
            self._edit(*self.script.span(kinds), function, "option", why)
        else:
            end = self.script.behind_arguments(call)
            self._edit(end, end, f", type={function}", "option", why)
        for word in words:
            if word.value == old:
                self._edit(*self.script.span(word), new, "option", why)
        for one in (default, *words):
            if one is not None:
                self._reasons.setdefault(self.script.span(one)[0], ("a word of the command line, translated by its type", False))

    def _switches(self, call: ast.Call) -> None:
        """``use_cuda=True`` names the device instead."""
        qualified = self.script.qualified(call.func)
        for rule in self.rules.switch if qualified is not None else ():
            for keyword in call.keywords if qualified in rule.calls else ():
                text = self.script.text(keyword.value)
                if keyword.arg != rule.keyword or text == "False":
                    continue
                start, end = self.script.span(keyword)
                new, why = f"{rule.becomes}={self.target.device}", f"{rule.keyword} of {qualified}"
                if text == "True":
                    self._edit(start, end, new, rule.id, why)
                else:
                    self._edit(start, self.script.span(keyword.value)[0], f"{new} if ", rule.id, why)
                    self._edit(end, end, " else None", rule.id, why)

    def _begins(self, call: ast.Call) -> None:
        """``device.startswith("cuda")``."""
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "startswith" or len(call.args) != 1:
            return
        word = call.args[0]
        if not isinstance(word, ast.Constant) or word.value not in ("cuda", "cuda:"):
            return
        if self.project.kind(self.script, function.value) != "device":
            return
        why = f"{self.script.text(function.value)} is a device"
        if self.name == "npu":
            self._edit(*self.script.span(word), self.script.text(word).replace("cuda", "npu"), "comparison", why)
        else:
            start, end = self.script.span(call)
            self._edit(start, start, "(not ", "comparison", why)
            self._edit(*self.script.span(word), '"cpu"', "comparison", why)
            self._edit(end, end, ")", "comparison", why)

    def _variable(self, node: ast.Constant) -> None:
        call = self.script.parents.get(node)
        if isinstance(call, ast.keyword):
            call = self.script.parents.get(call)
        place = call.value if isinstance(call, ast.Subscript) else call.func if isinstance(call, ast.Call) else None
        qualified = self.script.qualified(place) if place is not None else None
        if qualified is None or not qualified.startswith("os."):
            return
        if self.name == "npu":
            text = self.script.text(node).replace(str(node.value), self.rules.variable[str(node.value)])
            self._edit(*self.script.span(node), text, "variable", "a variable of the environment of another device")
        else:
            self._reasons[self.script.span(node)[0]] = "a variable that only CUDA reads: other devices have others", False

    # ---- imports ----

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if (new := self.own.converters.new_name(alias.name)) is not None:
                start = self.script.span(alias)[0]
                self._edit(start, start + len(alias.name.encode()), new, "own", "your rule")

    def _import_from(self, node: ast.ImportFrom) -> None:
        """``from torch.cuda.amp import autocast``: names that have another module now."""
        module = "." * node.level + (node.module or "")
        where: list[tuple[ast.alias, str, str]] = []
        changed: list[str] = []
        for alias in node.names:
            qualified = f"{node.module}.{alias.name}"
            rule = self.rules.names.get(qualified) if not node.level else None
            own, new = self.own.converters.new_name(qualified), self._new_name(*rule) if rule is not None else None
            if own is not None:
                changed.append("own")
                of, _, name = own.rpartition(".")
                kept = alias.asname or alias.name
                where.append((alias, module if node.level else of, name if name == kept else f"{name} as {kept}"))
                continue
            of, name = module, alias.name
            if new is not None and rule is not None:
                changed.append(rule[0].id)
                if not _importable(new):
                    continue  # written out where it is used
                of, _, name = new.rpartition(".")
            elif (stays := self.rules.why_stays(qualified)) is not None and not node.level:
                self._reasons[self.script.span(node)[0]] = stays.reason, stays.unsupported
            where.append((alias, of, name if alias.asname is None else f"{name} as {alias.asname}"))
        if changed:
            self._moved(node, where, changed[0])

    def _moved(self, node: ast.ImportFrom, where: Sequence[tuple[ast.alias, str, str]], rule: str) -> None:
        """Write an import anew: its parts where all names have one module, else a line for each module."""
        (start, end), why = self.script.span(node), "what it imports stands elsewhere"
        modules = dict.fromkeys(module for _, module, _ in where)
        if len(modules) == 1 and len(where) == len(node.names):
            written = re.compile(rb"from\s+([\w.]+)").match(self.script.data, start)
            if written is not None:
                parts = [(written.span(1), where[0][1]), *((self.script.span(alias), name) for alias, _, name in where)]
                for (first, last), text in parts:
                    if self.script.data[first:last].decode() != text:
                        self.edits.append(Edit(first, last, text, rule, why))
                return
        indent = self.script.data[self.script.line_start(node.lineno) : start].decode()
        lines = self._comments(node)
        lines += [f"from {one} import {', '.join(name for _, of, name in where if of == one)}" for one in modules]
        lines += [] if modules else ["import torch"]
        self.edits.append(Edit(start, end, f"{self.script.newline}{indent}".join(lines), rule, why))

    def _comments(self, node: ast.stmt) -> list[str]:
        """Return the comments between the lines of a statement."""
        lines = iter(self.script.text(node).splitlines(keepends=True))
        return [one.string for one in tokenize.generate_tokens(lambda: next(lines, "")) if one.type == tokenize.COMMENT]

    def _imports(self, more: Sequence[Edit]) -> None:
        """Import what was written: torch where only parts of it were imported, and torch_npu behind it."""
        placing = any(".set_device(" in edit.text for edit in more)
        if not self.edits and not placing:
            return
        top = [node for node in self.script.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        guarded = [node for node in self.script.tree.body if isinstance(node, (ast.If, ast.Try))]
        top += [one for node in guarded for one in node.body if isinstance(one, ast.Import)]  # if ...: import torch_npu
        modules = {alias.name: node for node in top if isinstance(node, ast.Import) for alias in node.names if alias.asname is None}
        brought = self.script.starred and any(isinstance(node, ast.Name) and node.id == "torch" for node in self.script.scopes)
        needed = [] if "torch" in modules or brought or not self._torch else ["torch"]
        asks = {edit.rule for edit in self.edits} <= ASKING and not placing
        if self.target.imports and self.target.imports not in modules and not asks:
            needed.append(self.target.imports)
        used = {edit.rule for edit in self.edits}
        asked = dict.fromkeys(one.imports for one in self.rules.name if one.id in used and one.imports)
        needed += [name for name in asked if name not in modules]
        anchors = [node for node in top if "torch" in roots(node)]
        if not needed or not (anchors or brought or "torch" in needed):
            return
        lines = "".join(f"import {name}\n" for name in needed)
        at = behind_imports(self.script)
        if not self.script.data[:at].endswith((b"\n", b"\r")) and at:
            lines = "\n" + lines
        self.edits.append(Edit(at, at, lines.replace("\n", self.script.newline), "import", "what the changes need"))


def _importable(name: str) -> bool:
    return "(" not in name


def _quoted_as(old: str, new: str) -> str:
    """Return a new text with the old one's quotes, where it is a text alone."""
    return f"'{new[1:-1]}'" if old.startswith("'") and re.fullmatch(r'"\w+"', new) else new
