"""What a result holds beside its findings: the two runs in short, the table of calls, the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trueup.comparison.graph.streams import NONE, WAYS, Alignment, Array, Numbers, Stream
from trueup.comparison.measures.thresholds import HALF
from trueup.comparison.result.findings import Frames
from trueup.comparison.verdict.judged import Verdicts
from trueup.foundation.facts.criteria import Criterion, Limit, Row
from trueup.foundation.facts.operators import named
from trueup.foundation.facts.why import EQUAL, ROLES, Reason, Why
from trueup.foundation.model import Rule, RunSummary
from trueup.foundation.store import Capture
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.declared import policy_lines
from trueup.foundation.store.overview import SCALE_COLUMNS, Overview, loss_scale_in
from trueup.foundation.words.reasons import DECIDED

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


def _table_row(row: Row) -> str:
    """Say what a row of a table explains: ``rounding: reduction, 4 units; errors of inputs: linear, factor 8``."""
    said = f"rounding: {row.own}, {_plain(row.ulps)} units; errors of inputs: {row.carry}, factor {_plain(row.factor)}"
    return said + ("; draws random numbers" if row.random else "")


def _limit(limit: Limit) -> str:
    """Say what a limit refuses: ``fails with cosine below 0.99 and max_absolute above 0.001``."""
    conditions = (f"{measure} {way} {_plain(number)}" for measure, way, number in limit.conditions)
    return f"fails with {' and '.join(conditions)}"


def _plain(value: float) -> str:
    return np.format_float_positional(value, trim="-")
