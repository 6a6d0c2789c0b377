"""Shrinking calls that fail while the same failure stays: sizes, then arguments, then values.

A step is kept if the calls still run on the right device and the wrong one fails alike: same verdict, same result (slot), same kind
of error (NaN and Inf, integers, numbers), relative error within a factor of `FACTOR`. A size that several tensors and arguments
share is one thing (batch, sequence, channels); multiples of it, and sizes at a fixed distance (a convolution's output), are tried
along. Greedy, with delta debugging's halves (Zeller and Hildebrandt 2002) for lists; a process of its own executes each step and
shows whether it breaks anything.

The fewest calls that show a failure which a call by itself does not: of what is left in memory, or handed on in another form.

The earlier calls are executed with the blamed one, each with its recorded inputs; where it reads another's result, with that result
as it lies on the device. The set is widened (the calls that made its inputs, the last call of its kind, ever longer stretches
before it) until the failure shows, and then reduced by delta debugging (`ddmin`) while the same failure stays. Each set runs on a
device that has done nothing before. A call whose inputs another one computed wrong is a victim: if the failure needs handed-on
results, each call that makes one is tried by itself.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.kept_runs import fewest
from trueup.analysis.rerun.chain_process import Recorded, Trying
from trueup.foundation.progress import advance
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.cases import Chain, Slot
from trueup.recording.execution.judging import Outcome
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls

FACTOR = 10.0  # relative errors within this factor of the original's are the same failure


@dataclass(frozen=True)
class Minimised:
    """Shrunk calls, and what there is to say."""

    chain: Chain
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Signature:
    """What makes two failures the same."""

    verdict: str
    slot: str
    kind: str
    error: float

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Signature | None:
        """Return the signature of an answer; None where nothing failed."""
        if "crashed" in answer:
            return Signature("crashed", "", answer["crashed"], 0.0)
        outcome: Outcome | None = answer.get("outcome")
        if outcome is None or outcome.verdict != "wrong":
            return None
        kinds = ("not finite", "integers", "form of the result", "saturation")
        kind = next((k for k in kinds if k in outcome.rule), "numbers")
        return Signature("wrong", outcome.slot, kind, outcome.error)

    def same(self, other: Signature | None) -> bool:
        """Tell whether another failure is this one."""
        if other is None or (self.verdict, self.slot, self.kind) != (other.verdict, other.slot, other.kind):
            return False
        if self.kind != "numbers" or not (math.isfinite(self.error) and self.error > 0):
            return True
        return self.error / FACTOR <= other.error <= self.error * FACTOR


def minimise(chain: Chain, trying: Trying, seconds: float, executions: int | None = None) -> Minimised:
    """Shrink calls of which the last fails on the device of ``trying``, within a limit of seconds and executions."""
    before = trying.tried
    first = Signature.of(trying.judge(chain))
    if first is None:
        return Minimised(chain, ["it was not shrunk, for by itself it does not fail"])
    search = _Search(chain, trying, first, time.monotonic() + seconds, math.inf if executions is None else before + executions)
    search.run()
    late = f"; stopped after {seconds:g} s, it may become smaller" if search.late else ""
    sizes = f"from {chain.size:,} to {search.best.size:,} bytes of inputs"
    text = f"shrunk {sizes} in {trying.tried - before} executions, with the same failure{late}"
    return Minimised(search.best, [text])


class _Search:
    def __init__(self, chain: Chain, trying: Trying, wanted: Signature, until: float, most: float) -> None:
        self.best, self._trying, self._wanted, self._until, self._most = chain, trying, wanted, until, most
        self._seen: set[Any] = set()
        self._tried = 0
        self._crashes: set[Any] = set()

    @property
    def late(self) -> bool:
        """Whether the time or the number of executions is used up."""
        return time.monotonic() > self._until or self._trying.tried >= self._most

    def run(self) -> None:
        """Shrink until nothing changes any more, or the time is over."""
        if any(self.best.links):
            self._try(self.best.unlinked())
        while not self.late:
            before = self.best
            for step in (lambda: self._first(plainer(self.best)), self._dropped, self._sizes, self._attributes, self._lists):
                step()
            if self.best is before:
                break
        for step in (self._values, self._random):
            step()

    def _try(self, chain: Chain) -> bool:
        if self.late or (mark := _mark(chain)) in self._seen:
            return False
        self._seen.add(mark)
        form = tuple((s, t.shape) for s, t in chain.inputs.items()), repr([c.made.invocation for c in chain.cases])
        if form in self._crashes:
            return False
        if self._wanted.verdict == "crashed" and "chain" not in self._trying.settle(chain):
            return False  # it is not executed where it should be either
        self._tried += 1
        advance("shrinking", "variants", self._tried)
        answer = self._trying.judge(chain)
        if "crashed" in answer and self._wanted.verdict != "crashed":
            self._crashes.add(form)  # such as a kernel that trusts its shapes; starting a process again takes seconds
        if not self._wanted.same(Signature.of(answer)):
            return False
        self.best = chain
        return True

    def _first(self, candidates: Iterator[Chain]) -> bool:
        return any(self._try(chain) for chain in candidates)

    def _sizes(self) -> None:
        tried: set[int] = set()
        while not self.late and not self.best.rigid:
            sizes = {n for t in self.best.inputs.values() for n in t.shape if n > 1} - tried
            if not sizes:
                return
            size = min(sizes)  # what others are multiples of comes first
            tried.add(size)
            for smaller in dict.fromkeys((1, 2, 3, 4, size // 8, size // 4, size // 2, size - 1)):
                if 0 < smaller < size and self._first(resized(self.best, size, smaller)):
                    tried.discard(smaller)
                    break

    def _dropped(self) -> None:
        """Drop arguments that are tensors, and gradients that are received."""
        for k, slot in list(self.best.inputs):
            if slot.startswith("grad_"):
                others = [s for s in self.best.inputs if s[0] == k and s[1].startswith("grad_") and s[1] != slot]
                if others:
                    self._try(self.best.without((k, slot)))
                continue
            made = replaced(invocation(self.best, k), slot)
            self._try(self.best.without((k, slot)).with_invocation(k, made))

    def _attributes(self) -> None:
        for place, value in list(leaves(self.best)):
            for other in simpler(value):
                if self._try(put(self.best, place, other)):
                    break

    def _lists(self) -> None:
        for place, nodes in list(tensor_lists(self.best)):
            halves = (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
            for half in halves if len(nodes) > 1 else ():
                if self._first(halved(self.best, place, nodes, half)):
                    break

    def _random(self) -> None:
        """Start generators whose state need not be kept at seed 0."""
        state = self._trying.seeded
        random = {kind: s for case in self.best.cases for kind, s in case.made.random.items()}
        if any(len(s) == len(state) and s != state for s in random.values()):
            self._try(self.best.with_random(dict.fromkeys(random, state)))

    def _values(self) -> None:
        for slot in list(self.best.inputs):
            for array in rounder(self.best.inputs[slot].array()):
                if self._try(self.best.with_tensors({slot: array})):
                    break


def _mark(chain: Chain) -> Any:
    tensors = tuple((s, t.dtype, t.shape, t.strides, hash(t.array().tobytes())) for s, t in chain.inputs.items())
    made = repr([case.made.invocation for case in chain.cases])
    return tensors, made, hash(frozenset(item for case in chain.cases for item in case.made.random.items()))


COMBINATIONS = 48  # ways in which the other sizes may follow one that is shrunk, at most


def resized(chain: Chain, size: int, smaller: int) -> Iterator[Chain]:
    """Yield a chain with one size shrunk: everywhere, with the others that may follow it, then in the n-th dimensions."""
    others = sorted({n for t in chain.inputs.values() for n in t.shape if n > 1} - {size}, reverse=True)
    ways = [_following(n, size, smaller) for n in others]
    scaled, shifted = ({n: way[k] for n, way in zip(others, ways, strict=True) if k in way} for k in ("scaled", "shifted"))
    simple: list[dict[int, int]] = [scaled, {}, shifted]
    choices = [dict.fromkeys([n, *way.values()]) for n, way in zip(others, ways, strict=True)]
    combined = itertools.islice(itertools.product(*choices), COMBINATIONS)
    plans = [*simple, *(dict(zip(others, chosen, strict=True)) for chosen in combined)]
    done: set[Any] = set()
    for plan in plans:
        sizes = {size: smaller} | {n: m for n, m in plan.items() if n != m}
        if (mark := tuple(sorted(sizes.items()))) not in done:
            done.add(mark)
            yield cut(chain, sizes)
            yield cut(chain, sizes, last=True)
    places = [(slot, k) for slot, t in chain.inputs.items() for k, n in enumerate(t.shape) if n == size]
    dimensions = sorted({k for _, k in places})  # not single tensors: kernels broadcast what is no valid call any more
    for dimension in dimensions if len(dimensions) > 1 else ():
        yield cut(chain, {size: smaller}, only={p for p in places if p[1] == dimension})


def _following(other: int, size: int, smaller: int) -> dict[str, int]:
    found = {}
    if other * smaller % size == 0 and (scaled := other * smaller // size) >= 1:
        found["scaled"] = scaled
    if other - size + smaller >= 1:
        found["shifted"] = other - size + smaller
    return found


def halved(chain: Chain, place: Place, nodes: list[Any], half: list[Any]) -> Iterator[Chain]:
    """Yield a chain with a list of tensors halved, alone and with a number and sizes that may go along: layers, directions."""
    base = chain
    for node in nodes:
        if node not in half:
            base = base.without((place[0], str(node["tensor"])))
    base = put(base, place, half)
    numbers: list[dict[Place, Any]] = [{}]
    for where, value in leaves(base):
        if isinstance(value, bool):
            numbers.append({where: not value})
        elif isinstance(value, int) and value > 1 and value % 2 == 0:
            numbers.append({where: value // 2})
    sizes = sorted({n for t in base.inputs.values() for n in t.shape if n > 1 and n % 2 == 0})
    for change in numbers:
        changed = base
        for where, value in change.items():
            changed = put(changed, where, value)
        yield changed
        for several in (1, 2):
            for chosen in itertools.combinations(sizes, several):
                yield cut(changed, {n: n // 2 for n in chosen})


def cut(chain: Chain, sizes: Mapping[int, int], *, only: set[tuple[Slot, int]] | None = None, last: bool = False) -> Chain:
    """Return a chain with sizes replaced in tensors, and in arguments if all of them are meant."""
    arrays = {}
    for slot, tensor in chain.inputs.items():
        cuts = []
        for k, n in enumerate(tensor.shape):
            m = sizes.get(n, n) if only is None or (slot, k) in only else n
            cuts.append(slice(n - m, n) if last else slice(0, m))
        if any(c.stop - c.start != n for c, n in zip(cuts, tensor.shape, strict=True)) or _is_index(tensor.array(), sizes):
            arrays[slot] = _within(np.ascontiguousarray(tensor.array()[tuple(cuts)]), sizes)
    changed = chain.with_tensors(arrays)
    if only is not None:
        return changed
    for place, value in list(leaves(changed)):
        if type(value) is int and value in sizes:
            changed = put(changed, place, sizes[value])
    return changed


def _is_index(array: NDArray[Any], sizes: Mapping[int, int]) -> bool:
    return array.dtype.kind in "iu" and array.size > 0 and any(int(array.max()) < n for n in sizes)


def _within(array: NDArray[Any], sizes: Mapping[int, int]) -> NDArray[Any]:
    """Keep integers that are all below a size (indices of rows) below its new value; negative ones stay (padding)."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    above = [m for n, m in sizes.items() if array.max() < n]
    return np.where(array >= 0, array % max(above), array).astype(array.dtype) if above else array


