"""A recorded call made whole again: its tensors, how it was called, and the state in which it ran. No framework is needed.

>>> calls = RecordedCalls(trueup.open_capture("runs/cpu"))
>>> for call in calls.of_step(rank=0, step=3, levels=("aten",)):
...     call.key.op, list(call.inputs), call.invocation["args"], call.inputs["input.0"].array().shape
('aten::addmm', ['input.0', 'input.1', 'input.2'], [{'tensor': 'input.0'}, ...], (768,))
>>> calls.at(rank=0, seq=4711).random                            # state of the generators when it began, by device
{'cpu': b'...'}

`recorded_call` of an adapter turns such a call into a function, its arguments and the modes to execute it in.

A capture is untrusted: nothing here evaluates text; sizes are believed only where the file bears them out (`store`), what is
JSON is bounded in length and depth, and the state of a generator in size.

Where and how a recorded call is executed again, and with which elements where a capture kept only numbers of them. What a
baseline's calls were given is put in place of a run's own by `trueup capture --inputs-from BASE`: arrays by the key of the forward
call, read from a capture of detail ``tensor`` when a step is reached.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.facts.arguments import decoded
from trueup.foundation.facts.slots import roundoff
from trueup.foundation.model import LEVELS, CallKey, TrueupError
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.store.segment import numpy_dtype

NUMBERS = ("min", "max", "mean", "l2", "n_nan", "n_posinf", "n_neginf", "n_zero")
COLUMNS = (
    "rank", "step", "seq", "parent", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "strides", "device",
    *NUMBERS, "digest", "payload_segment", "payload_key", "payload_view", "value", "forward_seq", "site", "producer_seq",
    "producer_slot",
)  # fmt: skip

MOST_TEXT = 1 << 20
"""Longest JSON of an invocation that is read."""
MOST_STATE = 1 << 16
"""Largest state of a generator: that of the CPU has 5056 bytes, others 16."""

Key = tuple[str, str, str, int]
"""Phase, scope, operator (module class, function) and ordinal of a call."""

GIVEN = ("seq", "phase", "scope", "op", "ordinal", "slot", "dtype", "shape", "forward_seq", "payload_segment", "payload_key",
         "payload_view", "digest")  # fmt: skip


@dataclass(frozen=True)
class RecordedTensor:
    """A slot of a call: what was recorded of it, and its elements where the bytes were kept."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None where the layout has none."""
    device: str
    numbers: Mapping[str, float | None]
    """``min``, ``max``, ``mean``, ``l2`` and the counts of NaN, Inf and zero; None each where nothing was measured."""
    digest: str | None
    _place: tuple[Capture, int, str, str, list[int] | None] | None = field(default=None, repr=False)
    producer: tuple[int, str] | None = None
    """Execution number and slot of the call that last wrote its memory; None: none that was recorded."""

    @property
    def kept(self) -> bool:
        """Whether its elements were kept."""
        return self._place is not None

    @property
    def measured(self) -> bool:
        """Whether its numbers are known. Memory that nobody had written to is not measured, nor what is not a plain array."""
        return self.numbers["l2"] is not None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def buffer(self) -> tuple[int, str, str] | None:
        """Which of the buffers that were kept it shows: rank, segment and key; None: its elements were not kept."""
        return None if self._place is None else self._place[1:4]

    def positions(self) -> NDArray[np.int64]:
        """Return where in that buffer each of its elements lies, in the recorded shape; `array` tells whether that is true."""
        view = None if self._place is None else self._place[4]
        if view is None:
            return np.arange(self.numel).reshape(self.shape)
        count = len(view) // 2
        found = np.array(view[0], np.int64)
        for size, stride in zip(view[1 : 1 + count], view[1 + count :], strict=True):
            found = found[..., None] + stride * np.arange(size)
        return found.reshape(self.shape)

    def array(self) -> NDArray[Any]:
        """Return the elements, read-only, C order, in the recorded shape; raise `TrueupError` where they were not kept, or the
        file is damaged."""
        if self._place is None:
            raise TrueupError(f"{self.slot} has no elements in the capture: record with --detail tensor")
        capture, rank, segment, key, view = self._place
        found = capture.payload(rank, segment, key, view, self.digest)
        if found.dtype != numpy_dtype(self.dtype) or found.size != self.numel:
            held = f"{found.size} {found.dtype.name}"
            raise TrueupError(f"{self.slot}: the capture holds {held} where it says {self.numel} {self.dtype}")
        return found.reshape(self.shape)


