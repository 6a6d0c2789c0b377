"""The catalogue of rewrites (`catalogue.toml`), and the proof of a row: both forms executed in a process of their own
(`trueup.simdev.equivalence`). And what a mask asks, where it is kept in a variable: followed to the one assignment that it comes
from.

far = scores < 0.1            scores.masked_fill_(far, 0): the mask has the shape of what it is of,
scores[far] = 0               for it asks about each element of the same tensor

out = torch.zeros_like(x)     or about each element of a tensor of that shape
near = (x > 0) & (x < 1)
out[near] = x[near]
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from trueup.foundation import toml
from trueup.foundation.words.wording import counted

Kind = Literal["name", "number", "condition", "plain", "size", "scalar", "device"]

LIKE = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"))
"""Functions of PyTorch whose result has the shape of what they are given."""
COPIES = frozenset(("clone", "detach", "contiguous", "abs", "float", "double", "half", "bfloat16"))
"""Methods of a tensor whose result has its shape."""
ASKS = frozenset(("isnan", "isinf", "isfinite"))
"""Functions of PyTorch, and methods, that ask about each element."""
RESHAPING = frozenset(
    ("resize_", "resize_as_", "set_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "data")
)
"""What gives a tensor another shape in its place."""
LOOPS = (ast.For, ast.While, ast.AsyncFor)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Rewrite(toml.Table):
    """A row; see the head of the file. ``reference`` is what ``before`` computes, where that needs a package that PyTorch lacks."""

    id: str
    title: str
    why: str
    before: str
    after: str
    inputs: tuple[dict[str, Any], ...]
    exact: bool
    source: str
    where: dict[str, Kind] = {}  # noqa: RUF012 - a struct copies its defaults
    unlike: tuple[str, ...] = ()
    reference: str | None = None
    names: tuple[str, ...] = ()
    """Functions that stand for ``{name}``: the row is one row for each."""


class _Catalogue(toml.Table):
    rewrite: tuple[Rewrite, ...]


@functools.cache
def catalogue() -> tuple[Rewrite, ...]:
    """Return all rows."""
    rows = toml.checked(toml.packaged("trueup.migration.rewrites", "catalogue.toml"), _Catalogue).rewrite
    return tuple(one for row in rows for one in (_named(row) if row.names else [row]))


def _named(row: Rewrite) -> list[Rewrite]:
    """Return a row for each function that stands for ``{name}`` in it."""
    return [
        msgspec.structs.replace(
            row,
            id=f"{row.id}-{name}",
            before=row.before.replace("{name}", name),
            after=row.after.replace("{name}", name),
            inputs=tuple(one for one in row.inputs if one.get("for", name) == name),
            names=(),
        )
        for name in row.names
    ]


SECONDS = 300


class Proof(msgspec.Struct, frozen=True):
    """What executing both forms gave; ``differs`` names the inputs for which they are not the same, ``gain`` is on the CPU."""

    cases: int
    bitwise: int
    differs: str | None
    gain: float | None
    gradients: bool = True

    @property
    def holds(self) -> bool:
        """Return whether they are the same, within rounding, for all inputs."""
        return self.cases > 0 and self.differs is None

    @property
    def sentence(self) -> str:
        """Return what was proved."""
        if not self.cases:
            return "not proved: PyTorch did not run"
        if self.differs is not None:
            return f"not the same for {self.differs}"
        how = "bit for bit" if self.bitwise == self.cases else "within rounding"
        faster = "" if self.gain is None else f"; {self.gain:.2g} times as fast on this CPU"
        gradients = ", gradients included" if self.gradients else ""
        return f"the same {how} in {counted(self.cases, 'case')}{gradients}{faster}"


def prove(rows: Sequence[Rewrite]) -> list[Proof]:
    """Execute both forms of rows; a row that could not be executed is not proved."""
    if not rows:
        return []
    asked = msgspec.json.encode([msgspec.to_builtins(row) for row in rows])
    command: list[Any] = [sys.executable, "-m", "trueup.simdev.equivalence"]
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, timeout=SECONDS, check=True)
        return msgspec.json.decode(ran.stdout, type=list[Proof])
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError):
        return [Proof(0, 0, None, None) for _ in rows]


def asked_of(condition: Any) -> set[str] | None:
    """Return the variables of which a condition asks about each element; None where it is no such condition for certain."""
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
        if isinstance(condition.ops[0], (ast.In, ast.NotIn, ast.Is, ast.IsNot)):
            return None
        return {one.id for one in (condition.left, condition.comparators[0]) if isinstance(one, ast.Name)}
    if isinstance(condition, ast.BinOp) and isinstance(condition.op, (ast.BitAnd, ast.BitOr)):
        left, right = asked_of(condition.left), asked_of(condition.right)
        return None if left is None or right is None else left & right
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Invert):
        return asked_of(condition.operand)
    if isinstance(condition, ast.Call) and isinstance(condition.func, ast.Attribute) and condition.func.attr in ASKS:
        of = condition.args[0] if condition.args else condition.func.value
        return {of.id} if isinstance(of, ast.Name) else None
    return None


def note_masks(tree: ast.Module) -> None:
    """Note at each variable that selects (``x[mask]``) what it asks of which variables: ``asks``, names of tensors whose shape it
    has. A variable that is assigned in several places, or that a tensor of another shape may come between, has none."""
    for scope in (tree, *(one for one in ast.walk(tree) if isinstance(one, FUNCTIONS[:2]))):
        _Scope(scope).note()


class _Scope:
    def __init__(self, node: Any) -> None:
        self._blocks: dict[ast.stmt, list[ast.stmt]] = {}
        self._above: dict[ast.AST, ast.AST] = {}
        self._nodes = list(self._walk(node))
        self._stores: dict[str, list[ast.stmt]] = {}
        self._declared = {name for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
        for one in self._nodes:
            if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
                self._stores.setdefault(one.id, []).append(self._statement(one))

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes of a scope, without those of the functions in it."""
        for child in ast.iter_child_nodes(node):
            self._above[child] = node
            if isinstance(child, ast.stmt):
                lists = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
                self._blocks[child] = next((one for one in lists if isinstance(one, list) and child in one), [child])
            yield child
            if not isinstance(child, FUNCTIONS):
                yield from self._walk(child)

    def note(self) -> None:
        for node in self._nodes:
            mask = node.slice if isinstance(node, ast.Subscript) else None
            if isinstance(mask, ast.Name) and (made := self._made(mask.id, node)) is not None and self._stays(mask.id, made, node):
                asked = asked_of(made.value)
                names = {name for name in asked or () if self._stays(name, made, node)}
                mask.asks = names | {name for name in self._stores if self._is_like(name, names, made, node)}  # type: ignore[attr-defined]

    def _made(self, name: str, use: ast.AST) -> ast.Assign | None:
        """Return the assignment from which a variable comes, if there is one alone and it runs before."""
        stores = self._stores.get(name, [])
        if len(stores) != 1 or name in self._declared:
            return None
        (made,) = stores
        if not isinstance(made, ast.Assign) or len(made.targets) != 1 or not isinstance(made.targets[0], ast.Name):
            return None
        block, here = self._blocks[made], self._statement(use)
        while here not in block:
            if not isinstance(above := self._above.get(here), ast.stmt):
                return None
            here = above
        return made if block.index(made) < block.index(here) else None

    def _is_like(self, name: str, names: set[str], mask: ast.Assign, use: ast.AST) -> bool:
        """Return whether a variable has the shape of one of some: it was made like it, and none of them changed since."""
        made = self._made(name, use)
        call = made.value if made is not None else None
        if made is None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return False
        of = call.args[0] if call.func.attr in LIKE and call.args else call.func.value if call.func.attr in COPIES else None
        first = min(made, mask, key=lambda one: one.lineno)
        return isinstance(of, ast.Name) and of.id in names and self._stays(of.id, first, use) and self._stays(name, made, use)

    def _stays(self, name: str, since: ast.stmt, use: ast.AST) -> bool:
        """Return whether a tensor keeps its shape from behind a statement up to a use: nothing is assigned, nothing reshapes it."""
        if name in self._declared:
            return False
        begin, end = since.lineno, self._statement(use).lineno - 1
        loop = self._above.get(use)
        while loop is not None:  # what comes behind in a loop around the use alone comes before it, too
            if isinstance(loop, LOOPS) and loop.lineno > begin:
                end = max(end, loop.end_lineno or end)
            loop = self._above.get(loop)
        return not any(begin < one.lineno <= end and one is not since for one in self._changes(name))

    def _changes(self, name: str) -> Iterator[ast.stmt]:
        """Yield the statements that may give a variable another shape."""
        yield from (one for one in self._stores.get(name, ()) if not isinstance(one, ast.AugAssign))
        for node in self._nodes:
            if (
                isinstance(node, ast.Attribute)
                and node.attr in RESHAPING
                and isinstance(node.value, ast.Name)
                and node.value.id == name
            ):
                yield self._statement(node)

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self._above[node]
        return node