Place = tuple[Any, ...]  # way to an argument: the call's place in the chain, then keys


def invocation(chain: Chain, k: int) -> dict[str, Any]:
    """Return a copy of how a call was made."""
    made = chain.cases[k].made.invocation
    return {"args": []} if made is None else copy.deepcopy(dict(made))


def leaves(chain: Chain) -> Iterator[tuple[Place, Any]]:
    """Yield numbers and flags among the arguments, with the way to each."""

    def walk(node: Any, place: Place) -> Iterator[tuple[Place, Any]]:
        if isinstance(node, (bool, int, float)):
            yield place, node
        elif isinstance(node, list):
            for k, item in enumerate(node):
                yield from walk(item, (*place, k))
        elif isinstance(node, dict):
            for key in ("tuple", "size", "dict"):
                if key in node:
                    yield from walk(node[key], (*place, key))
            if place and place[-1] == "dict":
                for key, item in node.items():
                    yield from walk(item, (*place, key))

    for k in range(len(chain.cases)):
        made = invocation(chain, k)
        yield from walk(made.get("args"), (k, "args"))
        for name, value in dict(made.get("kwargs") or {}).items():
            yield from walk(value, (k, "kwargs", name))


def tensor_lists(chain: Chain) -> Iterator[tuple[Place, list[Any]]]:
    """Yield arguments that are lists of tensors."""
    for n in range(len(chain.cases)):
        made = invocation(chain, n)
        for part in ("args", "kwargs"):
            items = made.get(part) or ()
            for key, value in enumerate(items) if isinstance(items, list) else dict(items).items():
                inner = value.get("tuple", value) if isinstance(value, dict) else value
                place = (n, part, key, "tuple") if inner is not value else (n, part, key)
                if isinstance(inner, list) and len(inner) > 1 and all(isinstance(i, dict) and "tensor" in i for i in inner):
                    yield place, inner


