"""What a shadow run found, in words.

WRONG  first: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward_impl)
       given its own inputs it is off by 2.1e-1 (rel. L2) in output.0, float32 [64, 256]: 3.5e6 x what rounding explains
       your code: centernet.py:57 in forward
       11 further calls of the same operator are wrong by themselves
       judged 412 calls of 1 step against cpu float64; not judged 3: random: another draw is as good (3)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trueup.foundation.words.wording import counted, one_line, sci, short_source, times

if TYPE_CHECKING:
    from trueup.recording.execution.shadow import Blame, LockstepResult, Parting, ShadowResult

HEADS = {"wrong": "WRONG  ", "sound": "NOTHING WRONG  ", "could not tell": "COULD NOT TELL  "}
NAMED = 3


def lines(result: ShadowResult) -> list[str]:
    """Say the verdict in lines of plain text; the first can stand alone."""
    said = {"wrong": _wrong, "sound": _sound, "could not tell": _untold}[result.verdict](result)
    head = HEADS[result.verdict]
    said = [*said, *_left(result), *(f"note: {one_line(note)}" for note in result.notes[:3])]
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def operators(blame: Blame) -> str:
    """``torch.lstm / aten::_thnn_fused_lstm_cell``."""
    return " / ".join(one_line(name) for name in (blame.api, blame.op) if name)


def measured(blame: Blame) -> str:
    """Say the error of a call, in one line."""
    if not math.isfinite(blame.excess) or blame.dtype.startswith(("int", "uint", "bool")):
        return f"given its own inputs, {blame.slot} ({blame.dtype} {blame.shape}): {one_line(blame.reason)}"
    size = f"{sci(blame.error)} (rel. L2)" if math.isfinite(blame.error) else "something where the truth is zero"
    return (
        f"given its own inputs it is off by {size} in {one_line(blame.slot)}, {blame.dtype} {blame.shape}: "
        f"{times(blame.excess)} what rounding explains"
    )


def _wrong(result: ShadowResult) -> list[str]:
    first = result.culprits[0]
    said = [f"first: {one_line(first.name)}  ({operators(first)})", measured(first)]
    if first.source:
        said.append(f"your code: {short_source(first.source)}")
    same = sum((b.op, b.phase) == (first.op, first.phase) for b in result.culprits) - 1
    if same:
        said.append(f"{counted(same, 'further call')} of the same operator {'is' if same == 1 else 'are'} wrong by "
                    f"{'itself' if same == 1 else 'themselves'}")  # fmt: skip
    others = Counter((b.op, b.phase) for b in result.culprits if (b.op, b.phase) != (first.op, first.phase))
    if others:
        named = ", ".join(f"{one_line(op)} in {phase} ({n:,})" for (op, phase), n in others.most_common(NAMED))
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        said.append(f"so are calls of other operators, independently: {named}{more}")
    return [*said, _judged(result)]


def _sound(result: ShadowResult) -> list[str]:
    said = [f"{_judged(result)}: each computed what its inputs make, within rounding"]
    if result.suspects:
        first = max(result.suspects, key=lambda b: b.excess)
        said.append(f"{counted(len(result.suspects), 'call')} could be more than rounding, most of all {one_line(first.name)}  "
                    f"({operators(first)}), {times(first.excess)}")  # fmt: skip
    return said


def _untold(result: ShadowResult) -> list[str]:
    if not any(n for state, n in result.counts.items() if state != "not judged"):
        return ["no call was judged"]
    said = [f"{counted(len(result.unknown), 'operator')} had no reference; {_judged(result)}, and nothing was wrong"]
    named = list(result.unknown.items())
    said += [f"{one_line(op)}: {one_line(reason)}" for op, reason in named[:NAMED]]
    return said + ([f"and {len(named) - NAMED} more"] if len(named) > NAMED else [])


def _judged(result: ShadowResult) -> str:
    judged = sum(n for state, n in result.counts.items() if state != "not judged")
    return f"judged {counted(judged, 'call')} of {counted(result.steps, 'step')} against {result.reference}"


def _left(result: ShadowResult) -> Iterable[str]:
    ill, untold = result.counts.get("ill-conditioned", 0), result.counts.get("could not tell", 0)
    if ill:
        has = "has" if ill == 1 else "have"
        yield f"{counted(ill, 'call')} {has} an error that one unit in the last place of the inputs explains"
    if untold:
        yield f"{counted(untold, 'call')} could go either way: ties, or what is rounded before, may decide integers"
    if result.left:
        reasons = list(result.left.items())
        named = "; ".join(f"{one_line(reason)} ({n:,})" for reason, n in reasons[:NAMED])
        more = f"; and {len(reasons) - NAMED} more reasons" if len(reasons) > NAMED else ""
        yield f"not judged {counted(sum(result.left.values()), 'call')}: {named}{more}"


def lockstep_lines(result: LockstepResult) -> list[str]:
    """Say what two models in lockstep showed."""
    forward, backward = result.compared.get("forward", 0), result.compared.get("backward", 0)
    counts = f"compared {counted(forward, 'call')} of {counted(result.modules, 'module')} forward, {backward:,} backward"
    if result.culprit is not None:
        first = result.culprit
        said = [f"first: {one_line(first.name)}  ({one_line(first.module)})", _parting(first), counts]
    elif result.verdict == "sound":
        said = [f"{counts}: given the same inputs, both compute the same within rounding"]
    else:
        said = [f"{counts}, and nothing was wrong there" if result.compared else "no call could be compared"]
    if result.suspects:
        worst = max(result.suspects, key=lambda p: p.excess)
        said.append(f"{counted(len(result.suspects), 'call')} could be more than rounding, most of all {one_line(worst.name)}, "
                    f"{times(worst.excess)}")  # fmt: skip
    if result.left:
        said.append("not compared: " + "; ".join(f"{one_line(why)} ({n:,} calls)" for why, n in result.left.items()))
        if any("random" in why for why in result.left):
            said.append("next: switch dropout off on both sides, with eval() or p=0")
    head = HEADS[result.verdict]
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def _parting(parting: Parting) -> str:
    where = f"{one_line(parting.slot)}, {parting.dtype} {list(parting.shape)},"
    if parting.slot.startswith("param."):
        return f"the weights differ before anything runs: {where} by {sci(parting.error)} (rel. L2)"
    if not math.isfinite(parting.excess) or not parting.dtype.startswith(("float", "bfloat", "complex")):
        return f"given the same inputs, {where} differs: {one_line(parting.reason)}"
    size = f"{sci(parting.error)} (rel. L2)"
    return f"given the same inputs, {where} is off by {size}: {times(parting.excess)} what rounding explains"
