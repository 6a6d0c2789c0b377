"""One call of a run with what stands around it, and its counterpart in another run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.doors.report.operands import Operand, recorded
from trueup.doors.report.selecting import Call, Selection, chosen_calls, find_call
from trueup.doors.report.tensor_diff import TensorDiff, compare_tensors
from trueup.doors.report.tensor_view import record_of
from trueup.foundation.kernels.tolerance import Tolerance
from trueup.foundation.model import SlotComparison, TrueupError

if TYPE_CHECKING:
    from trueup.foundation.store import Capture

ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Node:
    """A call and the capture that holds it."""

    capture: Capture
    call: Call

    def operand(self, slot: str) -> Operand:
        """Return a slot as a side of a comparison of tensors.

        Raises:
            TrueupError: there is no such slot, or its elements cannot be read.
        """
        return recorded(self.capture, self.capture.path, self.call, record_of(self.call, slot))


def named_alike(node: Node, other: Capture) -> Node | None:
    """Return the call of another capture that has the same name, None where that holds none."""
    call = node.call
    chosen = Selection(other.path, phase=call.phase, step=call.step, rank=call.rank, level=call.level)
    rows = other.records(
        ["seq"], rank=call.rank, step=call.step, phase=call.phase, level=call.level, scope=call.scope, op=call.op,
        ordinal=call.ordinal,
    )  # fmt: skip
    seqs = rows["seq"].unique().to_pylist()
    return at_seq(other, chosen, seqs[0]) if len(seqs) == 1 else None


def at_seq(capture: Capture, chosen: Selection, seq: int) -> Node | None:
    """Return the chosen call with an execution number, with all its slots."""
    try:
        return Node(capture, find_call(capture, chosen, str(seq)))
    except TrueupError:
        return None


def slots_of(baseline: Node, candidate: Node) -> Iterator[tuple[SlotComparison, TensorDiff | None]]:
    """Yield every slot of two calls that are counterparts, in the candidate's order, with what is known of its tensors."""
    there = {record["slot"]: record for record in baseline.call.slots}
    names = [record["slot"] for record in candidate.call.slots]
    for name in [*names, *(slot for slot in there if slot not in names)]:
        if name == ARGUMENTS or name not in there or name not in names:
            yield _untensored(name, there.get(name), next((r for r in candidate.call.slots if r["slot"] == name), None)), None
            continue
        try:
            sides = baseline.operand(name), candidate.operand(name)
        except TrueupError as error:
            yield SlotComparison(name, "incomparable", float("nan"), "none", ("", ""), ("", ""), None, None, str(error)), None
            continue
        diff = compare_tensors(*sides, Tolerance(), top=1)
        yield _compared(name, diff), diff


def _untensored(name: str, before: dict[str, object] | None, after: dict[str, object] | None) -> SlotComparison:
    """Compare what is no tensor, or is on one side alone."""
    texts = [None if record is None else str(record.get("value") or record.get("dtype") or "") for record in (before, after)]
    same = texts[0] == texts[1]
    state = "equal" if same else "deviates"
    reason = "" if None not in texts else f"only in the {'candidate' if texts[0] is None else 'baseline'}"
    return SlotComparison(name, state, 0.0 if same else float("nan"), "value", ("", ""), ("", ""), texts[0], texts[1], reason)  # type: ignore[arg-type]


def _compared(name: str, diff: TensorDiff) -> SlotComparison:
    sides = diff.baseline, diff.candidate
    dtypes = sides[0].dtype or "", sides[1].dtype or ""
    shapes = tuple("" if side.shape is None else f"[{', '.join(map(str, side.shape))}]" for side in sides)
    stats = [side.stats or side.digest for side in sides]
    if diff.metrics is not None:
        relative, method = diff.metrics.relative_l2, "tensor"
        state = "equal" if diff.metrics.same else "agrees"
    elif diff.estimate is not None:
        relative, method, state = diff.estimate.relative_l2, "sketch", "agrees"
    elif diff.answer == "close":
        relative, method, state = 0.0, "digest", "equal"
    else:
        relative, method, state = float("nan"), "none", "incomparable"
    reason = "" if method != "none" else diff.sentence
    return SlotComparison(name, state, relative, method, dtypes, (shapes[0], shapes[1]), stats[0], stats[1], reason)  # type: ignore[arg-type]


def calls_of(capture: Capture, chosen: Selection, limit: int) -> tuple[list[Node], int]:
    """Return the first of the chosen calls, and how many there are.

    Raises:
        TrueupError: there are none.
    """
    calls, total = chosen_calls(capture, chosen, limit)
    return [Node(capture, call) for call in calls], total