def put(chain: Chain, place: Place, value: Any) -> Chain:
    """Return the chain with another argument."""
    changed: Any = invocation(chain, place[0])
    node = changed
    for key in place[1:-1]:
        node = node[key]
    node[place[-1]] = value
    return chain.with_invocation(place[0], changed)


def simpler(value: Any) -> list[Any]:
    """Return what may stand for a number or a flag."""
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return [n for n in dict.fromkeys((0, 1, value // 2)) if 0 <= n < value]
    rounded = [0.0, 1.0, float(f"{value:.0e}")] if math.isfinite(value) else []
    return [n for n in dict.fromkeys(rounded) if n != value and len(repr(n)) < len(repr(value))]


def replaced(node: Any, slot: str) -> Any:
    """Return an invocation with None where a tensor was."""
    if isinstance(node, dict):
        if node.get("tensor") == slot:
            return None
        return {k: replaced(v, slot) for k, v in node.items()}
    return [replaced(v, slot) for v in node] if isinstance(node, list) else node


def without_keys(node: Any, keys: tuple[str, ...]) -> Any:
    """Return an invocation whose tensors lack these facts."""
    if isinstance(node, dict):
        drop = keys if "tensor" in node else ()
        return {k: without_keys(v, keys) for k, v in node.items() if k not in drop}
    return [without_keys(v, keys) for v in node] if isinstance(node, list) else node


def plainer(chain: Chain) -> Iterator[Chain]:
    """Yield it with all tensors laid out plainly and no autocast, shared memory or offsets; then with autocast."""
    arrays = {slot: t.array() for slot, t in chain.inputs.items()}
    laid = chain.with_tensors(arrays, plain=True)
    for drop in (("autocast",), ()):
        found = laid
        for k in range(len(chain.cases)):
            made: Mapping[str, Any] = without_keys(invocation(chain, k), ("offset", "shares"))
            found = found.with_invocation(k, {key: v for key, v in made.items() if key not in drop})
        yield found


def rounder(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield simpler elements: all zero, all one, then rounded ever less."""
    if not array.size:
        return
    plain: list[Callable[[], NDArray[Any]]] = [lambda: np.zeros_like(array), lambda: np.ones_like(array)]
    if array.dtype.kind not in "biuc":
        with np.errstate(all="ignore"):
            wide = array.astype(np.float64)
            scale = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
            digits = -math.floor(math.log10(scale)) if 0 < scale < 1e30 else 0
            plain += [lambda d=d: np.round(wide, d).astype(array.dtype) for d in (digits, digits + 1, digits + 2)]  # type: ignore[misc]
    for make in plain:
        made = make()
        if made.tobytes() != array.tobytes():
            yield made
        else:
            return


MOST_BYTES = 1 << 31  # of recorded inputs of all calls that are tried together
MOST_BROKEN = 64  # calls that cannot be executed and are left out, at most


@dataclass(frozen=True)
class Context:
    """What was found."""

    chain: Chain | None  # the fewest calls that show it, in memory; None: none do
    notes: list[str] = field(default_factory=list)


def find_context(calls: RecordedCalls, target: RecordedCall, trying: Trying, seconds: float) -> Context:
    """Find the fewest earlier calls that make ``target``, right by itself, fail, in a capture of detail ``tensor``. ``trying``
    executes each set afresh; after ``seconds`` the smallest set so far is taken."""
    before = earlier(calls, target)
    search = _Narrowing(Path(calls.capture.path), target, trying, time.monotonic() + seconds)
    widest: Sequence[RecordedCall] = ()
    for chosen in widened(before, target):
        widest = max(widest, chosen, key=len)
        if search.fails([call.seq for call in chosen]):
            break
        if search.late:
            break
    if search.wanted is None:
        return Context(None, [_nothing(before, widest, search, seconds)])
    needed = search.reduced()
    others = "one other call" if len(needed) == 1 else f"{len(needed)} other calls"
    notes = [f"by itself it is right; it fails after {others}, found in {trying.tried} executions of sets of calls"]
    if search.late:
        notes.append(f"stopped after {seconds:g} s: fewer calls may do")
    linked = not search.fails(needed, linked=False)
    spoiled = search.wrong_alone(needed) if linked else None
    if spoiled is not None:
        named = next(c for c in before if c.seq == spoiled)
        notes.append(f"call {spoiled} before it ({named.key.op}) is wrong by itself and hands that on: name that one")
        return Context(None, notes)
    settled = trying.settle(search.chosen(needed, linked=linked))
    return Context(settled.get("chain"), notes)


def _nothing(before: Sequence[RecordedCall], widest: Sequence[RecordedCall], search: _Narrowing, seconds: float) -> str:
    if not before:
        return "no call before it is in the capture: there is no context to try"
    late = f" (stopped after {seconds:g} s)" if search.late else ""
    of = f"the {len(widest)} calls of its level before it" if len(widest) > 1 else "the call of its level before it"
    if len(widest) < len(before):
        of = f"{len(widest)} of the {len(before)} calls of its level before it"
    broken = f"; {len(search.broken)} of them cannot be executed again" if search.broken else ""
    return f"it is right by itself, and right after {of}, too{late}{broken}"


def earlier(calls: RecordedCalls, target: RecordedCall) -> list[RecordedCall]:
    """Return the calls of a level that were executed before a call in its step and earlier ones, none within another."""
    rank, level = target.key.rank, target.key.level
    of_step = {c.seq: c for c in calls.of_step(rank, target.key.step, ("aten", "api", "module"))}
    around = set(_parents(of_step, target))
    found: list[RecordedCall] = []
    for step in sorted((s for s in calls.capture.steps if s <= target.key.step), reverse=True):
        ours = {c.seq: c for c in calls.of_step(rank, step, (level,))}
        inside = {s for s, c in ours.items() if any(p in ours and p not in around for p in _parents(ours, c))}
        kept = [c for s, c in ours.items() if s < target.seq and s not in around and s not in inside and _executable(c)]
        found = [*sorted(kept, key=lambda c: c.seq), *found]
    return found


def _parents(calls: Mapping[int, RecordedCall], call: RecordedCall) -> Iterator[int]:
    seq = call.parent
    while seq is not None:
        yield seq
        seq = calls[seq].parent if seq in calls else None


def _executable(call: RecordedCall) -> bool:
    plain = all(t.strides is not None for t in call.tensors.values())
    return bool(call.outputs) and call.invocation is not None and plain and call.key.phase != "collective"


def widened(before: Sequence[RecordedCall], target: RecordedCall) -> Iterator[list[RecordedCall]]:
    """Yield ever larger sets of earlier calls in order of execution: the makers of the inputs, then the last call of the same kind
    and shapes, then the last 4, 16, 64 ... calls."""
    by_seq = {call.seq: call for call in before}
    seen: set[tuple[int, ...]] = set()

    def new(chosen: Sequence[RecordedCall]) -> Iterator[list[RecordedCall]]:
        mark = tuple(call.seq for call in chosen)
        if mark and mark not in seen:
            seen.add(mark)
            yield list(chosen)

    yield from new(made_inputs(by_seq, target, 1))
    yield from new([c for c in before if _same_kind(c, target)][-1:])
    yield from new(made_inputs(by_seq, target, 3))
    count = 4
    while True:
        chosen = _affordable(before[-count:])
        yield from new(chosen)
        if len(chosen) < count:
            return
        count *= 4


def made_inputs(before: Mapping[int, RecordedCall], target: RecordedCall, depth: int) -> list[RecordedCall]:
    """Return the calls that made what a call reads, and their makers, ``depth`` times."""
    found: dict[int, RecordedCall] = {}
    edge = [target]
    for _ in range(depth):
        seqs = {t.producer[0] for call in edge for t in call.inputs.values() if t.producer is not None}
        edge = [before[s] for s in seqs if s in before and s not in found]
        found |= {call.seq: call for call in edge}
    return [call for _, call in sorted(found.items())]


def _same_kind(call: RecordedCall, target: RecordedCall) -> bool:
    shapes = ([(t.dtype, t.shape) for t in c.outputs.values()] for c in (call, target))
    return call.kind == target.kind and next(shapes) == next(shapes)


def _affordable(chosen: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the last calls whose inputs fit together into memory."""
    left, kept = MOST_BYTES, []
    for call in reversed(chosen):
        left -= sum(t.numel * numpy_dtype(t.dtype).itemsize for t in call.inputs.values())
        if left < 0:
            break
        kept.append(call)
    return kept[::-1]


class _Narrowing:
    def __init__(self, capture: Path, target: RecordedCall, trying: Trying, until: float) -> None:
        self._capture, self._target, self._trying, self._until = capture, target, trying, until
        self._failing: list[int] = []
        self.wanted: Signature | None = None
        self.broken: set[int] = set()

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def chosen(self, seqs: Sequence[int], *, linked: bool = True) -> Recorded:
        """Return a set of calls with the target."""
        return Recorded(self._capture, self._target.key.rank, (*seqs, self._target.seq), linked)

    def fails(self, seqs: Sequence[int], *, linked: bool = True) -> bool:
        """Tell whether the target fails after these calls: for the first time, or as it did."""
        answer = self._judge(seqs, linked)
        found = Signature.of(answer)
        if found is None or found.verdict != "wrong" or not (self.wanted is None or self.wanted.same(found)):
            return False
        self.wanted = self.wanted or found
        self._failing = [seq for seq in seqs if seq not in self.broken]
        return True

    def _judge(self, seqs: Sequence[int], linked: bool) -> dict[str, Any]:
        while True:
            kept = [seq for seq in seqs if seq not in self.broken]
            answer = self._trying.judge(self.chosen(kept, linked=linked))
            broken = answer.get("broken")
            if broken is None or broken in self.broken or len(self.broken) >= MOST_BROKEN or self.late:
                return answer
            self.broken.add(broken)

    def reduced(self) -> list[int]:
        """Return the fewest calls with which it fails: none can be left out, as far as the time goes."""
        fewest(self._failing, lambda seqs: not self.late and self.fails(seqs))
        return self._failing

    def wrong_alone(self, seqs: Sequence[int]) -> int | None:
        """Return the first of some calls that is wrong by itself."""
        rank = self._target.key.rank
        for seq in seqs:
            found = Signature.of(self._trying.judge(Recorded(self._capture, rank, (seq,))))
            if found is not None and found.verdict == "wrong":
                return seq
        return None
