"""Captures of which calls are missing: a sound one is written again by the store's own writer, without some of its rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import trueup
from trueup.foundation.store import Writer, claim

Call = dict[str, Any]
Choice = Callable[[list[Call]], Iterable[Call]]
"""Takes the calls of a capture in order of execution, returns those that go."""
KEYS = ("step", "seq", "parent", "phase", "level", "scope", "op", "ordinal")


def calls_of(capture: Path) -> list[Call]:
    """Return the calls of a capture of one rank, in order of execution."""
    rows = trueup.open_capture(capture).records([*KEYS]).to_pylist()
    return list({(row["step"], row["seq"]): row for row in rows}.values())


def with_inner(calls: list[Call], chosen: Iterable[Call]) -> list[Call]:
    """Return calls and all that was called inside them."""
    gone: set[tuple[int, int]] = {(c["step"], c["seq"]) for c in chosen}
    found = []
    for call in calls:  # a call's number is larger than its parent's
        if (call["step"], call["parent"]) in gone or (call["step"], call["seq"]) in gone:
            gone.add((call["step"], call["seq"]))
            found.append(call)
    return found


def without(capture: Path, gone: Sequence[Call], into: Path, *, closed: bool) -> Path:
    """Write a capture of one rank again without some calls, its counts and seals as if they had never been.

    Args:
        closed: leave no reference to a call that is gone either, and no gap in the numbers.
    """
    shutil.rmtree(into, ignore_errors=True)
    source = trueup.open_capture(capture)
    root = {key: value for key, value in source.root.items() if key != "format_version"}
    said = {key: value for key, value in source.ranks[0].items() if key not in ("rank", "pid", "status", "written")}
    claim(into, 0, root.get("run"))
    writer = Writer(into, 0, root, said)
    numbers: dict[int, int] = {}
    missing = pa.array(sorted({c["seq"] for c in gone}), pa.int64())
    for step in source.steps:
        table = source.records(step=step)
        lost = {c["seq"] for c in gone if c["step"] == step}
        kept = table.filter(pc.invert(pc.is_in(table["seq"], pa.array(sorted(lost), pa.int64()))))
        if closed:
            kept = renumbered(kept, numbers, parents(table, lost), missing)
        writer.write_records(step, kept)
    writer.close()
    for path in sorted((capture / "rank-00000").glob("sites-*.parquet")):
        shutil.copy(path, into / "rank-00000")
    return into


def parents(table: pa.Table, lost: set[int]) -> dict[int, int | None]:
    """Return for each call that is gone the nearest call around it that is not."""
    around = dict(zip(table["seq"].to_pylist(), table["parent"].to_pylist(), strict=True))
    found: dict[int, int | None] = {}
    for seq in lost:
        parent = around.get(seq)
        while parent in lost:
            parent = around.get(parent)
        found[seq] = parent
    return found


def renumbered(table: pa.Table, numbers: dict[int, int], around: dict[int, int | None], missing: pa.Array) -> pa.Table:
    """Number calls without gaps and forget what refers to a call that is gone; ``numbers`` goes on from step to step."""
    for seq in table["seq"].to_pylist():
        numbers.setdefault(seq, len(numbers))
    ordinals: dict[tuple[Any, ...], int] = {}
    placed: dict[int, int] = {}
    for row in table.select([*KEYS]).to_pylist():
        if row["seq"] not in placed:
            key = tuple(row[name] for name in ("phase", "level", "scope", "op"))
            placed[row["seq"]] = ordinals[key] = ordinals.get(key, -1) + 1

    def moved(name: str, through: dict[int, int | None] | None = None) -> pa.Array:
        old = [(through or {}).get(seq, seq) for seq in table[name].to_pylist()]
        return pa.array([None if seq is None else numbers.get(seq) for seq in old], pa.int64())

    ordinal = pa.array([placed[seq] for seq in table["seq"].to_pylist()], pa.int32())
    orphans = pc.fill_null(pc.is_in(table["producer_seq"], missing), False)
    slots = pc.if_else(orphans, pa.scalar(None, pa.string()), table["producer_slot"].cast(pa.string()))
    columns = {
        "parent": moved("parent", around), "producer_seq": moved("producer_seq"), "forward_seq": moved("forward_seq"),
        "ordinal": ordinal, "seq": moved("seq"), "producer_slot": slots.cast(table.schema.field("producer_slot").type),
    }  # fmt: skip
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def of(**where: Any) -> Choice:
    """Return a choice of all calls with these values."""
    return lambda calls: [c for c in calls if all(c[name] == value for name, value in where.items())]


def first(choice: Choice) -> Choice:
    return lambda calls: list(choice(calls))[:1]


def last(choice: Choice) -> Choice:
    return lambda calls: list(choice(calls))[-1:]


def whole(choice: Choice) -> Choice:
    """Return a choice with all that was called inside."""
    return lambda calls: with_inner(calls, choice(calls))


def tail(share: float) -> Choice:
    return lambda calls: calls[int(len(calls) * (1 - share)) :]


def every(nth: int, choice: Choice) -> Choice:
    return lambda calls: list(choice(calls))[nth // 2 :: nth]


FORWARD, BACKWARD = {"phase": "forward"}, {"phase": "backward"}
GELU = "torch.nn.functional.gelu"
DELETIONS: dict[str, Choice] = {
    "one operator": first(of(op="aten::gelu", step=1)),
    "one product": first(of(op="aten::addmm", scope="blocks.1.down")),
    "one view": first(of(level="aten", op="aten::view", scope="blocks.1.attn")),
    "one function, its operators stay": first(of(op=GELU, scope="blocks.1")),
    "one function and all in it": whole(first(of(op=GELU, scope="blocks.1"))),
    "one module, its functions stay": first(of(op="LayerNorm", scope="blocks.1.ln1")),
    "one module and all in it": whole(first(of(level="module", scope="blocks.1.ln1"))),
    "a layer and all in it": whole(of(level="module", scope="blocks.1", step=1)),
    "all of an operator": of(op="aten::gelu"),
    "all of a function, and in it": whole(of(op=GELU)),
    "all of a scope": of(scope="blocks.1.attn"),
    "all of a scope's backward": of(scope="blocks.1.attn", **BACKWARD),
    "all backward": of(**BACKWARD),
    "all backward of one step": of(step=1, **BACKWARD),
    "one operator's backward": first(of(op="aten::gelu_backward")),
    "one function's backward": whole(first(of(level="api", op=GELU, **BACKWARD))),
    "one module's backward": whole(first(of(level="module", scope="blocks.1.ln1", **BACKWARD))),
    "all forward": of(**FORWARD),
    "all optimizer": of(phase="optimizer"),
    "the optimizer of one step": of(phase="optimizer", step=0),
    "one update": first(of(phase="optimizer", level="aten", op="aten::add_")),
    "every tenth operator": every(10, of(level="aten")),
    "every tenth function, and in it": whole(every(10, of(level="api"))),
    "the last tenth": tail(0.1),
    "the last quarter": tail(0.25),
    "the last update": whole(last(of(level="api", phase="optimizer"))),
    "the first operator": first(of(level="aten")),
    "the loss": whole(first(of(op="torch.nn.functional.cross_entropy"))),
    "the root module": first(of(level="module", scope="")),
    "all functions": of(level="api"),
    "all operators of one step": of(level="aten", step=1),
}
HELD_OUT: dict[str, Choice] = {
    "a layer's forward and all in it": whole(of(level="module", scope="blocks.2", step=0, **FORWARD)),
    "all gradients of one product": of(scope="blocks.1.down", **BACKWARD),
    "every third view": every(3, of(op="aten::view")),
    "all functions of one scope": of(level="api", scope="blocks.1"),
    "the first forward half": lambda calls: [c for c in calls if c["step"] == 0 and c["phase"] == "forward"][::2],
    "all sums": of(op="aten::add"),
    "one update, its function too": whole(first(of(op="torch.Tensor.add_", phase="optimizer"))),
}
"""Those that nobody looks at before a change is done."""
