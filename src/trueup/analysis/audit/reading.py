"""In which dtypes the matrix products and convolutions of a run ran: whether mixed precision is really on.

    mixed precision is on: 96 of 98 matrix products and convolutions run in bfloat16, 2 in float32: head torch.nn.functional.linear
    (net.py:31 in forward), forward and backward

A call computes in the dtype of its result, or of its inputs if all are narrower (8-bit operands with a 32-bit sum). The backward of
an api call has the dtype of the gradient that it gets, which is its forward's result dtype: autocast casts weights inside the call.
Counted are the innermost calls of the finest level that holds any. Calls are read with their slots, a rank and step at a time; only
what is asked for is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from trueup.analysis.anomalies.effects import place_of
from trueup.analysis.anomalies.flow import family, limits
from trueup.analysis.anomalies.judging import chosen
from trueup.comparison.graph.streams import Stream
from trueup.foundation.facts.anomaly import Place
from trueup.foundation.facts.criteria import is_product
from trueup.foundation.facts.operators import says
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.declared import precision_of
from trueup.foundation.words.wording import clean, counted, one_line, short_source

Steps = int | Sequence[int] | None  # steps, or ranks, that are asked for; None: all

AT_ONCE = 1 << 15  # rows that are turned into objects at a time

NAMES = ("seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "dtype")

WHAT = "matrix products and convolutions"
PHASES = {"forward": "forward", "recompute": "forward", "backward": "backward"}
NARROW = 16  # bits of a float up to which it is what mixed precision computes in
FINEST = ("aten", "api", "module")
NAMED = 3  # calls that a sentence names


@dataclass(frozen=True, slots=True)
class Found:
    """A call and the rows of its slots, by their names."""

    seq: int
    parent: int | None
    phase: str
    level: str
    scope: str
    op: str
    ordinal: int
    slots: dict[str, dict[str, Any]]

    @property
    def given(self) -> list[dict[str, Any]]:
        """Its input tensors."""
        return [row for name, row in self.slots.items() if name.startswith(("input.", "grad_output.")) and row["dtype"]]

    @property
    def made(self) -> list[dict[str, Any]]:
        """Its result tensors."""
        return [row for name, row in self.slots.items() if name.startswith(("output.", "grad_input.")) and row["dtype"]]


def parts(capture: Capture, step: Steps, rank: Steps) -> Iterator[tuple[int, int]]:
    """Yield the ranks and steps asked for; raises TrueupError if the capture lacks one."""
    ranks = chosen("rank", rank, sorted(capture.ranks))
    for one in chosen("step", step, capture.steps):
        for of in ranks:
            yield of, one


def calls(
    capture: Capture, rank: int, step: int, wanted: Callable[[str, str], bool], columns: Sequence[str] = (),
    levels: Sequence[str] | None = None,
) -> list[Found]:  # fmt: skip
    """Return the calls of a rank and step with a wanted operator and level, in order, with ``columns`` of their slots."""
    kinds = capture.records(["op", "level"], rank=rank, step=step).group_by(["op", "level"]).aggregate([]).to_pylist()
    kinds = [kind for kind in kinds if levels is None or kind["level"] in levels]
    ops = {kind["op"] for kind in kinds if kind["op"] is not None and wanted(kind["op"], kind["level"] or "")}
    if not ops:
        return []
    chosen_levels = {kind["level"] for kind in kinds}
    rows = capture.records([*NAMES, *columns], rank=rank, step=step, op=ops, level=chosen_levels)
    found = []
    for seq, slots in groupby(_rows(rows), key=lambda row: row["seq"]):
        held = list(slots)
        first = held[0]
        if not wanted(first["op"], first["level"] or ""):
            continue
        place = (first["phase"] or "", first["level"] or "", first["scope"] or "", first["op"], first["ordinal"] or 0)
        found.append(Found(seq, first["parent"], *place, {row["slot"] or "": row for row in held}))
    return found


def kinds(capture: Capture, rank: int, step: int) -> set[tuple[str, str, str]]:
    """Return the operator, level and dtype of all tensors of a rank and step, each kind once."""
    columns = ["op", "level", "dtype"]
    found = capture.records(columns, rank=rank, step=step).group_by(columns).aggregate([]).to_pylist()
    return {(kind["op"], kind["level"] or "", kind["dtype"]) for kind in found if kind["dtype"] and kind["op"] is not None}


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows, column by column with names from their dictionaries: ten times faster than Arrow's own way."""
    for start in range(0, len(table), AT_ONCE):
        columns = [_listed(table[name].slice(start, AT_ONCE)) for name in table.column_names]
        for values in zip(*columns, strict=True):
            yield dict(zip(table.column_names, values, strict=True))


