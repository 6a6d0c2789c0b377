"""`--also` and `--distributed`: edits that are made only when asked for, because they change numbers, or how a training is started.

Each edit of `--also` says what it does to batch, steps and learning rate. `--distributed` makes a training of one process one of
several, a device each, with `data_parallel.py` beside it:

model = data_parallel.wrap(model)                 behind the optimizer, and what loads or moves the model
loader = data_parallel.share(DataLoader(...))     of the data that are trained on
data_parallel.mean(loss).item()                   where a loss is read
data_parallel.save(...)                           in the first process alone
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from trueup.foundation.model import TrueupError, UsageError
from trueup.migration.port.flow import Place, Project
from trueup.migration.port.reading import FUNCTIONS, Script, behind_imports
from trueup.migration.port.remaining import Left
from trueup.migration.port.writing import Edit

HELPER = "data_parallel"
LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
BY_NAME = {"importlib.import_module", "runpy.run_path", "runpy.run_module"}
LOOPS = (ast.For, ast.While, ast.AsyncFor)
RULE = "distributed"
OF_DISTRIBUTED = (
    "batch, steps and learning rate stay: N processes share each batch, so the gradients are those of one process",
    "a batch that N does not divide is filled up with samples of its own; BatchNorm sees a process's share, and dropout differs",
    "data that are not trained on are read whole by each process, so their figures need no reduction",
)
"""What changes, and what does not, in a training that several processes share."""
NO_CHOICE = "DEVICE_ID is not asked, for each process has a device of its own: NPUS=2,3 bash run_distributed_npu.sh chooses them"
"""What is said where both were asked for."""
LAUNCH = """\
#!/bin/bash
# Starts {main} in a process for each device, and ends all if one fails; its exit code is theirs.
#   bash {name} --epochs 90        NPUS=0,1,2,3 bash {name}        NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash {name}
cd "$(dirname "$0")" || exit 2
export MASTER_ADDR="${{MASTER_ADDR:-127.0.0.1}}" MASTER_PORT="${{MASTER_PORT:-29688}}"
export HCCL_WHITELIST_DISABLE="${{HCCL_WHITELIST_DISABLE:-1}}"
if [ -n "$NPUS" ]; then export ASCEND_RT_VISIBLE_DEVICES="$NPUS" CUDA_VISIBLE_DEVICES="$NPUS"; fi
RANK_SIZE="${{RANK_SIZE:-$(echo "${{NPUS:-0,1,2,3,4,5,6,7}}" | tr ',' '\\n' | wc -l)}}"
exec "${{PYTHON:-python}}" -m torch.distributed.run --nnodes="${{NNODES:-1}}" --node_rank="${{NODE_RANK:-0}}" \\
  --nproc_per_node="$RANK_SIZE" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" {main} "$@"
