"""`operators`: which operators CANN's host log says that it was asked for, with which parameters, how often, and when it
compiled them.

    [INFO] ASCENDCL(3021,python3):2021-07-01-10:00:00.000.001 [op_compile.cpp:300]3021 aclopCompile::aclOp OpType: TransData,
    INPUT...

An operator that is compiled after the first step has a shape or attribute that changes. A host log knows no steps: they are counted
by the lines that the training prints into it (ASCEND_SLOG_PRINT_TO_STDOUT=1).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import counted
from trueup.migration.knowledge.streaming import lines, readers

ASKED = re.compile(rb"aclopCompile(?:::aclOp)?\b.*?OpType: ?(\w+)(?:, ?(.*))?")
COMPILED = re.compile(rb"Match op inputs(?:/type)? failed|To compile op")
STEP = r"(?i:\biteration\s+(\d+)\s*/|\bEpoch:? ?\[\d+\]\s?\[\s*(\d+)/|\b(?:global[ _])?step[ =:]+(\d+)|\biter[ =:]+(\d+))"
FORMATS = ("TransData", "TransDataTo", "Cast", "Transpose", "AsStrided", "ViewCopy", "TensorMove", "Identity")
"""Operators that copy or change formats and compute nothing."""
MOST = 100_000  # operators with parameters that are kept apart


@dataclass(frozen=True)
class Operator:
    """An operator with its parameters: how often it was asked for and compiled, and in which steps (0: before the first)."""

    type: str
    parameters: str
    asked: int
    compiled: int
    first: int
    last: int
    late: int  # how often it was compiled after step one

    @property
    def moves(self) -> bool:
        """Return whether it only copies or changes a format."""
        return self.type in FORMATS


@dataclass(frozen=True)
class Operators:
    """The operators of some host logs, those compiled late first, then by how often they were asked for."""

    operators: tuple[Operator, ...]
    steps: int
    logs: tuple[str, ...]
    left_out: int

    @property
    def late(self) -> tuple[Operator, ...]:
        """Return those that were compiled after step one."""
        return tuple(one for one in self.operators if one.late)

    @property
    def exit_code(self) -> int:
        """Return 0 where all was compiled by step one, 1 where something was compiled later, 2 where nobody can tell."""
        return 2 if not self.operators or not self.steps else 1 if self.late else 0

    @property
    def sentence(self) -> str:
        """Return the conclusion in a sentence."""
        if not self.operators:
            return "No line of aclopCompile stands in these logs: set ASCEND_SLOG_PRINT_TO_STDOUT=1 and ASCEND_GLOBAL_LOG_LEVEL=1."
        asked, kinds = sum(one.asked for one in self.operators), {one.type for one in self.operators}
        head = (
            f"{counted(len(kinds), 'operator')} with {counted(len(self.operators), 'set')} of parameters, asked for {asked:,} times"
        )
        if not self.steps:
            return f"{head}; no line says a step, so when they were compiled is not known."
        late = sorted({one.type for one in self.late})
        tail = (
            f"{', '.join(late[:3])}{' and others' if len(late) > 3 else ''} compiled after step one"
            if late
            else "all compiled by step one"
        )
        return f"{head} in {counted(self.steps, 'step')}; {tail}."

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON-ready data."""
        rows = [dataclasses.asdict(one) for one in self.operators]
        return {
            "schema": "trueup-operators", "schema_version": 1, "sentence": self.sentence, "exit_code": self.exit_code,
            "steps": self.steps, "logs": list(self.logs), "left_out": self.left_out, "operators": rows,
        }  # fmt: skip


def operators(logs: Sequence[str], step: str | None = None) -> Operators:
    """Return the operators that CANN's host logs name.

    Args:
        logs: files, folders, ``-`` for standard input.
        step: a regular expression for the lines of the training that say a step; None: the usual forms.

    Raises:
        TrueupError: a log cannot be read, or ``step`` is no regular expression.
    """
    marks = _marks(step)
    some = readers(logs)
    held: dict[tuple[str, str], list[int]] = {}
    steps, now, last_mark, left_out = 0, 0, b"", 0
    current: list[int] | None = None
    for line in lines(some, lambda _log: ((f"aclopCompile|Match op inputs|To compile op|{step or STEP}",), ())):
        asked = ASKED.search(line.text)
        if asked is not None:
            name = asked[1].decode(), _parameters(asked[2] or b"")
            if name not in held and len(held) >= MOST:
                left_out, current = left_out + 1, None
                continue
            current = held.setdefault(name, [0, 0, now, now, 0])
            current[0] += 1
            current[3] = now
        elif COMPILED.search(line.text):
            if current is not None:
                current[1] += 1
                current[4] += now > 1
                current = None
        elif (mark := marks.search(line.text)) is not None and mark[0] != last_mark:
            last_mark = mark[0]
            steps, now = steps + 1, now + 1
    rows = [Operator(*name, asked, compiled, first, last, late) for name, (asked, compiled, first, last, late) in held.items()]
    rows.sort(key=lambda one: (-one.late, -one.asked, one.type, one.parameters))
    return Operators(tuple(rows), steps, tuple(reader.name for reader in some), left_out)


def _parameters(text: bytes) -> str:
    said = text.decode("utf-8", "replace").strip().rstrip(".")
    open_ = said.count("]") > said.count("[")  # the line's own closing bracket, which the log's prefix opens
    return (said.removesuffix("]") if open_ else said).strip()[:400]


def _marks(step: str | None) -> re.Pattern[bytes]:
    try:
        return re.compile((step or STEP).encode())
    except re.error as error:
        raise TrueupError(
            f"--step cannot be read.\n  expected: a regular expression for lines that say a step\n  got:      {step!r} ({error})\n"
            "  next:     correct it, or leave it out"
        ) from None
