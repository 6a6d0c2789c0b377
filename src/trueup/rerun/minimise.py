"""Shrinking a call that fails while the same failure stays: sizes, then arguments, then values.

A step is kept where the call still runs on the device that is right, and the one that is wrong fails alike: same verdict, same
result (slot), same kind of error (NaN and Inf, integers, numbers), relative error within a factor of `FACTOR`. Sizes are changed
together: what has one size in several tensors and arguments is one thing (batch, sequence, channels), and sizes that are its
multiples, or follow it at a distance (a convolution's output), are tried along. Greedy, with delta debugging's halves (Zeller and
Hildebrandt 2002) for lists; whatever a step breaks is told by executing it, in a process of its own.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.rerun.cases import Case
from trueup.rerun.outcomes import Outcome
from trueup.rerun.trying import Trying

FACTOR = 10.0
"""The relative error of a shrunk call lies within this factor of the original's: the failure is the same one, in size too."""
COMBINATIONS = 48
"""Ways in which the other sizes may follow one that is shrunk, at most."""


@dataclass(frozen=True)
class Minimised:
    """A shrunk case, and what there is to say."""

    case: Case
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


def minimise(case: Case, trying: Trying, seconds: float) -> Minimised:
    """Shrink a case that fails.

    Args:
        case: it fails on the device of ``trying``.
        trying: executes candidates.
        seconds: after which the smallest one so far is returned.
    """
    first = Signature.of(trying.judge(case))
    if first is None:
        return Minimised(case, ["it was not shrunk, for by itself it does not fail"])
    search = _Search(case, trying, first, time.monotonic() + seconds)
    search.run()
    late = f"; stopped after {seconds:g} s, it may become smaller" if search.late else ""
    sizes = f"from {case.size:,} to {search.best.size:,} bytes of inputs"
    text = f"shrunk {sizes} in {trying.tried} executions, with the same failure{late}"
    return Minimised(search.best, [text])


