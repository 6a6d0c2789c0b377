"""`--distributed`: a training of one process as one of several, a device each, with `data_parallel.py` beside it.

model = data_parallel.wrap(model)                 behind the optimizer, and what loads or moves the model
loader = data_parallel.share(DataLoader(...))     of the data that are trained on
data_parallel.mean(loss).item()                   where a loss is read
data_parallel.save(...)                           in the first process alone
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup.migration.port.flow import Project
from trueup.migration.port.reading import FUNCTIONS, Script, behind_imports
from trueup.migration.port.remaining import Left
from trueup.migration.port.writing import Edit

HELPER = "data_parallel"
LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
BY_NAME = {"importlib.import_module", "runpy.run_path", "runpy.run_module"}
LOOPS = (ast.For, ast.While, ast.AsyncFor)
RULE = "distributed"
EFFECTS = (
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