@dataclass(frozen=True)
class RecordedCall:
    """One call of a capture, with all that its execution needs."""

    key: CallKey
    seq: int
    parent: int | None
    forward_seq: int | None
    """Of a backward call its forward call; of a recomputed one the call that it repeats."""
    site: int | None
    tensors: Mapping[str, RecordedTensor]
    """By slot, in the order of the record: ``input.0``, ``output.0``, ``grad_output.0`` ..."""
    value: str | None
    """JSON of what it was given beside tensors, as reports show it (docs/format.md)."""
    invocation: Mapping[str, Any] | None
    """How exactly it was made; None where the capture does not say: not of detail ``tensor``, imported, or of an older version."""
    random: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """State of the devices' generators when it began, by type of device; of random operators and, at level api, of all calls."""

    @property
    def inputs(self) -> dict[str, RecordedTensor]:
        """What it was given: slots ``input.…`` and, of a backward call, ``grad_output.…``."""
        return {slot: t for slot, t in self.tensors.items() if slot.startswith(("input.", "grad_output."))}

    @property
    def outputs(self) -> dict[str, RecordedTensor]:
        """What it computed: slots ``output.…`` and, of a backward call, ``grad_input.…``."""
        return {slot: t for slot, t in self.tensors.items() if slot.startswith(("output.", "grad_input."))}

    @property
    def computed(self) -> bool:
        """Whether anything was computed: not by `backward()` on the loss, which has no result, nor where results are shapes."""
        return any(t.device != "meta" for t in self.outputs.values())

    @property
    def delivers(self) -> bool:
        """Whether it is the backward of an api call: gradients in and out, of which the forward call tells how they are made. A
        function that is called while a backward runs is none."""
        gradients = any(slot.startswith(("grad_input.", "grad_output.")) for slot in self.tensors)
        return self.key.level == "api" and self.key.phase == "backward" and gradients

    @property
    def values(self) -> dict[str, Any]:
        """What it was given beside tensors, by position or name; empty where it is not known."""
        return decoded(self.value)

    @property
    def kind(self) -> str:
        """Operator and overload: ``aten::add.Tensor``, ``torch.nn.functional.linear``."""
        overload = (self.invocation or {}).get("overload")
        return f"{self.key.op}.{overload}" if isinstance(overload, str) and overload not in ("", "default") else self.key.op

    def signature(self) -> tuple[Any, ...]:
        """Return what calls that do the same on other numbers share: op, phase, dtypes, shapes, strides and attributes."""
        tensors = tuple((s, t.dtype, t.shape, t.strides) for s, t in self.tensors.items())
        made = {k: v for k, v in (self.invocation or {}).items() if k != "random"}
        return (self.key.level, self.kind, self.key.phase, tensors, json.dumps(made, sort_keys=True) if made else self.value)


def home_of(ranks: Iterable[Mapping[str, Any]]) -> str:
    """Return the type of device that a capture was taken on, by the manifests of its ranks: the first that is not ``cpu``."""
    kinds = [name.partition(":")[0] for rank in ranks for name in rank.get("devices") or () if isinstance(name, str)]
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


