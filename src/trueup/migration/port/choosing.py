"""`--also`: edits that change numbers, done only when asked for. Each says what it does to batch, steps and learning rate."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from trueup.foundation.model import UsageError
from trueup.migration.port.distributing import first_statement, is_loader, is_trained_on
from trueup.migration.port.flow import Place, Project
from trueup.migration.port.reading import Script, behind_imports
from trueup.migration.port.writing import Edit

STAY = "batch, steps and learning rate stay"
EFFECTS = {
    "int32-labels": "labels of a cross entropy are int32 on the NPU, as CANN 5 wanted them (today's NPU takes int64); "
    f"elsewhere they stay int64, which the CPU and CUDA require; {STAY}",
    "drop-last": "the last batch of an epoch is left out where it is not full, so that shapes are fixed: an epoch has "
    "floor(samples / batch) steps, up to batch - 1 of its samples are not trained on, and a schedule that counts steps ends later",
    "shuffle-validation": "validation data come in another order each time: figures over all of them stay, those over a part do "
    f"not; {STAY}",
    "float32": f"float64 becomes float32: 7 digits in the place of 16, for devices that compute no float64; {STAY}",
    "one-device": "torch.nn.DataParallel is taken off, which no NPU runs: one device computes the whole batch, "
    f"BatchNorm over all of it; {STAY}",
    "similar": "functions that the device lacks become some that do nearly the same (apex's layers and optimizers are PyTorch's, "
    f"CUDA graphs the NPU's): rounding and speed differ; {STAY}",
    "specify-device": "DEVICE_ID=3 python train.py runs on device 3, and numbers of devices in the scripts are left out: a "
    f"training of several processes would put all on one; {STAY}",
    "no-jit": f"what torch.jit compiles runs as Python: the same operators, not fused, and slower; {STAY}",
}
"""The edits, and what each does to the numbers."""
LOSSES = {"torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss"}
LOSS_CLASSES = {"torch.nn.CrossEntropyLoss", "torch.nn.NLLLoss"}
DATA_PARALLEL = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel"}
DISTRIBUTED = {"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"}
MOVES = {"cuda", "npu", "to", "train", "eval", "float", "half", "double"}
"""Methods of a module that return the module."""
DOUBLE = {"torch.float64": "torch.float32", "torch.double": "torch.float32", "torch.DoubleTensor": "torch.FloatTensor"}


def checked(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of edits, each once; raises UsageError for one that there is not."""
    wanted = tuple(dict.fromkeys(name.strip() for name in names))
    unknown = [name for name in wanted if name not in EFFECTS]
    if unknown:
        raise UsageError(
            f"There is no edit {unknown[0]!r}.\n  expected: {', '.join(EFFECTS)}\n  got:      {', '.join(wanted)}\n"
            "  next:     docs/port.md says what each does; DataParallel becomes several processes with --distributed"
        )
    return wanted


def edits(project: Project, script: Script, names: tuple[str, ...]) -> list[Edit]:
    """Return the edits of a script that were chosen by name."""
    wrapped = _Wrapped(project) if "one-device" in names else None
    found = wrapped.edits(script) if wrapped is not None else []
    for node in script.scopes:
        if isinstance(node, ast.Call) and is_loader(script, node):
            trained = is_trained_on(script, node)
            if "drop-last" in names and trained:
                found += _keyword(script, node, "drop_last", "drop-last")
            if "shuffle-validation" in names and not trained and len(node.args) < 3 and not _has(node, "sampler", "batch_sampler"):
                found += _keyword(script, node, "shuffle", "shuffle-validation")
        if isinstance(node, ast.Call) and "int32-labels" in names and _is_loss(project, script, node) and len(node.args) > 1:
            found += _labels(script, node.args[1])
        if wrapped is not None and isinstance(node, ast.Call) and script.qualified(node.func) in DATA_PARALLEL:
            found += [] if wrapped.keeps(node) else _unwrapped(script, node)
        if "no-jit" in names and script.qualified(node) == "torch.jit.script":
            found += _without_jit(script, node)
        if "float32" in names:
            found += _single(project, script, node)
    return found