class _Search:
    def __init__(self, case: Case, trying: Trying, wanted: Signature, until: float) -> None:
        self.best, self._trying, self._wanted, self._until = case, trying, wanted, until
        self._seen: set[Any] = set()
        self._crashes: set[Any] = set()

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._until

    def run(self) -> None:
        """Shrink until nothing changes any more, or the time is over."""
        while not self.late:
            before = self.best
            for step in (self._plain, self._dropped, self._sizes, self._attributes, self._lists):
                step()
            if self.best is before:
                break
        for step in (self._values, self._random):
            step()

    def _try(self, case: Case | None) -> bool:
        if case is None or self.late or (mark := _mark(case)) in self._seen:
            return False
        self._seen.add(mark)
        form = tuple((s, t.shape) for s, t in case.inputs.items()), repr(case.made.invocation)
        if form in self._crashes:
            return False
        if self._wanted.verdict == "crashed" and "case" not in self._trying.settle(case):
            return False  # it is not executed where it should be either
        answer = self._trying.judge(case)
        if "crashed" in answer and self._wanted.verdict != "crashed":
            self._crashes.add(form)  # such as a kernel that trusts its shapes; starting a process again takes seconds
        if not self._wanted.same(Signature.of(answer)):
            return False
        self.best = case
        return True

    def _first(self, candidates: Iterator[Case]) -> bool:
        return any(self._try(case) for case in candidates)

    # ---------------------------------------------------------------- sizes
    def _sizes(self) -> None:
        tried: set[int] = set()
        while not self.late:
            sizes = {n for t in self.best.inputs.values() for n in t.shape if n > 1} - tried
            if not sizes:
                return
            size = min(sizes)  # what others are multiples of comes first
            tried.add(size)
            for smaller in dict.fromkeys((1, 2, 3, 4, size // 8, size // 4, size // 2, size - 1)):
                if 0 < smaller < size and self._first(_resized(self.best, size, smaller)):
                    tried.discard(smaller)
                    break

    # ---------------------------------------------------------------- arguments
    def _plain(self) -> None:
        """Lay every tensor out plainly, without autocast, shared memory or offsets."""
        arrays = {slot: t.array() for slot, t in self.best.inputs.items()}
        made = _invocation(self.best)
        plain = _without_keys(made, ("offset", "shares"))
        plainer = {k: v for k, v in plain.items() if k != "autocast"}
        for one in (plainer, plain):
            if self._try(self.best.with_tensors(arrays, plain=True).with_invocation(one)):
                return

    def _dropped(self) -> None:
        """Drop arguments that are tensors, and gradients that are received."""
        for slot in list(self.best.inputs):
            if slot.startswith("grad_"):
                others = [s for s in self.best.inputs if s.startswith("grad_") and s != slot]
                if others:
                    self._try(self.best.without(slot))
                continue
            made = _replaced(_invocation(self.best), slot)
            self._try(self.best.without(slot).with_invocation(made))

    def _attributes(self) -> None:
        for place, value in list(_leaves(_invocation(self.best))):
            for other in _simpler(value):
                if self._try(self.best.with_invocation(_set(_invocation(self.best), place, other))):
                    break

    def _lists(self) -> None:
        """Halve lists of tensors, alone and with a number and a size that may go along: layers, directions."""
        for place, nodes in list(_tensor_lists(_invocation(self.best))):
            halves = (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])
            for half in halves if len(nodes) > 1 else ():
                if self._first(self._halved(place, nodes, half)):
                    break

    def _halved(self, place: tuple[Any, ...], nodes: list[Any], half: list[Any]) -> Iterator[Case]:
        gone = [str(n["tensor"]) for n in nodes if n not in half]
        base = self.best
        for slot in gone:
            base = base.without(slot)
        made = _set(_invocation(base), place, half)
        numbers: list[dict[tuple[Any, ...], Any]] = [{}]
        for where, value in _leaves(made):
            if isinstance(value, bool):
                numbers.append({where: not value})
            elif isinstance(value, int) and value > 1 and value % 2 == 0:
                numbers.append({where: value // 2})
        sizes = sorted({n for t in base.inputs.values() for n in t.shape if n > 1 and n % 2 == 0})
        for change in numbers:
            changed = made
            for where, value in change.items():
                changed = _set(changed, where, value)
            case = base.with_invocation(changed)
            yield case
            for several in (1, 2):
                for chosen in itertools.combinations(sizes, several):
                    yield _cut(case, {n: n // 2 for n in chosen})

    def _random(self) -> None:
        """Let the generators begin at seed 0, whose state need not be kept."""
        import torch

        state = torch.Generator().manual_seed(0).get_state().numpy().tobytes()
        random = self.best.made.random
        if any(len(s) == len(state) and s != state for s in random.values()):
            self._try(self.best.with_random(dict.fromkeys(random, state)))

    # ---------------------------------------------------------------- values
    def _values(self) -> None:
        for slot in list(self.best.inputs):
            for array in _rounder(self.best.inputs[slot].array()):
                if self._try(self.best.with_tensors({slot: array})):
                    break


def _mark(case: Case) -> Any:
    tensors = tuple((s, t.dtype, t.shape, t.strides, hash(t.array().tobytes())) for s, t in case.inputs.items())
    return tensors, repr(case.made.invocation), hash(frozenset(case.made.random.items()))


def _invocation(case: Case) -> dict[str, Any]:
    made = case.made.invocation
    return {"args": []} if made is None else copy.deepcopy(dict(made))


# -------------------------------------------------------------------- sizes
def _resized(case: Case, size: int, smaller: int) -> Iterator[Case]:
    """Yield the case with one size shrunk: everywhere, with the others that may follow it, then in the n-th dimensions."""
    others = sorted({n for t in case.inputs.values() for n in t.shape if n > 1} - {size}, reverse=True)
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
            yield _cut(case, sizes)
            yield _cut(case, sizes, last=True)
    places = [(slot, k) for slot, t in case.inputs.items() for k, n in enumerate(t.shape) if n == size]
    dimensions = sorted({k for _, k in places})  # not single tensors: kernels broadcast what is no valid call any more
    for dimension in dimensions if len(dimensions) > 1 else ():
        yield _cut(case, {size: smaller}, only={p for p in places if p[1] == dimension})


def _following(other: int, size: int, smaller: int) -> dict[str, int]:
    found = {}
    if other * smaller % size == 0 and (scaled := other * smaller // size) >= 1:
        found["scaled"] = scaled
    if other - size + smaller >= 1:
        found["shifted"] = other - size + smaller
    return found


def _cut(case: Case, sizes: Mapping[int, int], *, only: set[tuple[str, int]] | None = None, last: bool = False) -> Case:
    """Return the case with sizes replaced, in tensors and, where all of them are meant, in arguments."""
    arrays = {}
    for slot, tensor in case.inputs.items():
        cuts = []
        for k, n in enumerate(tensor.shape):
            m = sizes.get(n, n) if only is None or (slot, k) in only else n
            cuts.append(slice(n - m, n) if last else slice(0, m))
        if any(c.stop - c.start != n for c, n in zip(cuts, tensor.shape, strict=True)) or _is_index(tensor.array(), sizes):
            arrays[slot] = _within(np.ascontiguousarray(tensor.array()[tuple(cuts)]), sizes)
    changed = case.with_tensors(arrays)
    if only is not None:
        return changed
    made = _invocation(case)
    for place, value in list(_leaves(made)):
        if type(value) is int and value in sizes:
            made = _set(made, place, sizes[value])
    return changed.with_invocation(made)


def _is_index(array: NDArray[Any], sizes: Mapping[int, int]) -> bool:
    return array.dtype.kind in "iu" and array.size > 0 and any(int(array.max()) < n for n in sizes)


def _within(array: NDArray[Any], sizes: Mapping[int, int]) -> NDArray[Any]:
    """Keep integers that are all below a size, such as indices of rows, below what it becomes; negative ones stay (padding)."""
    if array.dtype.kind not in "iu" or not array.size:
        return array
    above = [m for n, m in sizes.items() if array.max() < n]
    return np.where(array >= 0, array % max(above), array).astype(array.dtype) if above else array


# -------------------------------------------------------------------- arguments
def _leaves(made: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield numbers and flags among the arguments, with the way to each."""

    def walk(node: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
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

    yield from walk(made.get("args"), ("args",))
    for name, value in dict(made.get("kwargs") or {}).items():
        yield from walk(value, ("kwargs", name))


def _tensor_lists(made: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    for part in ("args", "kwargs"):
        items = made.get(part) or ()
        for key, value in enumerate(items) if isinstance(items, list) else dict(items).items():
            inner = value.get("tuple", value) if isinstance(value, dict) else value
            place = (part, key, "tuple") if inner is not value else (part, key)
            if isinstance(inner, list) and len(inner) > 1 and all(isinstance(n, dict) and "tensor" in n for n in inner):
                yield place, inner


def _set(made: Mapping[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(dict(made))
    node = changed
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    found: dict[str, Any] = changed
    return found


def _simpler(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return [n for n in dict.fromkeys((0, 1, value // 2)) if 0 <= n < value]
    rounded = [0.0, 1.0, float(f"{value:.0e}")] if math.isfinite(value) else []
    return [n for n in dict.fromkeys(rounded) if n != value and len(repr(n)) < len(repr(value))]


def _replaced(node: Any, slot: str) -> Any:
    """Return an invocation with None where a tensor was."""
    if isinstance(node, dict):
        if node.get("tensor") == slot:
            return None
        return {k: _replaced(v, slot) for k, v in node.items()}
    return [_replaced(v, slot) for v in node] if isinstance(node, list) else node


def _without_keys(node: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(node, dict):
        drop = keys if "tensor" in node else ()
        return {k: _without_keys(v, keys) for k, v in node.items() if k not in drop}
    return [_without_keys(v, keys) for v in node] if isinstance(node, list) else node


# -------------------------------------------------------------------- values
def _rounder(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
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

