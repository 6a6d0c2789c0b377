"""Executing part of a step once more, with the calls of interest recorded as tensors, and nothing of the training touched.

What was on the tape runs again in its order, as far as the calls of interest need it, under a capture of their own; the watched
session is idle meanwhile. The calls get the numbers that they had, so that rows of both can be laid side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from trueup.analysis.watch.again import CannotRerun, Rerun
from trueup.recording.adapters.torch.session import Session
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.adapters.torch.watching_copying import CopyingSession, Key
from trueup.recording.adapters.torch.watching_standins import StandIns, begin_as, innermost, moved, swapped
from trueup.recording.adapters.torch.watching_surroundings import Surroundings, random_states, set_random_states
from trueup.recording.adapters.torch.watching_tape import Event, Held, Made, Tape, mapped
from trueup.recording.recorder import Call

COLLECTIVE = "it communicates with other ranks, which do not execute it again"
UPDATED = "the optimizer had changed its parameters before that was noticed"
CHANGED = "a tensor that it was given was changed in place since"
NOT_FOLLOWED = (
    "it did not come from modules and functions that are given tensors on the training's thread (but from random numbers, another "
    "thread, a custom autograd function outside modules)"
)
REASONS = {"collective": COLLECTIVE, "optimizer": "it ran in the optimizer's step, which changes what it reads"}
"""By phase, why calls are not executed again."""
OVERWRITES = "it wrote to a tensor in place that is not its own"


def rerun(session: Session, tape: Tape, calls: Sequence[Call], numbered: Sequence[Call]) -> Rerun:
    """Execute what is needed to see ``calls`` once more.

    Args:
        session: the watched session; nothing runs in it at present.
        tape: of the present step.
        calls: of the step, of which rows are wanted.
        numbered: the calls of the step whose ordinals are known.

    Raises:
        CannotRerun: nothing was executed, because it cannot be, or not without a risk for the training.
    """
    needed, refused = _possible(tape, calls)
    copies = CopyingSession(session, {_key(call) for call in calls})
    copies.recorder.step = session.recorder.step
    ordinals = _Ordinals(numbered)
    before = random_states(session.slots.devices)
    was_active, session.active = session.active, False
    session.collectives.refused = COLLECTIVE
    ended = None
    try:
        with torch._C._EnableTorchFunction(), copies.on(), ExitStack() as swaps:
            ended = _Player(tape, copies, ordinals, swaps).play(needed)
    finally:
        session.active, session.collectives.refused = was_active, None
        set_random_states(before)
    failed = copies.failure.text or copies.recorder.failure
    return Rerun(copies.copier.rows(), failed or ended or refused)


def _key(call: Call) -> Key:
    return call.level, call.phase, call.scope, call.op


# ---------------------------------------------------------------- what is needed
def _possible(tape: Tape, calls: Sequence[Call]) -> tuple[list[Event], str | None]:
    """Return the events to execute for those calls for which that is possible, and why it is not for another.

    Raises:
        CannotRerun: it is for none.
    """
    targets: list[Event] = []
    refused: str | None = None
    for call in calls:
        try:
            event = _event_of(tape, call)
            for needed in _needed(tape, [event]):
                _check(tape, needed)
            targets.append(event)
        except CannotRerun as error:
            refused = refused or str(error)
    if not targets:
        raise CannotRerun(refused or NOT_FOLLOWED)
    return _needed(tape, targets), refused


def _event_of(tape: Tape, call: Call) -> Event:
    if call.phase in REASONS:
        raise CannotRerun(REASONS[call.phase])
    found = next((event for event in tape.events if event.first <= call.seq and (event.last < 0 or call.seq < event.last)), None)
    if found is None:
        raise CannotRerun(tape.cut or NOT_FOLLOWED)
    return found


def _needed(tape: Tape, targets: Sequence[Event]) -> list[Event]:
    """Return the events that lead to these, in order; what wrote in place between them is among them."""
    wanted, pending = {event.number for event in targets}, list(targets)
    while pending:
        for made in pending.pop().needs():
            if made.event not in wanted:
                wanted.add(made.event)
                pending.append(tape.events[made.event])
    first, last = min(wanted), max(wanted)
    for event in tape.events[first:last]:
        if event.writes and not event.opaque and {made.event for made in event.needs()} & wanted:
            wanted.add(event.number)
    return [event for event in tape.events if event.number in wanted]


def _check(tape: Tape, event: Event) -> None:
    if event.opaque:
        raise CannotRerun(OVERWRITES)
    held = event.holds()
    if any(one.changed for one in held):
        raise CannotRerun(CHANGED)
    if event.kind == "backward" and any(isinstance(root, Held) and not root.tensor.is_leaf for root in event.args[0]):
        raise CannotRerun(NOT_FOLLOWED)
    read = {id(one.tensor) for one in held}
    if event.kind == "module":
        read |= {id(p) for p in innermost(event.run).parameters()}
    for number, reference in tape.updates:
        optimizer = reference()
        groups = [] if optimizer is None else optimizer.param_groups
        if number > event.number and (optimizer is None or any(id(p) in read for group in groups for p in group["params"])):
            raise CannotRerun(UPDATED)


class _Ordinals:
    """From which number on an event's calls of a kind count."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._known: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        for call in calls:
            self._known[_key(call)].append((call.seq, call.ordinal))

    def start(self, event: Event, key: Key) -> int:
        inside = [ordinal for seq, ordinal in self._known.get(key, ()) if event.first <= seq < event.last or event.last < 0]
        return min(inside, default=0)