CHOOSE = {
    "npu": ("torch.npu.is_available()", "torch.npu.set_device"),
    "agnostic": ("torch.accelerator.is_available()", "torch.accelerator.set_device_index"),
}
"""How a target asks for a device and sets it."""


def device_of_environment(project: Project, to: str) -> dict[Script, list[Edit]]:
    """Return the edits that let ``DEVICE_ID`` choose the device, by script: where a training starts, before anything uses a device.

    That is the block of ``__name__ == "__main__"``; where no script has one, each script that runs when it is started and that no
    other imports.
    """
    project.chosen = True
    starts = {script: guarded for script in project.scripts if (guarded := first_statement(script, guard=True)) is not None}
    if not starts:
        imported = {full for script in project.scripts for scope in script.scopes.values() for full in scope.imported.values()}
        alone = [one for one in project.scripts if not any(f"{full}.".startswith(f"{one.module}.") for full in imported)]
        starts = {script: first for script in alone if (first := first_statement(script, guard=False)) is not None}
    made = {}
    for script, statement in starts.items():
        top = {name for name, full in script.scopes[statement].imported.items() if name == full}
        if b'environ.get("DEVICE_ID"' in script.data or b"torch" not in script.data:
            continue  # it is there, or this starts something else
        start, newline = script.line_start(statement.lineno), script.newline
        indent = script.data[start : script.span(statement)[0]].decode()
        asked, chosen = CHOOSE[to]
        lines = (f"{indent}if {asked}:", f'{indent}    {chosen}(int(os.environ.get("DEVICE_ID", 0)))', "")
        at, needed = behind_imports(script), [name for name in ("os", "torch") if name not in top]
        why = EFFECTS["specify-device"]
        made[script] = [Edit(start, start, newline.join(lines), "specify-device", why)]
        if needed:
            made[script].append(Edit(at, at, "".join(f"import {name}{newline}" for name in needed), "specify-device", why))
    return made


def _has(call: ast.Call, *names: str) -> bool:
    return any(one.arg in names for one in call.keywords)


def _keyword(script: Script, call: ast.Call, name: str, rule: str) -> list[Edit]:
    """Set an argument to True; what is set to anything but False stays."""
    given = next((one.value for one in call.keywords if one.arg == name), None)
    if given is not None:
        return [Edit(*script.span(given), "True", rule, EFFECTS[rule])] if script.text(given) == "False" else []
    end = script.behind_arguments(call)
    return [Edit(end, end, f", {name}=True", rule, EFFECTS[rule])]


def _is_loss(project: Project, script: Script, call: ast.Call) -> bool:
    if script.qualified(call.func) in LOSSES:
        return True
    place = project.place(script, call.func)
    values = project.values.get(place, []) if place is not None else []
    made = [(where, one) for where, value in values for one in ast.walk(value) if isinstance(one, ast.Call)]
    return any(where.qualified(one.func) in LOSS_CLASSES for where, one in made)


def _labels(script: Script, labels: ast.AST) -> list[Edit]:
    """Labels that are a variable are named twice; of anything else, which other rules may change, a function takes the value."""
    (start, end), why = script.span(labels), EFFECTS["int32-labels"]
    text = script.text(labels)
    if "labels.int() if" in text or isinstance(labels, ast.IfExp):
        return []  # done before
    if isinstance(labels, ast.Name):
        return [Edit(end, end, f'.int() if {text}.device.type == "npu" else {text}', "int32-labels", why)]
    made = '(lambda labels: labels.int() if labels.device.type == "npu" else labels)('
    return [Edit(start, start, made, "int32-labels", why), Edit(end, end, ")", "int32-labels", why)]


