"""What a result holds: the two runs in short, the table of calls, the counts; and its findings, each from a suspected call: its
numbers, its place in the user's code, its sentence, and a factor between the runs.

A result is the baseline's times one number (a missing or doubled scale, a mean for a sum over n ranks, a sign) where, to rounding::

    r  =  <baseline, candidate> / <baseline, baseline>        |candidate - r baseline|  <<  |candidate - baseline|

Both follow from the elements, and as well from anything linear in them: a sketch of either side.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.graph.streams import NONE, WAYS, Alignment, Array, Numbers, Row, Stream, distinct
from trueup.comparison.measures.measure import Distance
from trueup.comparison.measures.thresholds import ANY_ORDER, CHANCE, ENOUGH, HALF, PRECISE, SHARED
from trueup.comparison.normalise.updates import ADDED, STEP
from trueup.comparison.verdict.judged import Judged, Suspect, Verdicts
from trueup.comparison.verdict.regions import ran_otherwise
from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.criteria import Criterion, Limit
from trueup.foundation.facts.criteria import Row as RuleRow
from trueup.foundation.facts.operators import named, normalised
from trueup.foundation.facts.slots import is_input, is_output
from trueup.foundation.facts.why import EQUAL, ROLES, Reason, Why
from trueup.foundation.model import Finding, Rule, RunSummary, SlotComparison, SlotState
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import SCALE_COLUMNS, Overview, Vocabulary, loss_scale_in
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.words.reasons import DECIDED, in_words, joined
from trueup.foundation.words.sentence import evidence

NAME = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        *((n, pa.int32()) for n in ("step", "rank")),
        *((n, NAME) for n in ("phase", "level", "scope", "op")),
        ("ordinal", pa.int32()),
        *((n, pa.int64()) for n in ("seq_baseline", "seq_candidate")),
        *((n, pa.float64()) for n in ("error_in", "error_out", "expected", "ratio")),
        *((n, NAME) for n in ("state", "role", "rule", "source", "paired", "scope_baseline", "op_baseline")),
    ]
)
"""Columns of ``calls.parquet``: one row per call that both runs made, and then one for each that one run made. Names are the
candidate's; ``scope_baseline`` and ``op_baseline`` stand where the baseline has other ones, and are null elsewhere."""

INHERITED = "inherited"  # role of a call that differs by more than rounding, and by no more than its inputs explain
ONE_SIDED = ("only baseline", "only candidate")  # state of a call of one run: no errors, and no number in the other run

ROUNDINGS = 8.0
"""Units of roundoff that a multiple may be off by."""

Frames = dict[int, tuple[tuple[str, ...], str | None]]


def call_table(verdicts: Verdicts, paired: Array, sites: Frames) -> pa.Table:
    """Return the table of calls of one rank and step; `finish_table` sets the state of what turns out to be a culprit or victim."""
    errors = {name: getattr(verdicts, name) for name in ("error_in", "error_out", "expected", "ratio")}
    which = verdicts.rows + len(verdicts.criterion.rows) * verdicts.decided.astype(np.int64)
    return _table(verdicts.errors.streams, verdicts.errors.calls, errors, (verdicts.role, which, paired), verdicts.criterion, sites)


def equal_table(stream: Stream, criterion: Criterion, sites: Frames) -> pa.Table:
    """Return the same of a candidate that is the baseline to the last bit."""
    calls, nothing = np.arange(len(stream)), np.zeros(len(stream))
    errors = dict.fromkeys(("error_in", "error_out", "expected", "ratio"), nothing)
    facts = np.full(len(stream), EQUAL), stream.rows(criterion), np.zeros(len(stream), np.int8)
    return _table((stream, stream), (calls, calls), errors, facts, criterion, sites)


