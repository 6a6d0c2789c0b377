"""Two tensors compared: what can be told of them, and the sentence that says it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trueup.doors.report.operands import Operand
from trueup.foundation.kernels.metrics import Metrics
from trueup.foundation.kernels.tolerance import Closeness, Element, Estimate, Tolerance, closeness, estimate, from_sketch
from trueup.foundation.words.wording import counted, sci, times

if TYPE_CHECKING:
    from numpy.typing import NDArray

Answer = Literal["close", "apart", "unknown"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """What is known of two tensors."""

    baseline: Operand
    candidate: Operand
    tolerance: Tolerance
    answer: Answer
    sentence: str
    metrics: Metrics | None = None
    closeness: Closeness | None = None
    estimate: Estimate | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 within tolerance, 1 not, 2 could not tell."""
        return {"close": 0, "apart": 1, "unknown": 2}[self.answer]


def compare_tensors(baseline: Operand, candidate: Operand, tolerance: Tolerance, top: int = 10, threads: int = 1) -> TensorDiff:
    """Compare two tensors by their elements, else by what was kept of them."""
    start = TensorDiff(baseline, candidate, tolerance, "unknown", "")
    if any(side.missing == "is no tensor" for side in (baseline, candidate)):
        which = "neither side is" if baseline.missing == candidate.missing else "one side is not"
        return replace(start, sentence=f"Could not tell: {which} a tensor, so there are no elements to compare.")
    if _sizes(baseline.shape) != _sizes(candidate.shape):
        shapes = f"{list(baseline.shape or ())} and {list(candidate.shape or ())}"
        return replace(start, sentence=f"Could not tell: the shapes differ, {shapes}.")
    held = [_elements(side) for side in (baseline, candidate)]
    notes = tuple(note for _, note in held if note)
    if baseline.shape != candidate.shape:
        notes += (f"the shapes {list(baseline.shape or ())} and {list(candidate.shape or ())} differ by sizes of one only",)
    first, second = held[0][0], held[1][0]
    if first is None or second is None:
        return _from_what_was_kept(replace(start, notes=notes))
    return _from_elements(replace(start, notes=notes), first, second.reshape(first.shape), top, threads)


def _sizes(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(size for size in shape or () if size != 1)


def _elements(side: Operand) -> tuple[NDArray[Any] | None, str]:
    """Return the elements of a side, those that its sketch holds included, and what is to be said about them."""
    if side.values is not None:
        return side.values, ""
    if side.stats is None or side.sketch is None or side.shape is None:
        return None, ""
    values = from_sketch(side.stats, side.sketch, side.shape, (side.dtype or "").startswith("complex"))
    return values, "" if values is None else f"{side.name}: its {counted(values.size, 'element')} were read from its sketch"


def _from_elements(start: TensorDiff, a: NDArray[Any], b: NDArray[Any], top: int, threads: int) -> TensorDiff:
    metrics = Metrics.of(a, b, threads)
    found = closeness(a, b, start.tolerance, top)
    sentence = _sentence(metrics, found, start.tolerance)
    return replace(
        start, answer="close" if found.close else "apart", sentence=sentence, metrics=metrics, closeness=found
    )


def _sentence(metrics: Metrics, found: Closeness, tolerance: Tolerance) -> str:
    if metrics.same:
        return f"Equal: {_all(found.elements)} the same on both sides." if found.elements else "Equal: there are no elements."
    worst = found.worst[0]
    seen = f"{place(worst)} it is {value(worst.baseline)} and {value(worst.candidate)}"
    if found.close:
        return f"Close: {_all(found.elements)} within {tolerance}; farthest {seen}{_far(worst)}."
    share = f"{found.outside:,} of {counted(found.elements, 'element')} ({percent(found.outside / found.elements)})"
    return f"Not close: {share} {'is' if found.outside == 1 else 'are'} outside {tolerance}; worst {seen}{_far(worst)}."


def _all(count: int) -> str:
    return "the one element is" if count == 1 else f"all {counted(count, 'element')} are"


def _far(element: Element) -> str:
    far = f", {sci(element.absolute)} apart" if math.isfinite(element.absolute) else ""
    return far + (f", {times(element.times)} what is allowed" if math.isfinite(element.times) else "")


def place(element: Element) -> str:
    """Write where an element is."""
    return f"at {list(element.index)}" if element.index else "alone"


def percent(share: float) -> str:
    """Write a share; what is not all is never written as 100 %, what is not nothing never as 0 %."""
    if 0 < share < 1e-4:
        return "less than 0.01 %"
    if 0.9999 < share < 1:
        return "more than 99.99 %"
    return f"{100 * share:.2f} %" if 0 < share < 1 else f"{100 * share:.0f} %"


def value(element: Any) -> str:
    """Write an element so that it can be told from every other of its dtype."""
    if isinstance(element, (np.floating, np.complexfloating)) or element.dtype.kind == "V":
        return str(element).replace("nan", "NaN")
    return str(element.item())


def _from_what_was_kept(start: TensorDiff) -> TensorDiff:
    sides = (start.baseline, start.candidate)
    kinds = [side.missing or "its elements were kept" for side in sides]
    why = kinds[0] if kinds[0] == kinds[1] else f"baseline: {kinds[0]}; candidate: {kinds[1]}"
    stats = [side.stats if side.stats is not None else _measured(side) for side in sides]
    digests = [side.digest for side in sides]
    if sides[0].dtype == sides[1].dtype and digests[0] is not None and digests[0] == digests[1]:
        return replace(start, answer="close", sentence=f"Equal: the digests are the same ({why}).")
    if stats[0] is None or stats[1] is None:
        return replace(start, sentence=f"Could not tell: the tensors cannot be compared by what was kept ({why}).")
    sketches = [side.sketch if side.sketch is not None else _sketched(side) for side in sides]
    pair = (sketches[0], sketches[1]) if sketches[0] is not None and sketches[1] is not None else None
    found = estimate(stats[0], stats[1], pair, start.tolerance)
    about = "" if math.isnan(found.relative_l2) else f" Estimated relative L2 {sci(found.relative_l2)}, about ±18 %."
    kept = replace(start, baseline=replace(sides[0], stats=stats[0]), candidate=replace(sides[1], stats=stats[1]), estimate=found)
    if found.apart:
        said = f"Not close: {found.apart}, which {start.tolerance} does not allow ({why}).{about}"
        return replace(kept, answer="apart", sentence=said)
    return replace(kept, sentence=f"Could not tell element by element ({why}).{about}")


def _packed(side: Operand) -> NDArray[np.float64] | None:
    from trueup.foundation.kernels import summarize
    from trueup.foundation.model import PACKED

    if side.values is None:
        return None
    out = np.empty(PACKED)
    summarize(side.values, out)
    return out


def _measured(side: Operand) -> Any:
    from trueup.foundation.model import NUMBERS, TensorStats

    out = _packed(side)
    if out is None or side.values is None:
        return None
    numbers = {name: int(x) if name.startswith("n_") else x for name, x in zip(NUMBERS, out.tolist(), strict=False)}
    return TensorStats(numel=side.values.size, **numbers)  # type: ignore[arg-type]


def _sketched(side: Operand) -> NDArray[np.float64] | None:
    from trueup.foundation.model import NUMBERS

    out = _packed(side)
    return None if out is None else out[len(NUMBERS) :]
