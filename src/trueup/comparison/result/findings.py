"""From a suspected call to a `Finding`: its numbers, its place in the user's code, its sentence, and a factor between the runs.

A result is the baseline's times one number (a missing or doubled scale, a mean for a sum over n ranks, a sign) where, to rounding::

    r  =  <baseline, candidate> / <baseline, baseline>        |candidate - r baseline|  <<  |candidate - baseline|

Both follow from the elements, and as well from anything linear in them: a sketch of either side.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Array, Row, Stream, distinct
from trueup.comparison.measures.measure import Distance
from trueup.comparison.measures.thresholds import ANY_ORDER, CHANCE, ENOUGH, PRECISE, SHARED
from trueup.comparison.normalise.updates import ADDED, STEP
from trueup.comparison.verdict.judged import Judged, Suspect
from trueup.comparison.verdict.regions import ran_otherwise
from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.operators import normalised
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import Finding, SlotComparison, SlotState
from trueup.foundation.words.reasons import DECIDED, in_words, joined
from trueup.foundation.words.sentence import evidence

ROUNDINGS = 8.0
"""Units of roundoff that a multiple may be off by."""

Frames = dict[int, tuple[tuple[str, ...], str | None]]


def suspect_finding(suspect: Suspect, baseline: Stream, candidate: Stream, sites: tuple[Frames, Frames]) -> Finding:
    """Describe a suspected call in full; ``sites`` are the call stacks of both sides."""
    judged = suspect.judged
    _name_weight(suspect, (baseline, candidate))
    _name_module(suspect, (baseline, candidate))
    slots = [_slot(e, judged, baseline, candidate) for e in judged.call.slots.values()]
    if judged.call.arguments is not None:
        first, second = judged.call.arguments
        slots.append(SlotComparison("arguments", "deviates", math.nan, "value", ("", ""), ("", ""), first, second))
    slots += [_lacking(slot, judged, baseline, candidate) for slot in judged.call.one_sided]
    broke = Why.LIMIT(judged.row.name, judged.broke) if judged.broke else None
    if suspect.kind in ("input", "overwritten"):
        slots.sort(key=lambda s: s.slot != suspect.reason)
    made = dataclasses.replace(
        _bare(judged.call.candidate, sites[1 if suspect.sides[1] else 0]),
        kind=suspect.kind,
        rule=judged.row.name + DECIDED[judged.decided],
        error_in=judged.error_in,
        error_out=judged.error_out,
        expected=judged.expected,
        slots=tuple(slots),
        api=suspect.api,
        aten=suspect.children,
        seq=(
            judged.call.baseline.seq if suspect.sides[0] else -1,
            judged.call.candidate.seq if suspect.sides[1] else -1,
        ),
        confidence="high" if suspect.certain else "could be rounding",
        because=joined([*suspect.because, _related(suspect, baseline, candidate), broke]),
    )
    return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")


def _name_weight(suspect: Suspect, streams: tuple[Stream, Stream]) -> None:
    """Say which weight an optimizer got wrong: the call that stands for it is one for all weights, outside any module."""
    judged = suspect.judged
    call = judged.call
    if call.candidate.op != STEP or judged.worst is None or any(reason.why is Why.NOT_UPDATED for reason in suspect.because):
        return
    scope, _, weight = judged.worst.removeprefix("output.").rpartition(".")
    call.baseline, call.candidate = (dataclasses.replace(row, scope=scope) for row in (call.baseline, call.candidate))
    weight, _, state = weight.partition(":")
    wrong = {slot.partition(":")[0] for slot, limit in judged.slot_expected.items() if call.slots[slot].relative > limit}
    added = state.startswith(ADDED)
    said = [Why.WEIGHT(None if added else state, added, weight, max(0, len(wrong) - 1) or None)]
    ran = [stream.stands_for.get(call.candidate.step, Counter()) for stream in streams]
    suspect.children = suspect.children or tuple(ran[1])[::-1]  # the last of them wrote the weight
    alone = [first - second for first, second in (ran, ran[::-1])]
    most = [tuple(Why.TIMES_RUN(*counted) for counted in ops.most_common(3)) for ops in alone]
    otherwise = ran_otherwise(most)
    said += [] if otherwise is None else [otherwise]
    suspect.because = tuple(said)


def _name_module(suspect: Suspect, streams: tuple[Stream, Stream]) -> None:
    """Say where one run alone executes something which module at the same path of the other run executes nothing, the outermost:
    one that was replaced by an identity, and not the last layer inside it."""
    call = suspect.judged.call
    if suspect.kind != "region" or all(suspect.sides):
        return
    other = streams[0 if suspect.sides[1] else 1]
    modules, ran = ({other.names.name(n) or "" for n in distinct(other.scope[its]).tolist()} for its in
                    (other.of_level("module"), ~other.of_level("module")))  # fmt: skip
    parts = call.candidate.scope.split(".")
    outer = (".".join(parts[: n + 1]) for n in range(len(parts)) if ran)
    idle = (one for one in outer if one in modules and not any(f"{of}.".startswith(f"{one}.") for of in ran))
    call.candidate = dataclasses.replace(call.candidate, scope=next(idle, call.candidate.scope))


def _related(suspect: Suspect, baseline: Stream, candidate: Stream) -> Reason | None:
    """Return of what is wrong that it is a multiple of what is right, or the same numbers in another order, where it is."""
    judged = suspect.judged
    error = judged.call.slots.get(suspect.reason if suspect.kind == "input" else judged.worst or "")
    if error is None or error.kind not in ("sketch", "tensor") or not error.low > 0:
        return None
    b, c = error.baseline, error.candidate
    known = baseline.l2[b] > 0 and candidate.l2[c] > 0 and 0 < baseline.numel[b] < math.inf
    if not known or (judged.error_in > judged.error_out and suspect.kind != "input"):
        return None
    if baseline.dtype_of(b) == candidate.dtype_of(c) and _is_reordered((baseline, b), (candidate, c)):
        return Why.REORDERED()
    return factor(baseline.sketch[b], candidate.sketch[c], max(ROUNDINGS * suspect.unit, judged.error_in), int(baseline.numel[b]))


def _is_reordered(*sides: tuple[Stream, int]) -> bool:
    """Tell whether two tensors that differ agree in all that no order changes: number, extremes, zeros, sum and norm."""
    same = [[float(stream.number(name)[k]) for name in ("min", "max", "n_zero")] + [stream.numel[k]] for stream, k in sides]
    (l2, mean), (other, beside) = ((float(stream.l2[k]), float(stream.mean[k])) for stream, k in sides)
    close = math.isclose(l2, other, rel_tol=ANY_ORDER) and abs(mean - beside) * math.sqrt(same[0][-1]) <= ANY_ORDER * l2
    return close and same[0] == same[1]


def by_itself(finding: Finding, given: float) -> Finding:
    """Describe a communication that is at fault itself; ``given`` is the largest error of what the ranks gave."""
    made = dataclasses.replace(finding, because=joined([Why.GIVEN(given or None), finding.because]))
    return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")


def with_names(finding: Finding, modules: Mapping[str, Mapping[str, Any]], signatures: object = None) -> Finding:
    """Name the arguments that a call was given by position, and otherwise than in the other run: those of a module as its
    ``forward`` does, those of a function and an operator as the framework does (``signatures``, by operator)."""
    if finding.kind != "argument":
        return finding
    if finding.level != "module":
        names = signatures.get(finding.op) if isinstance(signatures, Mapping) else None
        made = dataclasses.replace(finding, positions=tuple(map(str, names)) if isinstance(names, list) else ())
        return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")
    held = modules.get(finding.scope, {}).get("inputs")
    if not isinstance(held, list):
        return finding
    names = {str(at): str(name) for at, name in enumerate(held)}
    made = dataclasses.replace(finding, slots=tuple(_with_names(slot, names) for slot in finding.slots))
    return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")


def _with_names(slot: SlotComparison, names: Mapping[str, str]) -> SlotComparison:
    if slot.method != "value" or slot.slot != "arguments":
        head, _, at = slot.slot.rpartition(".")
        return dataclasses.replace(slot, slot=f"{head}.{names.get(at, at)}") if slot.method == "value" else slot
    given = [decoded(side) if isinstance(side, str) else {} for side in (slot.baseline, slot.candidate)]
    first, second = (json.dumps({names.get(at, at): value for at, value in side.items()}) for side in given)
    return dataclasses.replace(slot, baseline=first, candidate=second)


def victim_findings(table: pa.Table, most: int) -> list[Finding]:
    """Describe the first calls of a finished table that only pass on what they got."""
    role = table["role"].combine_chunks()
    victim = role.dictionary.index("victim").as_py() if role.dictionary is not None else -1
    rows = np.flatnonzero(role.indices.to_numpy(zero_copy_only=False) == victim)[:most]
    found = []
    for row in table.take(pa.array(rows)).to_pylist():
        made = Finding(
            "operator", row["step"], row["rank"], row["phase"], row["level"], row["scope"], row["op"], row["ordinal"],
            row["source"], "", row["rule"], row["error_in"], row["error_out"], row["expected"],
            seq=(row["seq_baseline"], row["seq_candidate"]),
        )  # fmt: skip
        found.append(dataclasses.replace(made, sentence=f"{made.name}: its outputs differ as far as its inputs explain"))
    return found


def unmatched_finding(call: Row, side: Literal["baseline", "candidate"], sites: Frames) -> Finding:
    """Describe a call that one side lacks."""
    seq = (call.seq, -1) if side == "baseline" else (-1, call.seq)
    made = dataclasses.replace(_bare(call, sites), kind="unmatched", side=side, seq=seq)
    return dataclasses.replace(made, sentence=f"{made.name}: {evidence(made)}")


def _bare(call: Row, sites: Frames) -> Finding:
    frames, text = sites.get(call.site, ((), None)) if call.site is not None else ((), None)
    return Finding(
        "operator", call.step, call.rank, call.phase, call.level, call.scope, call.op, call.ordinal,
        frames[0] if frames else None, "", stack=tuple(frames), source_line=text,
    )  # fmt: skip


def _slot(error: Distance, judged: Judged, baseline: Stream, candidate: Stream) -> SlotComparison:
    b, c = error.baseline, error.candidate
    return SlotComparison(
        error.slot, _state(error, judged), error.relative, error.kind,
        (baseline.dtype_of(b) or "", candidate.dtype_of(c) or ""), (_shape(baseline, b), _shape(candidate, c)),
        baseline.stats(b), candidate.stats(c), in_words(error.why),
    )  # fmt: skip


def _lacking(slot: str, judged: Judged, baseline: Stream, candidate: Stream) -> SlotComparison:
    """Describe a slot that only one side has: a tensor given, or returned, on one side only."""
    found = []
    for row, stream in ((judged.call.baseline, baseline), (judged.call.candidate, candidate)):
        k = row.slots.get(slot)
        found.append(("", "") if k is None else (stream.dtype_of(k) or "", _shape(stream, k)))
    (dtype_b, shape_b), (dtype_c, shape_c) = found
    sides = [f"{dtype} {shape}".strip() or None for dtype, shape in found]
    method: Literal["value", "none"] = "value" if is_input(slot) else "none"
    state: SlotState = "deviates" if is_input(slot) else "incomparable"
    return SlotComparison(
        slot, state, math.nan, method, (dtype_b, dtype_c), (shape_b, shape_c), sides[0], sides[1], "only one side has it"
    )


def _state(error: Distance, judged: Judged) -> SlotState:
    if math.isnan(error.low):
        return "incomparable"
    if error.low == 0:
        return "agrees" if error.kind == "statistics" else "equal"
    if is_output(error.slot):
        return "agrees" if error.relative <= judged.slot_expected.get(error.slot, 0.0) else "deviates"
    return "agrees" if error.relative <= max(0.1 * judged.error_out, 1e-5) else "deviates"


def tensor_text(stream: Stream, k: int) -> str:
    """Write what a slot holds: ``float32 (4, 1, 1, 8)``."""
    return f"{stream.dtype_of(k) or ''} {_shape(stream, k)}".strip()


def _shape(stream: Stream, k: int) -> str:
    shape = stream.shapes[k]
    return "" if shape is None else f"({', '.join(map(str, shape))})"


def of_a_kind(culprits: Iterable[Suspect]) -> list[list[Suspect]]:
    """Join culprits that are one finding: an operator broken wherever it runs, an option that all calls are given, and all that
    draws random numbers, for it draws them from one generator."""
    found: dict[tuple[str, ...], list[Suspect]] = {}
    for culprit in culprits:
        found.setdefault(_kind(culprit), []).append(culprit)
    return list(found.values())


def _kind(suspect: Suspect) -> tuple[str, ...]:
    call = suspect.judged.call.candidate
    return (suspect.kind,) if suspect.kind == "random" else (suspect.kind, call.level, call.phase, normalised(call.op))


LARGEST = 4096
"""Largest integer, or integer under a root, that is looked for: heads, ranks, widths."""


def factor(baseline: Array, candidate: Array, rounding: float, elements: int) -> Reason | None:
    """Return the factor between two sides, float64 ``(n,)`` elements or sketches; None where they are no multiples of one
    another. ``rounding`` is the relative error that rounding explains, ``elements`` the size of the tensor."""
    square = float(baseline @ baseline)
    apart = float(np.linalg.norm(candidate - baseline))
    if not (np.isfinite(candidate).all() and 0 < square < math.inf and apart > 0):
        return None
    value = float(baseline @ candidate) / square
    rest = float(np.linalg.norm(candidate - value * baseline))
    size = abs(value) * math.sqrt(square)
    known = 2.0**-500 < abs(value) < 2.0**500  # numbers whose squares are numbers
    if not known or rest > SHARED * apart or rest > max(rounding, 2.0**-40) * size:
        return None
    exact = _exact(value, min(max(rounding, rest / size), abs(value - 1) / 2))  # it is nearer to that than to no factor
    return Why.FACTOR(exact, value) if exact or elements >= CHANCE else None


def _exact(value: float, within: float) -> str:
    """Return an integer, a root of one or one over either that a number is, if that is no chance; else nothing."""
    size, sign = abs(value), "-" if value < 0 else ""
    inverse = size < 1
    large = 1 / size if inverse else size
    for number, what, gap in ((round(large), "{}", 1.0), (round(large * large), "sqrt({})", 0.5)):
        target = float(number) if gap == 1.0 else math.sqrt(number)
        near = abs(large - target) <= within * large
        if 1 <= number <= LARGEST and near and within * number / gap <= PRECISE:
            found = what.format(number)
            return sign + (f"1/{found}" if inverse else found)
    simple = Fraction(size).limit_denominator(8)
    if abs(size - simple) <= within * size and ENOUGH * within <= PRECISE and simple.numerator <= 8:
        return f"{sign}{simple}"
    return ""