def _table(
    streams: tuple[Stream, Stream], calls: tuple[Numbers, Numbers], errors: Mapping[str, Array],
    facts: tuple[Array, Array, Array], criterion: Criterion, sites: Frames,
) -> pa.Table:  # fmt: skip
    """Return the table of matched calls; ``facts`` are their role, what decided, and how they were paired, as numbers."""
    (baseline, candidate), (b, c), (role, decided, paired) = streams, calls, facts
    names, count = candidate.names, len(c)
    columns: dict[str, Any] = {
        "step": candidate.step[c].astype(np.int32), "rank": np.full(count, candidate.rank, np.int32),
        **{name: _named(getattr(candidate, name)[c], names) for name in ("phase", "level", "scope", "op")},
        "ordinal": candidate.ordinal[c].astype(np.int32), "seq_baseline": baseline.seq[b], "seq_candidate": candidate.seq[c],
        **errors, "state": _words(role, ROLES), "role": _words(np.zeros(count, np.int8), ("",)),
        "rule": _words(decided, [row.name + more for more in DECIDED for row in criterion.rows]),
        "paired": _words(paired, WAYS), "source": _sources(candidate.site[c], sites),
        **{f"{n}_baseline": _named(_others(getattr(baseline, n)[b], getattr(candidate, n)[c]), names) for n in ("scope", "op")},
    }  # fmt: skip
    return pa.table([columns[field.name] for field in SCHEMA], names=SCHEMA.names)


def one_sided_tables(alignment: Alignment, streams: tuple[Stream, Stream], sites: tuple[Frames, Frames]) -> list[pa.Table]:
    """Return rows of the table of calls for those without counterpart, the baseline's and the candidate's."""
    found = []
    for side, calls in enumerate((alignment.only_baseline, alignment.only_candidate)):
        stream, count = streams[side], len(calls)
        columns: dict[str, Any] = {
            "step": stream.step[calls].astype(np.int32), "rank": np.full(count, stream.rank, np.int32),
            **{name: _named(getattr(stream, name)[calls], stream.names) for name in ("phase", "level", "scope", "op")},
            "ordinal": stream.ordinal[calls].astype(np.int32), ("seq_baseline", "seq_candidate")[side]: stream.seq[calls],
            "state": _words(np.full(count, side), ONE_SIDED), "role": _words(np.zeros(count, np.int8), ("",)),
            "source": _sources(stream.site[calls], sites[side]),
        }  # fmt: skip
        arrays = [columns[field.name] if field.name in columns else pa.nulls(count, field.type) for field in SCHEMA]
        found.append(pa.table(arrays, names=SCHEMA.names).cast(SCHEMA))
    return [table for table in found if len(table)]


def with_one_sided(matched: pa.Table, one_sided: Sequence[pa.Table]) -> pa.Table:
    """Return the whole table of calls."""
    return pa.concat_tables([matched, *one_sided]).unify_dictionaries() if one_sided else matched


def _sources(site: Numbers, sites: Frames) -> pa.DictionaryArray:
    """Return the innermost frame of each call stack, null where there is none."""
    distinct, place = np.unique(site, return_inverse=True)
    frames = [sites.get(number, ((), None))[0] for number in distinct.tolist()]
    return _words(place.reshape(-1), [its[0] if its else None for its in frames])


def _named(numbers: Numbers, names: Vocabulary) -> pa.DictionaryArray:
    words = [*names.names, None]  # once: another thread adds names
    used = np.zeros(len(words), bool)
    used[numbers] = True  # `NONE` is the last
    return _words((np.cumsum(used) - 1)[numbers], [words[number] for number in np.flatnonzero(used).tolist()])


def _others(own: Numbers, theirs: Numbers) -> Numbers:
    """Return names where they are not the other run's."""
    return np.where(own == theirs, NONE, own)


def _words(which: Array, words: Sequence[str | None]) -> pa.DictionaryArray:
    missing = np.array([word is None for word in words])[which]  # Arrow merges no dictionaries that hold nulls
    indices = pa.array(which.astype(np.int32), mask=missing if missing.any() else None)
    return pa.DictionaryArray.from_arrays(indices, pa.array([word or "" for word in words], pa.string()))


