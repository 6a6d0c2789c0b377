"""Captures made by hand: `Recording.call` adds a call, `stream` and `write` turn the recording into what is compared.

Dataflow is kept by identity: an array that one call returned and another reads is produced by the first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trueup.comparison.graph.streams import Stream
from trueup.comparison.measures import measure
from trueup.comparison.result.comparing import compare
from trueup.comparison.verdict import align, judge, locate
from trueup.comparison.verdict.judged import Judged
from trueup.comparison.verdict.origins import Origins
from trueup.foundation.facts import criteria
from trueup.foundation.kernels import digest, hexadecimal, summarize
from trueup.foundation.model import PACKED, Result
from trueup.foundation.store import Writer, claim, statistics
from trueup.foundation.store.columns import Vocabulary
from trueup.foundation.store.declared import Precision
from trueup.foundation.store.schema import table

Array = np.ndarray[Any, Any]

CRITERION = criteria.load("default")

NAMES, VALUES = Vocabulary(), Vocabulary()
"""Of all streams here: the two sides of a comparison number names alike."""


@dataclass
class Slot:
    """A tensor as it is recorded, where a plain array will not do; ``parts`` names what is kept of it."""

    array: Array
    parts: str = "stats digest"
    """Any of ``stats``, ``digest``, ``tensor``; nothing for a tensor that could not be measured."""


@dataclass
class Recording:
    """One run. ``parts`` is what is kept of each tensor, as in `Slot`."""

    devices: Sequence[str] = ("cpu",)
    environment: Mapping[str, str] = field(default_factory=dict)
    parts: str = "stats digest"
    framework: str = "torch"
    rows: list[dict[str, Any]] = field(default_factory=list)
    made: dict[int, tuple[int, str]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    ordinals: defaultdict[tuple[Any, ...], int] = field(default_factory=lambda: defaultdict(int))
    seq: int = 0
    site: list[tuple[int, list[str], str | None]] = field(default_factory=list)

    def call(
        self, op: str, inputs: Any = (), outputs: Any = (), *, level: str = "aten", phase: str = "forward", scope: str = "",
        step: int = 0, rank: int = 0, arguments: Any = None, parent: int | None = None, forward: int | None = None,
        source: str | None = None,
    ) -> int:  # fmt: skip
        """Record a call and return its seq. Tensors are sequences (``input.0``, ...) or mappings of slot names."""
        key = (rank, step, phase, level, scope, op)
        common = {
            "step": step, "rank": rank, "seq": self.seq, "parent": parent, "phase": phase, "level": level, "scope": scope,
            "op": op, "ordinal": self.ordinals[key], "forward_seq": forward, "site": self._site(source),
        }  # fmt: skip
        self.ordinals[key] += 1
        for slot, tensor in _named("input", inputs).items():
            producer = self.made.get(id(_array(tensor)), (None, None))
            self.rows.append(common | {"slot": slot, "tensor": tensor, "producer": producer})
        if arguments is not None:
            self.rows.append(common | {"slot": "arguments", "value": json.dumps(arguments)})
        for slot, tensor in _named("output", outputs).items():
            self.rows.append(common | {"slot": slot, "tensor": tensor})
            self.made[id(_array(tensor))] = self.seq, slot
            self.kept.append(tensor)
        self.seq += 1
        return self.seq - 1

    def _site(self, source: str | None) -> int | None:
        if source is not None:
            self.site.append((len(self.site), [source], None))
        return None if source is None else len(self.site) - 1

    def columns(self, rows: list[dict[str, Any]], writer: Writer | None = None) -> dict[str, Any]:
        """Return rows as the columns of a part; payload needs a writer."""
        copied = ("seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "forward_seq", "site")
        found: dict[str, Any] = {name: [row[name] for row in rows] for name in copied}
        found["value"] = [row.get("value") for row in rows]
        for k, name in enumerate(("producer_seq", "producer_slot")):
            found[name] = [row.get("producer", (None, None))[k] for row in rows]
        described = [self._describe(row.get("tensor"), writer) for row in rows]
        for name in ("dtype", "shape", "numel", "digest", "payload_segment", "payload_key"):
            found[name] = [d.get(name) for d in described]
        measured = np.array([k for k, d in enumerate(described) if "packed" in d], dtype=np.int64)
        packed = np.array([described[k]["packed"] for k in measured]).reshape(-1, PACKED)
        return found | statistics(packed, measured, len(rows))

    def _describe(self, tensor: Any, writer: Writer | None) -> dict[str, Any]:
        if tensor is None:
            return {}
        array, parts = (tensor.array, tensor.parts) if isinstance(tensor, Slot) else (tensor, self.parts)
        found: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape), "numel": array.size}
        key = hexadecimal(digest(array))
        if "stats" in parts:
            found["packed"] = np.empty(PACKED)
            summarize(array, found["packed"])
        if "digest" in parts:
            found["digest"] = key
        if "tensor" in parts and writer is not None:
            place = writer.add_payload(key, array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())
            found["payload_segment"], found["payload_key"] = place
        return found

    def stream(self, step: int = 0, rank: int = 0, like: Stream | None = None) -> Stream:
        """Return one step as the verdict reads it, without a disk between."""
        rows = [row for row in self.rows if (row["step"], row["rank"]) == (step, rank)]
        extra = {"step": [step] * len(rows), "rank": [rank] * len(rows)}
        return load(table(self.columns(rows) | extra), NAMES, VALUES, like=like)

    def write(self, directory: Path, status: str = "complete", **manifest: Any) -> Path:
        """Write the recording as a capture directory."""
        levels = list(dict.fromkeys(row["level"] for row in self.rows))
        root = {"run": "one", "trueup_version": "0.1.0", "levels": levels, "detail": "stats", "config": {}}
        described = {"framework": self.framework, "devices": list(self.devices), "environment": dict(self.environment)}
        ranks = sorted({row["rank"] for row in self.rows})
        claimed = [claim(directory, rank, "one") for rank in ranks]
        for rank in claimed:
            writer = Writer(directory, rank, root, described | manifest)
            writer.add_sites(self.site)
            for step in sorted({row["step"] for row in self.rows if row["rank"] == rank}):
                rows = [row for row in self.rows if (row["step"], row["rank"]) == (step, rank)]
                writer.write_records(step, self.columns(rows, writer))
            if status == "complete":
                writer.close()
            else:
                writer.flush()
        return directory


def _array(tensor: Any) -> Array:
    array: Array = tensor.array if isinstance(tensor, Slot) else tensor
    return array


def _named(kind: str, tensors: Any) -> dict[str, Any]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {f"{kind}.{k}": tensor for k, tensor in enumerate(tensors)}


def compared(tmp_path: Path, baseline: Recording, candidate: Recording, **options: Any) -> Result:
    """Write both recordings and compare them."""
    number = len(list(tmp_path.iterdir()))
    sides = (baseline.write(tmp_path / f"{number}-baseline"), candidate.write(tmp_path / f"{number}-candidate"))
    return compare(*sides, **options)


def load(
    records: pa.Table, names: Vocabulary, values: Vocabulary, *, imported: bool = False, like: Stream | None = None
) -> Stream:
    """Build a stream from all columns of the records of one rank and step, sorted by ``seq``."""
    def read(columns: Sequence[str]) -> pa.Table:  # nulls for what was not recorded, as `trueup.foundation.store.read_ahead` has it
        lacking = {name: pa.nulls(len(records)) for name in columns if name not in records.column_names}
        return pa.table({name: lacking[name] if name in lacking else records[name] for name in columns})

    return Stream(read, names, values, imported=imported, like=like)


def no_payload(*_: object) -> Array:
    raise AssertionError("no payload was recorded")


def judged(
    baseline: Recording, candidate: Recording, precision: Precision | None = None, step: int = 0
) -> list[Judged]:
    """Align, measure and judge one step."""
    return calls_of(part(baseline, candidate, precision, step=step))


def calls_of(found: locate.Part) -> list[Judged]:
    """Return the judged calls of a part, in order."""
    return [found.verdicts.at(pair) for pair in range(len(found.verdicts))]


def part(baseline: Recording, candidate: Recording, precision: Precision | None = None, *, step: int = 0) -> locate.Part:
    """Align, measure and judge one step, ready for `locate`."""
    streams = baseline.stream(step), candidate.stream(step)
    alignment = align.align(*streams)
    errors = measure.measure(alignment, *streams, (no_payload, no_payload))
    return locate.Part(0, step, judge.judge(errors, CRITERION, precision or Precision()), alignment)


def located(baseline: Recording, candidate: Recording, origins: Origins | None = None) -> locate.Part:
    """Align, measure, judge and locate step 0."""
    found = part(baseline, candidate)
    locate.locate(found, CRITERION, origins, first_step=True, from_start=True)
    return found


def changed(array: Array, relative: float, seed: int = 1) -> Array:
    """Return an array at the given relative L2 distance."""
    noise = np.random.default_rng(seed).standard_normal(array.shape)
    noise *= relative * np.linalg.norm(array.astype(np.float64)) / max(float(np.linalg.norm(noise)), 1e-300)
    return (array + noise).astype(array.dtype)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)