def _unwrapped(script: Script, call: ast.Call) -> list[Edit]:
    """The model itself in the place of DataParallel(model, ...)."""
    if not call.args:
        return []
    whole = isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    (start, end), (first, last) = script.span(call), script.span(call.args[0])
    why = EFFECTS["one-device"]
    return [Edit(start, first, "" if whole else "(", "one-device", why), Edit(last, end, "" if whole else ")", "one-device", why)]


class _Wrapped:
    """What keeps a model inside of DataParallel: there ``.module`` is the model itself. Where it may be DistributedDataParallel,
    too (``kept``), ``.module`` has to stay, and so has DataParallel."""

    def __init__(self, project: Project) -> None:
        self._project = project
        alone, several = self._holding(DATA_PARALLEL), self._holding(DISTRIBUTED)
        reads = [(script, node) for script in project.scripts for node in script.scopes if isinstance(node, ast.Attribute)]
        places = {node: project.place(script, node.value) for script, node in reads if node.attr == "module"}
        self.kept = {place for place in places.values() if place is not None and place in alone & several}
        whole = {node for node, place in places.items() if place is not None and place in alone - several}
        self.reads = {node: script for script, node in reads if node in whole}

    def _holding(self, classes: set[str]) -> set[Place]:
        """Return the places that keep what a class makes, or what is kept in such a place."""
        found: set[Place] = set()
        before = -1
        while before != len(found):
            before = len(found)
            for place, values in self._project.values.items():
                found |= {place} if any(self._is(*one, classes, found) for one in values) else set()
        return found

    def _is(self, script: Script, value: ast.AST, classes: set[str], found: set[Place]) -> bool:
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
            value = value.func.value
        if isinstance(value, ast.Call):
            return script.qualified(value.func) in classes
        if isinstance(value, ast.IfExp):
            return any(self._is(script, one, classes, found) for one in (value.body, value.orelse))
        place = self._project.place(script, value) if isinstance(value, (ast.Name, ast.Attribute)) else None
        return place is not None and place in found

    def keeps(self, call: ast.Call) -> bool:
        """Return whether a wrapper has to stay, for what it makes is kept where another one's is, whose ``.module`` is read."""
        return any(one is call for place in self.kept for _, value in self._project.values[place] for one in ast.walk(value))

    def edits(self, script: Script) -> list[Edit]:
        """Return the edits that read the model in the place of its ``.module``."""
        own = [node for node, where in self.reads.items() if where is script and isinstance(node.ctx, ast.Load)]
        return [Edit(script.span(one.value)[1], script.span(one)[1], "", "one-device", EFFECTS["one-device"]) for one in own]


def _without_jit(script: Script, node: ast.AST) -> list[Edit]:
    outer = script.parents.get(node)
    if isinstance(outer, ast.Call) and outer.func is node and outer.args:
        (start, end), (first, last) = script.span(outer), script.span(outer.args[0])
        return [Edit(start, first, "", "no-jit", EFFECTS["no-jit"]), Edit(last, end, "", "no-jit", EFFECTS["no-jit"])]
    if node in getattr(outer, "decorator_list", ()):
        line = node.lineno  # type: ignore[attr-defined]
        return [Edit(script.line_start(line), script.line_start(line + 1), "", "no-jit", EFFECTS["no-jit"])]
    return []


def _single(project: Project, script: Script, node: ast.AST) -> list[Edit]:
    qualified = script.qualified(node)
    if qualified in DOUBLE:
        return [Edit(*script.span(node), DOUBLE[qualified], "float32", EFFECTS["float32"])]
    method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args else None
    if (
        method is None
        or method.attr != "double"
        or script.qualified(method) is not None
        or project.is_foreign(script, method.value)
    ):
        return []
    end = script.span(method)[1]
    return [Edit(end - len("double"), end, "float", "float32", EFFECTS["float32"])]