def finish_table(
    tables: Sequence[pa.Table], culprits: set[tuple[int, int, int]], first: tuple[int, int] | None,
    reached: Mapping[int, tuple[int, int]] | None = None,
) -> pa.Table:  # fmt: skip
    """Build the table of calls from the parts' `call_table`. ``culprits`` are ``(rank, step, seq on the candidate)``; only what
    comes after ``first``, ``(step, seq)`` of the first culprit, is a victim. ``reached``: by rank, ``(step, seq)`` of the first
    call that got the difference from another rank. Execution numbers are a rank's own: a later stage of a pipeline has few calls
    before it receives what an earlier one made after many."""
    if not tables:
        return SCHEMA.empty_table()
    table = pa.concat_tables(tables).unify_dictionaries()
    rank, step, seq = (table[name].to_numpy() for name in ("rank", "step", "seq_candidate"))
    words = table["state"].chunk(0).dictionary.to_pylist()
    told = np.concatenate([chunk.indices.to_numpy() for chunk in table["state"].chunks])
    states = ("equal", "agrees", "deviates", "incomparable")
    shown = {"carried": "agrees", "unsized": "incomparable"}
    state = np.array([states.index(shown.get(word, word)) for word in words], np.int8)[told]
    after = np.zeros(len(seq), bool) if first is None else (step > first[0]) | ((step == first[0]) & (seq > first[1]))
    sinces = dict((reached or {}).items() if first is not None else ())
    for place, s, n in culprits:
        if place in sinces:
            sinces[place] = min(sinces[place], (s, n + 1))
    order = np.argsort(rank, kind="stable") if sinces else np.empty(0, np.int64)  # once for all: of thousands, each has few rows
    for place, since in sinces.items():
        rows = order[slice(*np.searchsorted(rank, [place, place + 1], sorter=order))]
        after[rows] = (step[rows] > since[0]) | ((step[rows] == since[0]) & (seq[rows] >= since[1]))
    victim = after & np.array([word in ("carried", "unsized") for word in words])[told]
    culprit = np.zeros(len(seq), bool)
    near = np.flatnonzero(np.isin(seq, [n for _, _, n in culprits]))
    culprit[near] = [one in culprits for one in zip(*(key[near].tolist() for key in (rank, step, seq)), strict=True)]
    victim &= ~culprit
    state[victim | culprit] = states.index("deviates")
    inherited = np.array([word == "carried" for word in words])[told] & ~victim & ~culprit
    role = np.select([culprit, victim, inherited], [2, 1, 3])
    replaced = {"state": _words(state, states), "role": _words(role, ("", "victim", "culprit", INHERITED))}
    columns = [pa.chunked_array([replaced[name]]) if name in replaced else table[name] for name in SCHEMA.names]
    return pa.table([column.cast(field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def count(table: pa.Table, one_sided: Sequence[pa.Table], unmatched: int, steps: int) -> dict[str, int]:
    """Count the matched calls by state, and those of one run: all, and the ``unmatched`` that nothing accounts for. ``inherited``
    are those of ``agrees`` that differ by more than rounding, but no more than their inputs explain."""
    found = {item["values"]: item["counts"] for item in table.column("state").value_counts().to_pylist()}
    names = ("equal", "agrees", "deviates", "incomparable")
    held = [sum(len(one) for one in one_sided if one["state"][0].as_py() == state) for state in ONE_SIDED]
    inherited = int(pc.sum(pc.equal(table["role"], INHERITED)).as_py() or 0)
    only = {"only_baseline": held[0], "only_candidate": held[1]}
    states = {n: found.get(n, 0) for n in names}
    return {"compared": table.num_rows, **states, "inherited": inherited, "unmatched": unmatched, **only, "steps": steps}


def no_optimizer(phases: Collection[str], *, gradients: bool) -> list[Reason]:
    """Return that no optimizer was seen, of a training; ``gradients``: those of weights were."""
    return [Why.NO_OPTIMIZER(gradients)] if "backward" in phases and "optimizer" not in phases else []


def victims(table: pa.Table) -> tuple[int, int]:
    """Count the calls that pass on what they got, and those of them whose inputs are so far off that more would not show."""
    passing = pc.equal(table.column("role"), "victim")
    unknown = pc.and_(passing, pc.greater_equal(table.column("error_in"), HALF))
    return int(pc.sum(passing).as_py() or 0), int(pc.sum(unknown).as_py() or 0)


def summarise(capture: Capture, overview: Overview, ranks: Sequence[int]) -> RunSummary:
    """Say in short what a capture is."""
    manifests = [capture.ranks[r] for r in ranks if r in capture.ranks]
    first = manifests[0] if manifests else {}
    devices = dict.fromkeys(str(d) for m in manifests for d in m.get("devices", []))
    environment = {f"version of {k}": str(v) for k, v in first.get("versions", {}).items()}
    environment |= {str(k): str(v) for k, v in first.get("environment", {}).items()}
    environment |= {f"seed of {k}": str(v) for k, v in first.get("seeds", {}).items()}
    if overview.scaled:
        scale = loss_scale_in(capture.records(columns=list(SCALE_COLUMNS), step=overview.scaled, op=named("scaler")))
        environment |= {} if scale is None else {"loss scale": scale}
    notes = dict.fromkeys([str(n) for m in manifests for n in m.get("notes", [])] + list(capture.problems))
    return RunSummary(
        path=str(capture.path),
        framework=str(first.get("framework", "?")),
        devices=tuple(devices),
        ranks=len(capture.ranks),
        steps=len(capture.steps),
        calls=overview.calls,
        losses=tuple(overview.losses.items()),
        environment=environment,
        notes=tuple(notes),
        policy=policy_lines(capture.ranks.values()),
    )


def used_rules(matched: pa.Table, criterion: Criterion) -> Sequence[Rule]:
    """Return what judged calls, as the table of calls names it, that of most calls first."""
    rule, state = matched["rule"], matched["state"]
    calls, deviates = _counted(rule), _counted(rule.filter(pc.equal(state, "deviates")))
    return tuple(_rule(name, n, deviates[name], criterion) for name, n in calls.most_common())


def _counted(names: pa.ChunkedArray) -> Counter[str]:
    """Count names. (Arrow's `group_by` loads its query engine for it.)"""
    found: Counter[str] = Counter()
    for entry in names.value_counts().to_pylist():
        found[entry["values"] or ""] += entry["counts"]
    return found


def _rule(name: str, calls: int, deviates: int, criterion: Criterion) -> Rule:
    """Describe what a table calls a rule: the name of a row, and behind it what else decided (a repeat, a reference)."""
    rows = [row for row in criterion.rows if name.startswith(row.name)]
    if not rows:
        return Rule(name, "", "", calls, deviates)
    row = max(rows, key=lambda one: len(one.name))
    said = "; or ".join(map(_limit, criterion.limits)) if criterion.limits else _table_row(row)
    return Rule(name, said, row.origin, calls, deviates)


def _table_row(row: RuleRow) -> str:
    """Say what a row of a table explains: ``rounding: reduction, 4 units; errors of inputs: linear, factor 8``."""
    said = f"rounding: {row.own}, {_plain(row.ulps)} units; errors of inputs: {row.carry}, factor {_plain(row.factor)}"
    return said + ("; draws random numbers" if row.random else "")


def _limit(limit: Limit) -> str:
    """Say what a limit refuses: ``fails with cosine below 0.99 and max_absolute above 0.001``."""
    conditions = (f"{measure} {way} {_plain(number)}" for measure, way, number in limit.conditions)
    return f"fails with {' and '.join(conditions)}"


def _plain(value: float) -> str:
    return np.format_float_positional(value, trim="-")


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