# ---------------------------------------------------------------- playing it
class _Player:
    """Runs events again; ``swaps`` ends what modules were given for it."""

    def __init__(self, tape: Tape, copies: CopyingSession, ordinals: _Ordinals, swaps: ExitStack) -> None:
        self._copies, self._ordinals, self._swaps = copies, ordinals, swaps
        self._swapped: set[int] = set()
        self._stand_ins = StandIns()
        self._results: dict[int, list[torch.Tensor]] = {}
        self._given: dict[int, list[torch.Tensor]] = {}
        models = [event.run for event in tape.events if event.kind == "module"]
        theirs = [tensor for model in models for held in (model.parameters(), model.buffers()) for tensor in held]
        self._protected = _memory([*theirs, *(held.tensor for event in tape.events for held in event.holds())])

    def play(self, events: Sequence[Event]) -> str | None:
        """Run events in order; return why it ended early, if it did."""
        for event in events:
            self._copies.copier.begin_event(event.first, partial(self._ordinals.start, event))
            self._copies.threads.state.shared.updating = False
            try:
                with _as_in(event.surroundings):
                    self._play(event)
            except CannotRerun as error:
                return str(error)
            except Exception as error:  # noqa: BLE001 - what the user's code raises, or memory that is not there
                return f"it raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return None

    def _play(self, event: Event) -> None:
        with torch._C.DisableTorchFunction():
            args, kwargs = mapped(event.args, self._again), mapped(event.kwargs, self._again)
            self._given[event.number] = [tensor for _, tensor in named_tensors("input", args, kwargs)]
            if event.writes and event.kind == "function":
                self._protect(event)
        result = getattr(self, f"_{event.kind}")(event, args, kwargs)
        self._results[event.number] = [tensor for _, tensor in named_tensors("output", result)]

    def _function(self, event: Event, args: Any, kwargs: Any) -> Any:
        return event.run(*args, **kwargs)

    def _module(self, event: Event, args: Any, kwargs: Any) -> Any:
        module = innermost(event.run)
        with torch._C.DisableTorchFunction():
            if id(module) not in self._swapped:
                self._swapped.add(id(module))
                self._swaps.enter_context(swapped(module, self._stand_ins))
            begin_as(module, event.buffers, training=event.training)
            args, kwargs = moved(event.run, args), moved(event.run, kwargs)
        return module(*args, **kwargs)

    def _backward(self, event: Event, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - positions are those of the engine
        return torch.autograd._engine_run_backward(*args, **kwargs)

    def _again(self, reference: Made | Held) -> torch.Tensor:
        """Return what stands for a tensor now."""
        if isinstance(reference, Held):
            return self._stand_ins.of(reference.tensor)
        found = (self._given if reference.written else self._results).get(reference.event, [])
        if reference.place >= len(found):
            raise CannotRerun("what it was given was not made again")
        return found[reference.place]

    def _protect(self, event: Event) -> None:
        """Refuse to write where tensors of the training lie: a view of one may have been made again.

        Raises:
            CannotRerun: it would.
        """
        if _memory([self._given[event.number][place] for place in event.writes]) & self._protected:
            raise CannotRerun(OVERWRITES)


def _memory(tensors: Sequence[torch.Tensor]) -> set[int]:
    found = set()
    for tensor in tensors:
        try:
            found.add(tensor.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, nested: no memory of their own
            continue
    return found - {0}


@contextmanager
def _as_in(surroundings: Surroundings) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(surroundings.inference))
        stack.enter_context(torch.set_grad_enabled(surroundings.gradients))
        for kind, enabled, dtype in surroundings.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=surroundings.cache))
        if surroundings.random is not None:
            set_random_states(surroundings.random)
        yield