"""

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


class Distributor:
    """Finds what makes a project's training one of several processes. ``edits`` and ``left`` are by script.

    Raises TrueupError: the main script is not one of the project; it is distributed already; no model or no data are found.
    """

    def __init__(self, project: Project, main: str, base: Path, model: str | None) -> None:
        self.project = project
        self.edits: dict[Script, list[Edit]] = {script: [] for script in project.scripts}
        self.left: dict[Script, list[Left]] = {script: [] for script in project.scripts}
        wanted = (base / main).resolve()
        found = next((script for script in project.scripts if script.path.resolve() == wanted), None)
        if found is None:
            raise _refused(
                main, f"a script of {base}", "none of that name", "name the script that is started, as seen from the folder"
            )
        self.main, self.scripts = found, reached(project, found)
        project.spread = set(self.scripts)
        calls = [(script, node) for script in project.scripts for node in script.scopes if isinstance(node, ast.Call)]
        self.calls = [(script, call) for script, call in calls if script in project.spread]
        for script, call in calls:
            if not (script.qualified(call.func) or "").endswith("distributed.init_process_group"):
                continue
            if script in project.spread:
                line = f"{script.path}, line {call.lineno}, joins a process group"
                raise _refused(main, "a training of one process", line, "it is distributed already: port it without --distributed")
            self.left[script].append(Left(call.lineno, script.text(call)[:200], f"{main} does not reach this script", False))
        self._start(found)
        self._wrap(model)
        self._share()
        for script, call in self.calls:
            if script.qualified(call.func) == "torch.save":
                self._edit(script, *script.span(call.func), f"{HELPER}.save", "a checkpoint is written once")
        for script, edits in self.edits.items():
            if edits:
                at = behind_imports(script)
                self._edit(script, at, at, f"import {HELPER}{script.newline}", "what the changes need")

    @staticmethod
    def files(main: str) -> dict[str, str]:
        """Return the files that come along, by their path: the helper beside the main script, and the script that starts it."""
        helper = (resources.files("trueup.migration.port") / f"{HELPER}.txt").read_text("utf-8")
        name = "run_distributed_npu.sh"
        return {str(Path(main).parent / f"{HELPER}.py"): helper, name: LAUNCH.format(main=Path(main).as_posix(), name=name)}

    def _edit(self, script: Script, start: int, end: int, text: str, why: str) -> None:
        self.edits[script].append(Edit(start, end, text, RULE, why))

    def _around(self, script: Script, node: ast.AST, function: str, why: str) -> None:
        start, end = script.span(node)
        self._edit(script, start, start, f"{HELPER}.{function}(", why)
        self._edit(script, end, end, ")", why)

    def _insert(self, script: Script, statement: ast.stmt, text: str, why: str, *, behind: bool) -> None:
        start, end = script.span(statement)
        line = script.line_start(statement.lineno)
        indent, newline = script.data[line:start].decode(), script.newline
        if not behind:
            self._edit(script, line, line, f"{indent}{text}{newline}", why)
            return
        at = script.line_start(script.line_at(end) + 1)
        whole = script.data[:at].endswith((b"\n", b"\r"))
        self._edit(script, at, at, f"{'' if whole else newline}{indent}{text}{newline}", why)

    # ---- where it begins ----

    def _start(self, script: Script) -> None:
        first = first_statement(script, guard=True) or first_statement(script, guard=False)
        if first is None:
            raise _refused(str(script.path), "a script that trains", "one that starts nothing", "name the script that is started")
        self._insert(script, first, f"{HELPER}.start()", "before anything uses the device", behind=False)

    # ---- the model ----

    def _wrap(self, name: str | None) -> None:
        found = list(self._models(name))
        if not found:
            expected = "a model whose parameters() an optimizer is given" if name is None else f"a variable {name} that is assigned"
            raise _refused(str(self.main.path), expected, "none", "name the model's variable with --model")
        for script, statement, receiver in dict.fromkeys(found):
            last = self._last_before_training(script, statement, receiver)
            why, text = "its gradients become the mean over the processes", f"{receiver} = {HELPER}.wrap({receiver})"
            trains_there = last is statement and not isinstance(
                last, (ast.Assign, ast.AnnAssign)
            )  # train(model, optimizer_of(model))
            self._insert(script, last, text, why, behind=not trains_there)

    def _models(self, wanted: str | None) -> Iterator[tuple[Script, ast.stmt, str]]:
        if wanted is not None:
            for script in self.scripts:
                for node in script.scopes:
                    if isinstance(node, ast.Assign) and any(script.text(one) == wanted for one in node.targets):
                        yield script, node, wanted
                        break
            return
        for script, call in self.calls:
            name = script.qualified(call.func) or ""
            if name.startswith(("torch.optim.lr_scheduler", "torch.optim.swa_utils")):
                continue  # they are given an optimizer
            if name.startswith(("torch.optim.", "apex.optimizers.")) or self._is_optimizer(script, call):
                for value in self._parameters_of(script, [*call.args, *(one.value for one in call.keywords)]):
                    yield from self._made(script, _statement(script, call), value)

    def _made(self, script: Script, statement: ast.stmt, model: ast.AST, deep: int = 3) -> Iterator[tuple[Script, ast.stmt, str]]:
        """Yield where a model is that an optimizer is given: of a parameter of a function, where the function is called."""
        place = self.project.place(script, model)
        function = script.within(statement, FUNCTIONS)
        given = self.project.values.get(place or (), []) if place is not None and place[1] is function else []
        outside = [(where, value) for where, value in given if not isinstance(where.parents.get(value), ast.Assign)]
        if isinstance(model, ast.Name) and function is not None and outside and deep:
            for where, value in outside:
                yield from self._made(where, _statement(where, value), value, deep - 1)
        else:
            yield script, statement, script.text(model)

    def _is_optimizer(self, script: Script, call: ast.Call) -> bool:
        """``optimizers[name](model.parameters(), lr)``."""
        first = call.args[0] if call.args else None
        return (
            isinstance(first, ast.Call) and script.text(first.func).endswith(".parameters") and script.qualified(call.func) is None
        )

    def _parameters_of(self, script: Script, given: Sequence[ast.AST], deep: int = 3) -> Iterator[ast.AST]:
        for value in given:
            for node in ast.walk(value):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "parameters" in node.func.attr:
                    yield node.func.value
                elif isinstance(node, ast.Name) and deep and (place := self.project.place(script, node)) is not None:
                    known = [one for where, one in self.project.values.get(place, ()) if where is script]
                    yield from self._parameters_of(script, known, deep - 1)

    def _last_before_training(self, script: Script, statement: ast.stmt, receiver: str) -> ast.stmt:
        """Return the last statement, of those around the optimizer, that makes, moves or loads the model, before any loop."""
        block = script.block(statement)
        last = statement
        for one in block[block.index(statement) :]:
            if isinstance(one, LOOPS):
                break
            if _touches(script, one, receiver):
                last = one  # type: ignore[assignment]
        return last

    # ---- the data, and what is read of the loss ----

    def _share(self) -> None:
        loaders = [(script, call) for script, call in self.calls if is_loader(script, call)]
        trained = [one for one in loaders if is_trained_on(*one)]
        if not trained and len(loaders) == 1:
            trained = loaders
        if not trained:
            said = "no DataLoader that is trained on: its processes would all compute the same"
            raise _refused(str(self.main.path), "a torch.utils.data.DataLoader", said, "split the data by hand")
        for script, call in trained:
            self._around(script, call, "share", "each process gets its share of each batch")
        backward = [
            (script, call) for script, call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        ]
        for script, function in dict.fromkeys((script, script.within(call, FUNCTIONS)) for script, call in backward):
            self._losses(script, [one for where, one in backward if where is script and script.within(one, FUNCTIONS) is function])

    def _losses(self, script: Script, backward: list[ast.Call]) -> None:
        """The mean over the processes where a loss is read; what else is read of a batch is this process's share."""
        made = [call.func.value for call in backward]  # type: ignore[attr-defined]
        names = {one.id for value in made for one in ast.walk(value) if isinstance(one, ast.Name)}
        for node in script.scopes:  # with amp.scale_loss(loss, optimizer) as scaled
            if isinstance(node, ast.withitem) and node.optional_vars is not None and script.text(node.optional_vars) in names:
                names |= {one.id for one in ast.walk(node.context_expr) if isinstance(one, ast.Name)}
        function, loops = script.within(backward[0], FUNCTIONS), {script.within(one, LOOPS) for one in backward} - {None}
        for where, call in self.calls:
            if where is not script or not isinstance(call.func, ast.Attribute) or call.func.attr != "item" or call.args:
                continue
            receiver = call.func.value
            if script.within(call, FUNCTIONS) is function and script.text(receiver) in names:
                self._around(script, receiver, "mean", "a loss is of one process's share")
            elif any(loop is not None and script.is_within(call, loop) for loop in loops):
                reason = "each process reads this of its own share of the batch: reduce it if it is reported"
                self.left[script].append(Left(call.lineno, script.text(call), reason, True))


