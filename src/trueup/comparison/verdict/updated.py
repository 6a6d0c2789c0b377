"""How much of an optimizer's error is explained: relative to what it added to a weight, not to the weight.

An optimizer step changes a weight by a hundredth or a thousandth of it, so an error of a tenth of the step hides in what rounding
and carried errors of a whole weight explain. Of a weight w that becomes w + d, with an error e of w before and the largest error r
of its gradient and states::

    own       4 u  +  ‖d‖ / ‖w‖ · 512 u
    expected  own  +  2 e  +  ‖d‖ / ‖w‖ · factor (r + sqrt(r))

``ulps`` and ``factor`` are those of the criterion's row for optimizers: Adam's m / sqrt(v) is near ±1 however small the gradient,
so that what rounding leaves of a gradient that should be zero decides its sign. A state is ``ulps u + factor r``; what the last
call adds to a weight is ``4 u + ulps 2^-24 + factor r``, for kernels compute in float32 and round what they store.

No norm tells how large that part of a gradient is: the bias of an attention's keys has a gradient of zero, beside others that have
not. So a weight whose gradient differs at all may be wrong by twice its step, unless most weights are: one kernel makes them all.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from trueup.comparison.graph.streams import Array, Numbers
from trueup.comparison.measures.measure import Errors
from trueup.comparison.measures.roundoff import SINGLE, roundoff
from trueup.comparison.normalise.updates import ADDED, STEP
from trueup.comparison.verdict.criteria import Row
from trueup.kernels import distance

ROUNDINGS = 4.0
"""Units of a weight: on each side it is rounded when it decays and when the step is added."""
BIAS = 512.0
"""Units of the step: Adam's 1 - 0.999 has an error of 1000 units where it is computed in float32, and its root half of that."""
CARRIED = 2.0
"""Times the error of the weight before, which decay and the step hardly change: room for what sketches estimate."""


def explain_updates(errors: Errors, outputs: Numbers, own: Array, expected: Array, row: Row) -> tuple[Array, Array]:
    """Return what is explained of outputs, with those of `STEP` put right by the optimizers' row; both relative to the output."""
    stream = errors.streams[1]
    names = errors.streams[0].names.names
    step = stream.names.number(STEP)
    place = np.flatnonzero(stream.op[errors.calls[1][errors.pair[outputs]]] == step)
    if not len(place):
        return own, expected
    own, expected = own.copy(), expected.copy()
    entries = {(int(errors.pair[n]), names[int(errors.names[n])]): n for n in _entries(errors, step)}
    given = _given(errors, entries)
    worst = _worst_gradients(errors)
    flipped: dict[int, dict[int, float]] = defaultdict(dict)
    for at in place.tolist():
        n = int(outputs[at])
        pair, name = int(errors.pair[n]), names[int(errors.names[n])].removeprefix("output.")
        weight, _, state = name.partition(":")
        unit = roundoff(errors.streams[0].dtype_of(int(errors.slots[0][n]))) or SINGLE
        r = given.get((pair, weight), worst.get(_step_of(errors, pair), 2 * unit))  # of which nothing is known: rounding
        if state.startswith(ADDED):
            own[at] = ROUNDINGS * unit + row.ulps * SINGLE
            expected[at] = own[at] + row.factor * r
            continue
        if state:
            own[at], expected[at] = row.ulps * unit, row.ulps * unit + row.factor * r
            continue
        before = entries.get((pair, f"input.{name}"))
        share = _moved(errors, n, before, entries.get((pair, f"step.{name}")))
        own[at] = (ROUNDINGS + share * BIAS) * unit
        carried = CARRIED * float(np.nan_to_num(errors.relative[before])) if before is not None else 0.0
        moved = share * row.factor * (r + np.sqrt(r))
        # A weight that was zero, and one of which only a digest is known, has no size to compare the step with.
        own[at], expected[at] = (own[at], own[at] + carried + moved) if np.isfinite(moved) else (0.0, np.inf)
        flipped[pair][at] = carried + 2 * share if r > 0 else 0.0
    for weights in flipped.values() if not errors.streams[0].mixed else ():
        known = list(weights)
        if 2 * np.count_nonzero(errors.relative[outputs[known]] > expected[known]) <= len(known):
            expected[known] = np.maximum(expected[known], own[known] + list(weights.values()))
    return own, expected


def _moved(errors: Errors, after: int, before: int | None, step: int | None) -> float:
    """Return how far the baseline's weight was moved, relative to it; NaN where that is not known."""
    norm, stream, slots = float(errors.norm[after]), errors.streams[0], errors.slots[0]
    if step is None and before is not None:
        apart = float(distance(stream.sketch[slots[[before]]], stream.sketch[slots[[after]]])[0])
    else:
        apart = float(errors.norm[step]) if step is not None else float("nan")
    return apart / norm if norm > 0 else float("nan")


def _given(errors: Errors, entries: dict[tuple[int, str], int]) -> dict[tuple[int, str], float]:
    """Return the largest relative error of the gradient and the states of each weight, by call; of those that were compared."""
    found: dict[tuple[int, str], float] = {}
    for (pair, slot), n in entries.items():
        kind, _, name = slot.partition(".")
        weight, _, state = name.partition(":")
        if (kind == "gradient" or (kind == "input" and state)) and not np.isnan(errors.relative[n]):
            found[pair, weight] = max(found.get((pair, weight), 0.0), float(errors.relative[n]))
    return found


def _entries(errors: Errors, step: int) -> list[int]:
    calls = errors.streams[1].op[errors.calls[1][errors.pair]] == step
    return list(np.flatnonzero(calls).tolist())


def _step_of(errors: Errors, pair: int) -> int:
    return int(errors.streams[1].step[errors.calls[1][pair]])


def _worst_gradients(errors: Errors) -> dict[int, float]:
    """Return the largest relative error of what backward calls gave, by step."""
    stream = errors.streams[1]
    calls = errors.calls[1][errors.pair]
    backward = errors.outputs & (stream.phase[calls] == stream.names.number("backward")) & np.isfinite(errors.relative)
    found: dict[int, float] = {}
    for step, error in zip(stream.step[calls[backward]].tolist(), errors.relative[backward].tolist(), strict=True):
        found[step] = max(error, found.get(step, 0.0))
    return found
