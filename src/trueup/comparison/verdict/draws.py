"""Whether a suspected call is wrong, or draws from a generator that stands elsewhere: what is known of the generator decides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from trueup.comparison.graph.names import normalised
from trueup.comparison.graph.streams import NONE, Numbers, Row, Stream
from trueup.comparison.verdict.criteria import Criterion
from trueup.comparison.verdict.random_state import RandomStates

if TYPE_CHECKING:
    from trueup.comparison.verdict.locate import Part, Suspect

DROPOUT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "scaled_dot_product_attention": (("dropout_p", "4"), ()),
    "multi_head_attention_forward": (("dropout_p", "10"), ("training", "11")),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (("5",), ("6",))),
}
"""Functions that draw random numbers inside, by their last name: which arguments are the share of zeros, and whether it is training
(signatures of PyTorch 2.13)."""

SIDES = ("baseline", "candidate")
ELSEWHERE = "the difference begins in the random state, not in the call"
SAME_STATE = "the state of the generator is the same on both sides"
UNKNOWN = "others, or its result is wrong: with --detail tensor captures keep the state of the generator, which tells"


def explain_draws(part: Part, suspects: Iterable[Suspect], criterion: Criterion) -> None:
    """Say of suspects that draw random numbers whether their generator stood elsewhere; such a one is of kind ``random``."""
    wanted = [s for s in suspects if s.kind in ("operator", "random") and s.judged.call.candidate.level != "module"]
    if not wanted:
        return
    errors, states = part.verdicts.errors, RandomStates(part.streams, part.verdicts.errors.calls)
    for suspect in wanted:
        call = part.streams[1].find(suspect.place)
        pair = int(np.searchsorted(errors.calls[1], call)) if call != NONE else len(errors.calls[1])
        if pair >= len(errors.calls[1]) or errors.calls[1][pair] != call:
            continue
        differ = states.differ(pair)
        inside = suspect.kind == "operator" and _draws_inside(part.streams[1], call)
        if not (suspect.judged.row.random or inside or states.draw(pair)):
            continue
        if differ:
            suspect.kind, suspect.because = "random", f"{_begins(part, states, criterion)}: {ELSEWHERE}"
        elif differ is False:
            suspect.because = SAME_STATE
        elif not (suspect.kind == "operator" and suspect.judged.row.random):  # else its result shows that it drew the same
            alone = _alone_before(part, criterion, suspect.place)
            if alone is not None or inside:
                suspect.kind = "random"
                why = f"{alone} drew before it, so its random numbers may be others"
                suspect.because = why if alone else f"its random numbers are {UNKNOWN}"


def begins_elsewhere(part: Part) -> str | None:
    """Say that a generator stands elsewhere when a step begins, None where none is known to."""
    states = RandomStates(part.streams, part.verdicts.errors.calls)
    found = states.first()
    if found is None:
        return None
    call = part.streams[1].row(int(part.verdicts.errors.calls[1][found[0]]))
    return (
        f"rank {part.rank}: the state of the random generator ({found[1]}) is another one from step {call.step} on, and no "
        "compared call shows it"
    )


def _begins(part: Part, states: RandomStates, criterion: Criterion) -> str:
    first = states.first()
    assert first is not None
    pair, device = first
    call = part.streams[1].row(int(part.verdicts.errors.calls[1][pair]))
    alone = _alone_before(part, criterion, call.seq)
    after = f", after {alone} drew" if alone else ""
    earlier = any(
        states.differ(n) is False for n in range(pair) if part.streams[1].step[part.verdicts.errors.calls[1][n]] == call.step
    )
    since = f"from {_named(call)} on{after}" if earlier else f"when step {call.step} begins{after}"
    return f"the state of the generator ({device}) is another one {since}"


def _alone_before(part: Part, criterion: Criterion, place: int) -> str | None:
    """Name the last call before a place that only one side has and that draws random numbers."""
    for side, only in ((1, part.alignment.only_candidate), (0, part.alignment.only_baseline)):
        stream = part.streams[side]
        until = place if side else _counterpart(part, place)
        drawing = [call for call in _before(stream, only, until) if _is_random(stream, call, criterion)]
        if drawing:
            row = stream.row(drawing[-1])
            return f"{_named(row)}, which only the {SIDES[side]} has,"
    return None


def _named(row: Row) -> str:
    return f"{row.op} ({row.scope})" if row.scope else row.op


def _before(stream: Stream, calls: Numbers, place: int) -> list[int]:
    return list(calls[stream.seq[calls] < place].tolist())


def _counterpart(part: Part, place: int) -> int:
    baseline, candidate = part.streams
    calls = part.verdicts.errors.calls
    at = int(np.searchsorted(candidate.seq[calls[1]], place))
    return int(baseline.seq[calls[0][at]]) if at < len(calls[0]) else 0


def _is_random(stream: Stream, call: int, criterion: Criterion) -> bool:
    name = stream.names.name
    op, level, phase = (name(int(code[call])) or "" for code in (stream.op, stream.level, stream.phase))
    return criterion.row(op, level, phase).random


def _draws_inside(stream: Stream, call: int) -> bool:
    """Tell by its arguments whether a function drops something out."""
    names = DROPOUT.get(normalised(stream.names.name(int(stream.op[call])) or ""))
    if names is None:
        return False
    given = stream.given(call)
    shares, training = ([given[name] for name in of if name in given] for of in names)
    return any(isinstance(p, (int, float)) and p > 0 for p in shares) and all(told is not False for told in training)