def reached(project: Project, main: Script) -> list[Script]:
    """Return the scripts that one imports, itself first, and those that they import; all where one of them imports by a name that
    is only known when it runs."""
    folder = main.module.rpartition(".")[0]
    found = [main]
    for script in found:
        if any(script.qualified(node.func) in BY_NAME for node in script.scopes if isinstance(node, ast.Call)):
            return project.scripts
        for full in dict.fromkeys(full for node in script.scopes for full in script.imports(node)):
            parts = full.split(".")
            for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
                for module in (name, f"{name}.__init__", f"{folder}.{name}", f"{folder}.{name}.__init__"):
                    its = project.modules.get(module)
                    found += [its] if its is not None and its not in found else []
    return found


def first_statement(script: Script, *, guard: bool) -> ast.stmt | None:
    """Return the first statement of the block that runs only where a script is started, or of what runs whenever it is imported."""
    body = script.tree.body
    if guard:
        return next((one.body[0] for one in body if isinstance(one, ast.If) and "__name__" in script.text(one.test)), None)
    aside = (ast.Import, ast.ImportFrom, *FUNCTIONS[:2], ast.ClassDef)
    return next((one for one in body if not isinstance(one, aside) and not _is_text(one)), None)


def is_loader(script: Script, call: ast.Call) -> bool:
    """Return whether a call makes a DataLoader."""
    return script.qualified(call.func) in LOADER


def is_trained_on(script: Script, call: ast.Call) -> bool:
    """Return whether a DataLoader reads what is trained on: its name or its data's says so, or it shuffles."""
    target = script.text(_statement(script, call)).partition("=")[0]
    named = f"{target} {script.text(call.args[0]) if call.args else ''}".lower()
    if any(word in named for word in ("val", "test", "eval")):
        return False
    shuffled = next((one.value for one in call.keywords if one.arg == "shuffle"), call.args[2] if len(call.args) > 2 else None)
    return "train" in named or (isinstance(shuffled, ast.Constant) and shuffled.value is True)


def _statement(script: Script, node: ast.AST) -> ast.stmt:
    found = node if isinstance(node, ast.stmt) else script.within(node, ast.stmt)
    assert isinstance(found, ast.stmt)
    return found


def _touches(script: Script, statement: ast.AST, receiver: str) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load) and script.text(node) == receiver:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and script.text(node.func.value) == receiver:
            return True
    return False


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _refused(what: str, expected: str, got: str, following: str) -> TrueupError:
    return TrueupError(f"{what} cannot be made distributed.\n  expected: {expected}\n  got:      {got}\n  next:     {following}")


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