class RecordedCalls:
    """The calls of a capture, read step by step; what turns out to be damaged is in the capture's ``problems``."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._held: tuple[tuple[int, int], dict[int, RecordedCall]] | None = None
        self._steps: dict[int, dict[int, tuple[int, int]]] = {}

    def of_step(
        self, rank: int, step: int, levels: Sequence[str] = ("aten", "api"), phases: Iterable[str] | None = None
    ) -> list[RecordedCall]:  # fmt: skip
        """Return the calls of a rank's step in the order of execution."""
        wanted = None if phases is None else frozenset(phases)
        calls = self._step(rank, step)
        return [c for _, c in sorted(calls.items()) if c.key.level in levels and (wanted is None or c.key.phase in wanted)]

    def at(self, rank: int, seq: int) -> RecordedCall:
        """Return the call with this execution number; raise `TrueupError` where the rank has none."""
        if self._held is not None and self._held[0][0] == rank and seq in self._held[1]:
            return self._held[1][seq]
        for first, last, step in self._spans(rank):
            if first <= seq <= last and seq in (calls := self._step(rank, step)):
                return calls[seq]
        raise TrueupError(f"{self.capture.path} has no call {seq} on rank {rank}: `trueup show` lists the calls with their numbers")

    def _spans(self, rank: int) -> list[tuple[int, int, int]]:
        """Return first and last execution number of each step of a rank."""
        if rank not in self._steps:
            table = self.capture.records(["step", "seq"], rank=rank)
            steps, seqs = table["step"].to_numpy(), table["seq"].to_numpy()
            found = {}
            for step in np.unique(steps).tolist():
                inside = seqs[steps == step]
                found[step] = (int(inside.min()), int(inside.max()))
            self._steps[rank] = found
        return [(first, last, step) for step, (first, last) in self._steps[rank].items()]

    def _step(self, rank: int, step: int) -> dict[int, RecordedCall]:
        if self._held is None or self._held[0] != (rank, step):
            self._held = (rank, step), dict(self._read(rank, step))
        return self._held[1]

    def _read(self, rank: int, step: int) -> Iterator[tuple[int, RecordedCall]]:
        names = [*COLUMNS, *({"invocation"} & self.capture.names)]
        table = self.capture.records(names, rank=rank, step=step)
        columns = {name: table[name].to_pylist() for name in names}
        made = columns.get("invocation") or [None] * table.num_rows
        seqs = columns["seq"]
        state: dict[str, bytes] = {}
        start = 0
        for stop in [*(np.flatnonzero(np.diff(seqs)) + 1).tolist(), len(seqs)] if seqs else []:
            rows = range(start, stop)
            call = self._call(columns, made, rows, state)
            start = stop
            yield call.seq, call

    def _call(self, columns: dict[str, list[Any]], made: list[str | None], rows: range, state: dict[str, bytes]) -> RecordedCall:
        at = rows[0]
        key = CallKey(*(columns[name][at] for name in ("rank", "step", "phase", "level", "scope", "op", "ordinal")))
        tensors: dict[str, RecordedTensor] = {}
        value, text = None, None
        for k in rows:
            if columns["slot"][k] == "arguments":
                value, text = columns["value"][k], made[k]
            elif columns["dtype"][k] is not None:
                tensors.setdefault(columns["slot"][k], self._tensor(columns, k))
        invocation = read_invocation(text)
        if invocation is not None:
            state.update(states_of(invocation))
        seq, parent, forward, site = (columns[name][at] for name in ("seq", "parent", "forward_seq", "site"))
        return RecordedCall(key, seq, parent, forward, site, tensors, value, invocation, dict(state))

    def _tensor(self, columns: dict[str, list[Any]], k: int) -> RecordedTensor:
        segment, key = columns["payload_segment"][k], columns["payload_key"][k]
        place = None
        if segment is not None and key is not None:
            place = (self.capture, columns["rank"][k], segment, key, columns["payload_view"][k])
        strides = columns["strides"][k]
        seq, written = columns["producer_seq"][k], columns["producer_slot"][k]
        return RecordedTensor(
            columns["slot"][k], columns["dtype"][k], tuple(columns["shape"][k] or ()), None if strides is None else tuple(strides),
            columns["device"][k] or "", {name: columns[name][k] for name in NUMBERS}, columns["digest"][k], place,
            None if seq is None or written is None else (seq, written),
        )  # fmt: skip


def read_invocation(text: str | None) -> dict[str, Any] | None:
    """Read the JSON of an invocation; None where there is none, or it is not one."""
    if text is None or len(text) > MOST_TEXT:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("args"), list) else None


def read_state(text: Any) -> bytes | None:
    """Read the state of a generator; None where it is none."""
    if not isinstance(text, str) or len(text) > 2 * MOST_STATE:
        return None
    try:
        return zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_STATE)
    except (ValueError, zlib.error):
        return None