def _listed(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        whole = column.unify_dictionaries()
        words = np.array([*whole.chunk(0).dictionary.to_pylist(), None], object) if whole.num_chunks else np.array([None])
        codes = [chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in whole.chunks]
        return list(words[np.concatenate(codes)].tolist()) if codes else []
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return list(column.to_pylist())
    if not column.null_count:
        return list(column.to_numpy().tolist())
    values = column.fill_null(0).to_numpy().astype(object)
    values[~column.is_valid().to_numpy()] = None
    return list(values.tolist())


def innermost(found: Sequence[Found]) -> list[Found]:
    """Leave out calls that hold another one of them."""
    around = {one.parent for one in found}
    return [one for one in found if one.seq not in around]


def outermost(found: Sequence[Found]) -> list[Found]:
    """Leave out calls inside another one of them: the function that the user called stays."""
    seqs = {one.seq for one in found}
    return [one for one in found if one.parent not in seqs]


def stream_of(capture: Capture, rank: int, step: int) -> Stream:
    """Return all calls of a rank and step, as columns."""
    return Stream(partial(capture.records, rank=rank, step=step), Vocabulary(), Vocabulary(), imported=capture.imported)


class Places:
    """Says where calls stand, with their lines of code; reads the records of a step when one of its calls is asked for."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._at: tuple[int, int] | None = None
        self._stream: Stream | None = None

    def of(self, rank: int, step: int, seq: int) -> Place:
        """Return where the call of a seq stands."""
        if self._stream is None or self._at != (rank, step):
            self._stream = stream_of(self._capture, rank, step)
            self._at = rank, step
        return place_of(self._stream, self._stream.find(seq), self._capture.sites(rank))


def described(place: Place) -> str:
    """Write a place as ``head, forward, step 0, rank 0 (torch.Tensor.half)``."""
    ops = " / ".join(one_line(name) for name in dict.fromkeys((place.api, place.op)) if name)
    return f"{one_line(place.name)} ({ops})" if place.scope else f"{ops}, {place.phase}, step {place.step}, rank {place.rank}"


def cast_source(op: str) -> str | None:
    """Return the slot whose tensor a cast casts, None if the call is no cast."""
    found: str | None = says(op, "cast")
    return found


@dataclass(frozen=True, slots=True)
class Product:
    """The products of an operator in a module, of one phase and dtype."""

    scope: str
    op: str
    phase: str  # ``forward``, recomputation included, or ``backward``
    dtype: str
    calls: int
    source: str | None  # first ``file:line in function``, if asked for; only for the dtype of the fewest


@dataclass(frozen=True, slots=True)
class Census:
    """The dtypes of a run's products."""

    sentence: str
    products: tuple[Product, ...]  # in the order in which they first ran
    level: str  # of the calls that were counted; empty: there are none
    weights: tuple[str, ...]  # dtypes of the floating parameters of modules, the most frequent first; empty: none were recorded
    framework: str

    def counts(self, phase: str | None = None) -> dict[str, int]:
        """Return the calls of each dtype, the most frequent first, of one phase or both."""
        found: Counter[str] = Counter()
        for one in self.products:
            if phase in (None, one.phase):
                found[one.dtype] += one.calls
        return dict(found.most_common())


def census(capture: str | Path | Capture, *, step: Steps = None, rank: Steps = None) -> Census:
    """Count a run's matrix products and convolutions by dtype; raises TrueupError if there is no such capture, step or rank."""
    given = open_capture(capture)
    asked = list(parts(given, step, rank))
    counting = Counting(given, finest(given, asked))
    for of, one in asked:
        counting.add(of, one, calls(given, of, one, is_product, levels=(counting.level,)) if counting.level else [])
    return counting.census(_weights(given, *asked[0]) if asked else Counter())


class Counting:
    """The products of one level, counted a rank and step at a time; ``level``: empty where there are none."""

    def __init__(self, capture: Capture, level: str) -> None:
        self.level = level
        self._capture = capture
        self._calls: Counter[tuple[str, str, str, str]] = Counter()
        self._first: dict[tuple[str, str, str, str], tuple[int, int, int]] = {}

    def add(self, rank: int, step: int, found: Iterable[Found]) -> None:
        """Count the products among the calls of a rank and step."""
        for call in innermost([one for one in found if one.level == self.level and is_product(one.op, one.level)]):
            dtype, phase = computes_in(call), PHASES.get(call.phase)
            if dtype is not None and phase is not None:
                key = call.scope, call.op, phase, dtype
                self._calls[key] += 1
                self._first.setdefault(key, (rank, step, call.seq))

    def census(self, weights: Counter[str]) -> Census:
        """Return what was counted; ``weights`` are the dtypes of parameters."""
        totals: Counter[str] = Counter()
        for (_, _, _, dtype), n in self._calls.items():
            totals[dtype] += n
        rare = {dtype for dtype, _ in totals.most_common()[1:]}
        places = Places(self._capture)
        products, sourced = [], 0
        for (scope, op, phase, dtype), n in self._calls.items():
            source = None
            if dtype in rare and sourced < NAMED * 2:  # those that a sentence may name
                source, sourced = places.of(*self._first[scope, op, phase, dtype]).source, sourced + 1
            products.append(Product(scope, op, phase, dtype, n, source))
        manifest = next(iter(self._capture.ranks.values()), {})
        sentence = _sentence(products, totals, tuple(weights), manifest)
        framework = str(manifest.get("framework", ""))
        return Census(sentence, tuple(products), self.level, tuple(d for d, _ in weights.most_common()), framework)


def computes_in(call: Found) -> str | None:
    """Return the dtype in which a product computes, None if none of its tensors holds numbers."""
    if call.phase == "backward" and call.level != "aten":
        rows = [row for name, row in call.slots.items() if name.startswith("grad_output.") and row["dtype"]]
        return next((str(row["dtype"]) for row in rows or call.made), None)
    made = next((str(row["dtype"]) for row in call.made), None)
    given = {str(row["dtype"]) for row in call.given if family(row["dtype"])}
    if made is not None and given and all(_bits(one) < _bits(made) for one in given):
        return max(given, key=_bits)
    return made or next(iter(sorted(given)), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs compute in different dtypes."""

    sentence: str
    other: tuple[tuple[Product, Product], ...]  # baseline's and candidate's, of one scope, operator and phase, in other dtypes
    differs: bool  # False, too, if unknown
    told: bool = True  # whether both hold products


def difference(baseline: Census, candidate: Census) -> Difference:
    """Say where two runs compute in different dtypes; for different frameworks, whose operators have other names, in total."""
    if not baseline.products or not candidate.products:
        text = f"could not tell whether the runs compute in the same dtypes: one has no {WHAT}"
        return Difference(text, (), differs=False, told=False)
    if baseline.framework != candidate.framework or baseline.level != candidate.level:
        same = set(baseline.counts()) == set(candidate.counts())
        word = "the same dtypes" if same else "other dtypes"
        text = f"the two runs compute in {word}: {_shares(baseline.counts())} there, {_shares(candidate.counts())} here"
        return Difference(f"{text} (compared in total, for they name their operators differently)", (), differs=not same)
    there, here = _by_place(baseline.products), _by_place(candidate.products)
    other = []
    for place in there.keys() & here.keys():
        gone, new = set(there[place]) - set(here[place]), set(here[place]) - set(there[place])
        if gone or new:
            before = there[place][min(gone)] if gone else next(iter(there[place].values()))
            after = here[place][min(new)] if new else next(iter(here[place].values()))
            other.append((before, after))
    order = {id(one): k for k, one in enumerate(baseline.products)}
    other.sort(key=lambda pair: order[id(pair[0])])
    if not other:
        text = f"the two runs compute all {WHAT} that both have in the same dtypes: {_shares(candidate.counts())}"
        return Difference(text, (), differs=False)
    before, after = other[0]
    n, of = len(other), len(there.keys() & here.keys())
    text = (
        f"{n:,} of {counted(of, 'kind')} of {WHAT} (operator, module, phase) run in another dtype: the first is {_name(after)}, "
        f"{before.dtype} in the baseline and {after.dtype} in the candidate; in total {_shares(baseline.counts())} there, "
        f"{_shares(candidate.counts())} here"
    )
    return Difference(clean(text), tuple(other), differs=True)


def _by_place(products: Iterable[Product]) -> dict[tuple[str, str, str], dict[str, Product]]:
    found: dict[tuple[str, str, str], dict[str, Product]] = {}
    for one in products:
        found.setdefault((one.scope, one.op, one.phase), {})[one.dtype] = one
    return found


def finest(capture: Capture, asked: Sequence[tuple[int, int]], levels: Sequence[str] = FINEST) -> str:
    """Return the finest one of some levels that holds a product, empty where none does."""
    for level in levels:
        if level not in capture.levels:
            continue
        for rank, step in asked:
            ops = capture.records(["op"], rank=rank, step=step, level=level)["op"].unique().to_pylist()
            if any(op is not None and is_product(op, level) for op in ops):
                return level
    return ""


def _weights(capture: Capture, rank: int, step: int) -> Counter[str]:
    """Count the dtypes of floating parameters."""
    rows = capture.records(["slot", "dtype"], rank=rank, step=step, level=("module", "api"))
    kinds = rows.group_by(["slot", "dtype"]).aggregate([([], "count_all")]).to_pylist()
    found: Counter[str] = Counter()
    for row in kinds:
        if row["slot"] and row["slot"].startswith("param.") and row["dtype"] and family(row["dtype"]) == "float":
            found[row["dtype"]] += row["count_all"]
    return found


def _sentence(products: Sequence[Product], totals: Counter[str], weights: tuple[str, ...], manifest: Mapping[str, Any]) -> str:
    total = sum(totals.values())
    if not total:
        return f"could not tell whether mixed precision is on: none of the {WHAT} were recorded"
    (most, n), *rest = totals.most_common()
    narrow = sum(n for dtype, n in totals.items() if _is_narrow(dtype))
    if not narrow:
        dtypes = f"all {total:,} {WHAT} run in {most}" if not rest else f"of {total:,} {WHAT} {_shares(totals)}"
        return f"mixed precision is off: {dtypes}{_tf32(manifest)}"
    if not rest:
        if weights and not any(_is_narrow(dtype) for dtype in weights):
            return f"mixed precision is on: all {total:,} {WHAT} run in {most}, and weights are kept in {weights[0]}"
        kept = f"the weights are {weights[0]} too" if weights else "whether weights are kept wider was not recorded"
        return f"all {total:,} {WHAT} run in {most}, and {kept}"
    word = "on" if 2 * narrow >= total else "on for a few calls only"
    others = [one for one in products if one.dtype != most]
    names = list(dict.fromkeys(_name(one, phase=False) for one in others))
    named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")
    counts = ", ".join(f"{m:,} in {dtype}" for dtype, m in rest)
    return clean(f"mixed precision is {word}: {n:,} of {total:,} {WHAT} run in {most}, {counts}: {named}")


def _name(one: Product, *, phase: bool = True) -> str:
    name = f"{one_line(one.scope)} {one_line(one.op)}" if one.scope else one_line(one.op)
    details = ([one.phase] if phase else []) + ([short_source(one.source)] if one.source else [])
    return f"{name} ({', '.join(details)})" if details else name


def _shares(counts: Mapping[str, int]) -> str:
    """Write ``96 in bfloat16, 2 in float32``; ``all in float32`` where that is so."""
    if len(counts) == 1:
        return f"all in {next(iter(counts))}"
    return ", ".join(f"{n:,} in {dtype}" for dtype, n in counts.items())


def _tf32(manifest: Mapping[str, Any]) -> str:
    environment, devices = manifest.get("environment"), manifest.get("devices")
    if not isinstance(environment, dict) or not isinstance(devices, list):
        return ""
    found = precision_of([environment], [[str(one) for one in devices]])
    which = [name for name, on in (("products", found.matmul), ("convolutions", found.convolution)) if on]
    return f"; float32 {' and '.join(which)} are rounded to TF32 or HF32, as the run declares" if which else ""


def _is_narrow(dtype: str) -> bool:
    return limits(dtype) is not None and _bits(dtype) <= NARROW


def _bits(dtype: str) -> int:
    try:
        return 8 * int(np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize)
    except TypeError:
        return 0
