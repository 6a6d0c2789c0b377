"""An anomaly in one line of plain text. Pure.

    crf, forward, step 0, rank 0 (torch.Tensor.add): overflow: of inputs up to 6.1e4 (float16) it made 3 +Inf

The history of a loss scale in a few words: ``1,024 to 2,048, 1 of 5 steps skipped``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trueup.foundation.facts.anomaly import CAST, NAN, NEG, POS, SAT
from trueup.foundation.model import TensorStats
from trueup.foundation.words.wording import counted, number, one_line, short_source

if TYPE_CHECKING:
    from trueup.foundation.facts.anomaly import Anomaly, SlotNumbers


def sentence(found: Anomaly) -> str:
    """Say what happened where."""
    return f"{name_of(found)}: {happened(found)}"


def name_of(found: Anomaly) -> str:
    """Name the call: scope, phase, step, rank, and its operators, user-facing first."""
    return f"{one_line(found.place.name)} ({operators(found)})"


def operators(found: Anomaly) -> str:
    """Name the operators of a call: ``torch.Tensor.softmax / aten::_softmax``."""
    place = found.place
    return " / ".join(one_line(name) for name in dict.fromkeys((place.api, place.op)) if name)


def counts(slot: SlotNumbers) -> str:
    """Count what is bad in a slot: ``12 NaN, 3 +Inf of 64``."""
    stats = slot.stats
    if not isinstance(stats, TensorStats):
        return bad_numbers(slot.bad)  # another tool's statistics, which do not count
    told = [(stats.n_nan, "NaN"), (stats.n_posinf, "+Inf"), (stats.n_neginf, "-Inf")]
    told += [(stats.n_saturated, f"at the largest {slot.dtype}")] if slot.bad & SAT else []
    named = ", ".join(f"{count:,} {name}" for count, name in told if count)
    return f"{named} of {counted(stats.numel, 'element')}" if named else ""


def bad_numbers(bits: int) -> str:
    """Write bits as ``NaN, +Inf``."""
    names = ((NAN, "NaN"), (POS, "+Inf"), (NEG, "-Inf"), (SAT, "values at the dtype's largest"), (CAST, "casts of Inf"))
    return ", ".join(name for bit, name in names if bits & bit)


def happened(found: Anomaly) -> str:
    """Say what happened, and not where."""
    if found.kind in ("nan", "overflow", "saturated"):
        return _arose(found)
    if found.kind == "collective":
        return f"what it gave is clean and what it got is not: {_bad(found)}"
    if found.kind == "input":
        first = found.slots[0]
        return f"{first.slot}, which no recorded call made (data, or a buffer), holds {counts(first)} before this call reads it"
    if found.kind == "parameters" and found.notes:
        return f"this step of the optimizer left weights that are much too large: {found.notes[0]}"
    if found.kind == "parameters":
        first = found.slots[0]
        return f"{first.slot}, a weight or an optimizer's state, holds {counts(first)} before the first recorded step that reads it"
    return found.notes[0] if found.notes else found.kind


def _arose(found: Anomaly) -> str:
    word = {"nan": "NaN arises", "overflow": "overflow", "saturated": "saturation"}[found.kind]
    read = [slot for slot in found.slots if _is_read(slot.slot) and isinstance(slot.stats, TensorStats)]
    size = max((slot.largest for slot in read if not math.isnan(slot.largest)), default=math.nan)
    dtypes = ", ".join(dict.fromkeys(slot.dtype for slot in read))
    asked = any(slot.bad for slot in read)
    if not read:
        inputs = "no tensor"
    elif math.isnan(size) and _are_empty(read):
        inputs = "nothing but empty tensors"
    else:
        inputs = f"{'inputs without NaN' if asked else 'clean inputs'} up to {number(size)} ({dtypes})"
    return f"{word}: of {inputs} it made {_bad(found)}"


def _are_empty(slots: Sequence[SlotNumbers]) -> bool:
    return all(isinstance(slot.stats, TensorStats) and slot.stats.numel == 0 for slot in slots)


def _bad(found: Anomaly) -> str:
    bad = [slot for slot in found.slots if slot.bad and not _is_read(slot.slot)]
    return "; ".join(f"{counts(slot)} in {slot.slot}" for slot in bad[:2]) or "bad numbers"


def _is_read(slot: str) -> bool:
    return slot.startswith(("input.", "param.", "grad_output."))


HEADS = {"clean": "CLEAN  ", "harmless": "HARMLESS  ", "found": "FOUND  ", "inconclusive": "COULD NOT TELL  "}
"""The words that a verdict begins with."""


def verdict_lines(
    verdict: str, found: Sequence[Anomaly], notes: Sequence[str], measured: int, steps: int, expected: Sequence[tuple[str, int]],
    narrower: str | None,
) -> list[str]:  # fmt: skip
    """Say a verdict in lines of plain text, the first of which can stand alone."""
    head = HEADS[verdict]
    over = f"{counted(measured, 'tensor')} of {counted(steps, 'step')}"
    if verdict == "inconclusive":
        said = [f"whether anything overflowed: {notes[0] if notes else 'nothing was measured'}"]
    elif not found and narrower:
        said = [f"{over} would fit {narrower}"]
    elif not found:
        said = [f"no NaN, no Inf that any call suffers from, nothing saturated, in {over}"]
    else:
        said = _found_lines(found)
    if expected and verdict in ("clean", "harmless"):
        told = sum(count for _, count in expected)
        names = ", ".join(one_line(name) for name, _ in expected[:3])
        said.append(f"{counted(told, 'call')} with infinities that are expected: all that read them give clean numbers ({names})")
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def _found_lines(found: Sequence[Anomaly]) -> list[str]:
    first = found[0]
    lines = [first.sentence, f"{first.matters}: {first.because}"]
    if first.place.source:
        lines.append(f"your code: {short_source(first.place.source)}")
    if first.led:
        before = first.led[0]
        name = f"{one_line(before.place.scope or before.place.op)} ({one_line(before.place.op)})"
        lines.append(f"before it: {name} gave up to {number(before.largest)}")
    if first.carried:
        verb = "is" if first.carried == 1 else "are"
        lines.append(f"{counted(first.carried, 'later call')} of the step {verb} bad only because of it")
    if first.again:
        shown = ", ".join(map(str, first.again[:6])) + (" ..." if len(first.again) > 6 else "")
        lines.append(f"again in {counted(len(first.again), 'later step')}: {shown}")
    lines += [one_line(note) for note in first.notes if note not in first.sentence]
    if len(found) > 1:
        lines.append(f"{counted(len(found) - 1, 'further finding')}, independent of it")
    return lines


def loss_scale(history: Sequence[tuple[float, bool]]) -> str | None:
    """Say how the loss scale went, or return None where there was none; ``history``: scale and whether the step was skipped."""
    if not history:
        return None
    kept = [scale for scale, _ in history]
    low, high, last = min(kept), max(kept), kept[-1]
    way = _written(last) if low == high else f"{_written(kept[0])} to {_written(last)}"
    if low < min(kept[0], last) or high > max(kept[0], last):
        way += f" (between {_written(low)} and {_written(high)})"
    return f"{way}, {sum(skip for _, skip in history)} of {len(history)} steps skipped"


def _written(scale: float) -> str:
    return f"{scale:,.0f}" if scale.is_integer() and scale < 2**40 else number(scale)