def tensor_nodes(node: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors of an invocation."""
    if depth > 32:
        return
    if isinstance(node, dict):
        if "tensor" in node:
            yield node
        for inner in node.values():
            yield from tensor_nodes(inner, depth + 1)
    elif isinstance(node, list):
        for inner in node:
            yield from tensor_nodes(inner, depth + 1)


def states_of(invocation: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield the states of generators that an invocation notes, by type of device."""
    random = invocation.get("random")
    for kind, text in random.items() if isinstance(random, dict) else ():
        state = read_state(text)
        if state is not None:
            yield str(kind), state


Draw = Callable[[RecordedTensor], NDArray[Any]]


class NotReplayable(Exception):
    """A call cannot be executed again; the text says why."""


class Untold(Exception):
    """A call could not be executed or followed; the text says why."""


class ContextBroken(NotReplayable):
    """A call before the last one cannot be executed."""

    def __init__(self, seq: int, why: object) -> None:
        super().__init__(f"call {seq}, before it, is not executed: {why}")
        self.seq = seq


@dataclass(frozen=True)
class Place:
    """Where and how calls are executed: tensors of ``home``, the type of device that the capture was taken on, move to ``device``
    (``npu``, ``cuda:1``, ``cpu``), others (a CPU scalar beside them) stay. ``wide``: on the CPU in float64 and complex128,
    without autocast: the truth. ``draw`` makes elements where only numbers were kept; without, such calls are not executed."""

    device: str
    home: str = "cpu"
    wide: bool = False
    draw: Draw | None = None
    hosted: tuple[str, ...] = ()  # slots that are on the CPU whatever the device
    perturb: bool = False  # move each floating-point element by one unit in its last place, up or down


INTEGERS = ("int", "uint")
MOST = 1 << 28
"""Largest tensor that is drawn, in elements: a size that the file does not bear out is not believed."""


def draw(recorded: RecordedTensor, seed: int = 0) -> NDArray[Any]:
    """Return elements with the recorded counts of zero, NaN and Inf and bounds exactly, mean and l2 to a few per cent where they
    fit the bounds (a clipped normal distribution), the same each time. What is beside (which element is where, correlations) is
    not known, so a result may be better or worse conditioned than it was. Raises ValueError where the tensor is larger than is
    drawn."""
    count = recorded.numel
    if count > MOST:
        raise ValueError(f"{recorded.slot} has {count:,} elements; at most {MOST:,} are drawn")
    source = np.random.default_rng([seed, zlib.crc32(f"{recorded.slot} {recorded.shape}".encode())])
    numbers = {name: 0.0 if value is None or math.isnan(value) else float(value) for name, value in recorded.numbers.items()}
    low, high, mean = numbers["min"], numbers["max"], numbers["mean"]
    dtype = numpy_dtype(recorded.dtype)
    if dtype == np.bool_:
        values = np.zeros(count)
        values[: max(0, count - int(numbers["n_zero"]))] = 1
        return source.permutation(values).astype(dtype).reshape(recorded.shape)
    if recorded.dtype.startswith(INTEGERS):
        return _integers(source, count, int(low), int(high), int(numbers["n_zero"])).astype(dtype).reshape(recorded.shape)
    special = [int(numbers[name]) for name in ("n_nan", "n_posinf", "n_neginf", "n_zero")]
    left = max(0, count - sum(special))
    deviation = math.sqrt(max(0.0, numbers["l2"] ** 2 / max(left, 1) - _mean(mean, count, special) ** 2)) if left else 0.0
    values = np.clip(source.normal(_mean(mean, count, special), deviation or 0.0, left), low, high)
    if left > 1:
        values[:2] = low, high
    elif left:
        values[0] = low
    whole = np.concatenate([values, *(np.full(n, v) for n, v in zip(special, (np.nan, np.inf, -np.inf, 0.0), strict=True))])[:count]
    with np.errstate(all="ignore"):
        return source.permutation(whole).astype(dtype).reshape(recorded.shape)


def _mean(mean: float, count: int, special: list[int]) -> float:
    finite = count - sum(special[:3])
    return mean * finite / max(finite - special[3], 1)  # of those that are not zero


def _integers(source: np.random.Generator, count: int, low: int, high: int, zeros: int) -> NDArray[np.int64]:
    values = source.integers(low, high + 1, count) if high >= low else np.zeros(count, np.int64)
    if low < 0 or zeros:
        values[values == 0] = high if high else low
        values[: min(zeros, count)] = 0
    if count - zeros > 1:
        values[-2:] = low, high
    return np.asarray(source.permutation(values), np.int64)


def moved(recorded: RecordedTensor) -> NDArray[Any]:
    """Return the elements, each one unit in its last place away, in float64."""
    array, unit = recorded.array(), roundoff(recorded.dtype)
    if not unit or array.dtype.kind == "c":
        return array
    signs = np.random.default_rng(0).integers(0, 2, array.shape) * 2.0 - 1.0
    wide = array.astype(np.float64)
    return np.where(np.abs(wide) < 1e30, wide * (1 + 2 * unit * signs), wide)


@dataclass(slots=True)
class Kept:
    """Where the tensors of a call lie, by slot: rows of the capture."""

    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``input.0``, and its weights, ``param.weight``."""
    gradients: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the call's outputs, as its backward got them: ``grad_output.0``."""
    random: dict[str, bytes] = field(default_factory=dict)
    """States of the generators that were noted when it began, by type of device."""
    place: tuple[Key | None, int] | None = None
    """Of an operator: the function that it is executed for, and its number among that one's operators."""


class BaselineInputs:
    """The baseline of a forced run, a step at a time; ``level`` tells whose calls lend their inputs, None: ``module`` where the
    baseline has it, else ``api``, else ``aten``. Raises TrueupError where it is no capture, or lacks the level or tensors."""

    def __init__(self, path: str | Path, level: str | None = None) -> None:
        self.path = Path(path)
        self._capture: Capture = open_capture(self.path)
        root = self._capture.root
        levels, detail = root.get("levels"), root.get("detail")
        there = [name for name in LEVELS if isinstance(levels, list) and name in levels and level in (None, name)]
        if detail != "tensor" or not there:
            wanted = level or "module"
            raise TrueupError(
                f"{path} cannot lend its inputs.\n  expected: a capture of level {wanted} with --detail tensor\n"
                f"  got:      levels {levels}, detail {detail}\n"
                f"  next:     trueup capture --level {wanted} --detail tensor -o BASE -- COMMAND, where the run is trusted"
            )
        self.level = there[0]
        both = [name for name in ("api", "aten") if isinstance(levels, list) and name in levels]
        self.levels = (self.level,) if self.level == "module" else tuple(both) if self.level == "aten" else ("api",)
        """Levels whose calls are forced: with operators the functions around them, whose records are then of the same inputs."""
        self.home = home_of(self._capture.ranks.values())
        self._step: tuple[int, int] | None = None
        self._calls: dict[Key, Kept] = {}

    def step(self, rank: int, step: int) -> dict[Key, Kept]:
        """Return the calls of a step; the last step asked for is kept."""
        if self._step != (rank, step):
            self._step, self._calls = (rank, step), self._read(rank, step)
        return self._calls

    def holds(self, step: int) -> bool:
        """Tell whether the baseline has a step."""
        return step in self._capture.steps

    def array(self, rank: int, row: dict[str, Any]) -> NDArray[Any]:
        """Return a tensor as a read-only array of its shape; raise `TrueupError` where it was not kept, or is damaged."""
        if row["payload_segment"] is None:
            raise TrueupError("its bytes were not kept")
        place = (row[name] for name in ("payload_segment", "payload_key", "payload_view", "digest"))
        array = self._capture.payload(rank, *place)
        shape = [int(size) for size in row["shape"] or ()]
        if int(np.prod(shape)) != array.size:
            raise TrueupError(f"its {array.size} elements are not those of shape {shape}")
        return array.reshape(shape)

    def _read(self, rank: int, step: int) -> dict[Key, Kept]:
        if step not in self._capture.steps or rank not in self._capture.ranks:
            return {}
        rows = self._capture.records(GIVEN, rank=rank, step=step, level=self.level).to_pylist()
        found: dict[Key, Kept] = {}
        by_seq: dict[int, Key] = {}
        for row in rows:
            key = row["phase"], row["scope"], row["op"], row["ordinal"]
            if row["slot"].startswith(("input.", "param.")) and not (self.level == "module" and row["phase"] == "backward"):
                by_seq[row["seq"]] = key
                found.setdefault(key, Kept()).inputs[row["slot"]] = row
        for row in rows:
            key_of = by_seq.get(row["forward_seq"]) if row["phase"] == "backward" else None
            if key_of is not None and row["slot"].startswith("grad_output."):
                found[key_of].gradients.setdefault(row["slot"], row)
        if self.level == "aten":
            self._place(rank, step, found, by_seq)
        for seq, states in self._states(rank, step) if self.level != "module" else ():
            if seq in by_seq:
                found[by_seq[seq]].random = states
        return found

    def _place(self, rank: int, step: int, found: dict[Key, Kept], by_seq: dict[int, Key]) -> None:
        """Note of each operator what it is executed for, and its number there."""
        names = ["seq", "parent", "forward_seq", "level", "phase", "scope", "op", "ordinal"]
        rows = {row["seq"]: row for row in self._capture.records(names, rank=rank, step=step, level=["api", "aten"]).to_pylist()}
        functions = {s: (r["phase"], r["scope"], r["op"], r["ordinal"]) for s, r in rows.items() if r["level"] == "api"}
        counts: Counter[int | None] = Counter()
        for seq, row in sorted(rows.items()):
            if row["level"] == "aten":
                owner = functions.get(row["forward_seq"] if row["phase"] == "backward" else row["parent"])
                if seq in by_seq:
                    found[by_seq[seq]].place = owner, counts[row["parent"]]
                counts[row["parent"]] += 1

    def _states(self, rank: int, step: int) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield execution numbers of a step's calls of all levels, with the generators' states when each began, as far as noted."""
        if "invocation" not in self._capture.names:
            return
        rows = self._capture.records(["seq", "slot", "invocation"], rank=rank, step=step).to_pylist()
        states: dict[str, bytes] = {}
        for row in rows:
            if row["slot"] == "arguments":
                if '"random"' in (row["invocation"] or "") and (made := read_invocation(row["invocation"])) is not None:
                    states = states | dict(states_of(made))
                yield row["seq"], states
