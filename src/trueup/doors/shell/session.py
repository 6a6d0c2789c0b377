"""What a shell has at hand: one capture or two, and their comparison. Nothing is read before a command needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from trueup.analysis.selecting import Selection, find_first
from trueup.comparison.result.cosines import Cosines
from trueup.comparison.result.evidence import Compared
from trueup.doors.report.node_view import Node, at_seq, named_alike
from trueup.foundation.model import Result, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.layout import read_root
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

Side = Literal["base", "cand"]
SIDES: tuple[Side, ...] = ("base", "cand")
NAMES = {"base": "baseline", "cand": "candidate"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished comparison, with the cosines that its measures give."""

    result: Result
    cosines: Cosines


@dataclass
class Session:
    """The state between two commands; raises TrueupError if a path is no capture."""

    baseline: Path
    candidate: Path | None
    console: Console
    results: Path | None = None  # where `vc` leaves a table without being asked
    overflows: tuple[Path, ...] = ()  # captures of steps that a watch saved, which `ac` looks at too
    over: bool = False  # whether `exit` was said
    comparison: Comparison | None = None  # what the last `vc` found
    _open: dict[Side, Capture] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in (self.baseline, self.candidate):
            if path is not None:
                read_root(path)  # a wrong path is said at once; records wait

    @property
    def sides(self) -> tuple[Side, ...]:
        """The captures that there are, the one under suspicion first."""
        return ("base",) if self.candidate is None else ("cand", "base")

    @property
    def is_alone(self) -> bool:
        """Whether there is one capture only."""
        return self.candidate is None

    def path(self, side: Side) -> Path:
        """Return where a capture is; raises TrueupError if there is no such side."""
        path = self.baseline if side == "base" else self.candidate
        if path is None:
            raise TrueupError(
                "There is nothing to compare with.\n  expected: two captures, trueup shell BASE CAND\n"
                f"  got:      {one_line(str(self.baseline))} alone\n  next:     vc -lt CAND names the other one"
            )
        return path

    def capture(self, side: Side) -> Capture:
        """Return a capture, opened once."""
        path = self.path(side)
        if side not in self._open:
            self._open[side] = open_capture(path)
        return self._open[side]

    def replace(self, side: Side, path: Path) -> None:
        """Take another capture for a side and forget what was compared; raises TrueupError if it is none."""
        read_root(path)
        if side == "base":
            self.baseline = path
        else:
            self.candidate = path
        self._open.pop(side, None)
        self.comparison = None

    def compare(self, *, level: Sequence[str] | None = None, criterion: str = "default", mapping: Path | None = None) -> Comparison:
        """Compare the two, as `trueup compare` does, and keep what was found."""
        from trueup.doors.comparing import compare

        cosines = Cosines()
        sides = self.capture("base"), self.capture("cand")
        with self.console.status("comparing …"):
            result = compare(*sides, level=level, criterion=criterion, mapping=mapping, see=cosines.see)
        self.comparison = Comparison(result, cosines)
        return self.comparison

    def compared(self) -> Comparison:
        """Return the comparison, made now if there was none."""
        return self.comparison or self.compare()

    def find(self, name: str, sides: Sequence[Side], **chosen: str | int | None) -> tuple[Side, Node]:
        """Return the first call that a name or a seq means, on the first of ``sides`` that has one; say which others there are.
        Raises TrueupError if none has, with the message of the first side."""
        failed: TrueupError | None = None
        for side in sides:
            capture = self.capture(side)
            try:
                call, others = find_first(capture, Selection(capture.path, **chosen), name)  # type: ignore[arg-type]
            except TrueupError as error:
                failed = failed or error
                continue
            if others:
                self.console.print(Text(f"the first of several; the others: {others}", "dim"))
            return side, Node(capture, call)
        assert failed is not None
        raise failed

    def counterpart(self, side: Side, node: Node) -> Node | None:
        """Return the call of the other side: as the comparison paired it, else the one with the same name."""
        if self.is_alone:
            return None
        other = self.capture("cand" if side == "base" else "base")
        call = node.call
        if self.comparison is not None:
            compared = Compared(self.comparison.result.matched, call.rank, [call.step])
            seq = compared.pair(call.seq, SIDES.index(side))[1 - SIDES.index(side)]
            if seq >= 0:
                return at_seq(other, Selection(other.path, step=call.step, rank=call.rank), seq)
        return named_alike(node, other)

    @property
    def command(self) -> list[str]:
        """The command line that the capture under suspicion was recorded with, as its manifest says; never executed unasked."""
        told = read_root(self.path(self.sides[0])).get("command")
        return [text for text in told if isinstance(text, str)] if isinstance(told, list) else []
