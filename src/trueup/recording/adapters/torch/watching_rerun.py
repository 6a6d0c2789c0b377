"""Executing part of a step once more, with the calls of interest recorded as tensors, and nothing of the training touched.

What was on the tape runs again in its order, as far as the calls of interest need it, under a capture of their own; the watched
session is idle meanwhile. The calls get the numbers that they had, so that rows of both can be laid side by side.

The calls of interest are kept with the bytes of their tensors. Parameters and buffers of a module have stand-ins while it is
executed once more, and all its attributes are put back afterwards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from trueup.analysis.watch.saving import CannotRerun, Rerun
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.session import Session
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.adapters.torch.watching_tape import (
    Event,
    Held,
    Made,
    Surroundings,
    Tape,
    mapped,
    random_states,
    set_random_states,
)
from trueup.recording.recorder import Call, CaptureOptions, Statistics
from trueup.recording.recorder.recorder import Keeper
from trueup.recording.recorder.rows import Kind

PAYLOAD_BYTES = 1 << 30
"""Copied of the calls of interest, at most."""

Key = tuple[str, str, str, str]
"""Level, phase, scope and operator."""


class _Numbers:
    """Numbers calls from ``value`` on."""

    def __init__(self) -> None:
        self.value = 0

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> int:
        self.value += 1
        return self.value - 1


class Copier(Keeper):
    """Keeps the rows of a few kinds of calls with the bytes of their tensors, under the numbers that the step gave them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers = _Numbers()
        self._seqs = self.numbers  # type: ignore[assignment]
        self.wanted: set[Key] = set()
        self._start: Callable[[Key], int] = lambda _: 0
        self._room = PAYLOAD_BYTES

    def begin_event(self, first: int, start: Callable[[Key], int]) -> None:
        """Number the calls that follow from ``first`` on, and those of each kind from what ``start`` says."""
        self.numbers.value, self._start = first, start
        for key, kind in self._kinds.items():
            kind.ordinals = count(start(key))

    def keep(self, stats: Statistics, within: Any = None) -> None:  # noqa: ARG002 - each buffer is kept whole
        """Copy the bytes, as long as there is room."""
        size = getattr(stats.data, "nbytes", 0)
        if size > self._room:
            stats.data = None
            return
        self._room -= size
        super().keep(stats)

    def _new_kind(self, level: str, phase: str, scope: str, op: str) -> Kind:
        key = level, phase, scope, op
        known = key in self._kinds
        kind = super()._new_kind(level, phase, scope, op)
        if not known:
            kind.ordinals = count(self._start(key))
        return kind

    def selects(self, level: str, phase: str, scope: str, op: str) -> bool:
        return (level, phase, scope, op) in self.wanted


class CopyingSession(Session):
    """A capture inside the watched one; it follows no optimizer and no collective."""

    recorder_type = Copier

    def __init__(self, outer: Session, wanted: set[Key]) -> None:
        options = CaptureOptions.of(level=outer.options.levels, detail="tensor", phase=outer.options.phases)
        wholes = outer.scopes.wholes
        super().__init__(Path(outer.recorder.directory), options, {}, outer.scopes)
        self.built.close()  # the watched session knows what was built
        outer.scopes.wholes = wholes
        assert isinstance(self.recorder, Copier)
        self.copier = self.recorder
        self.copier.wanted = wanted

    def enter_model(self, module: torch.nn.Module) -> None:
        """Nothing ends a step here."""

    @contextmanager
    def on(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        calls = self._always[0]  # of modules; the others are a GradScaler's
        calls.install()
        self.threads.state.observed = True
        self.update_active()
        try:
            yield
        finally:
            self.active = False
            self._switch(on=False)
            calls.remove()


SHARDED = "its parameters are sharded over ranks, which would all have to execute it again"


class StandIns:
    """A tensor of the same memory for each tensor that requires a gradient: neither ``.grad`` nor hooks of the original are met."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor; one without gradient stands for itself."""
        if not tensor.requires_grad:
            return tensor
        known = self._of.get(id(tensor))
        if known is not None:
            return known[1]
        alias = tensor.detach()
        alias = torch.nn.Parameter(alias) if isinstance(tensor, torch.nn.Parameter) else alias.requires_grad_()
        alias.register_post_accumulate_grad_hook(_let_go)
        self._of[id(tensor)] = tensor, alias  # held, it keeps its address
        return alias


def _let_go(tensor: torch.Tensor) -> None:
    """Free the gradient of a stand-in, which nobody will read, as soon as it is there."""
    tensor.grad = None


def innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside wrappers that communicate, or compile; raise `CannotRerun` where one rank alone cannot
    execute it."""
    while True:
        name = type(module).__name__
        if name in ("DistributedDataParallel", "OptimizedModule"):
            module = module.module if name.startswith("Dist") else module._orig_mod
        elif name == "DataParallel" and len(module.device_ids) <= 1:
            module = module.module
        elif name.startswith(("DataParallel", "FullySharded", "FSDP")) or any(map(_is_sharded, module.parameters())):
            raise CannotRerun(SHARDED)
        else:
            return module


def moved(module: torch.nn.Module, value: Any) -> Any:
    """Return arguments on the device to which DistributedDataParallel brings them."""
    devices = getattr(module, "device_ids", None)
    if not devices or type(module).__name__ != "DistributedDataParallel":
        return value
    kind = torch.device(getattr(module, "device_type", "cuda"), devices[0])
    return mapped(value, lambda tensor: tensor.to(kind))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_local_tensor") or hasattr(parameter, "ds_id")  # DTensor; DeepSpeed ZeRO 3


@contextmanager
def swapped(module: torch.nn.Module, stand_ins: StandIns) -> Iterator[None]:
    """Give a module stand-ins for parameters, wherever its modules hold them, for the time of a block, which is to last until the
    backward passes are over (checkpointed functions run again in them); then put all its attributes back, buffers and modes
    included."""
    saved = [_Saved(one) for one in module.modules()]
    try:
        for one in saved:
            one.stand_in(stand_ins)
        yield
    finally:
        for one in saved:
            one.put_back()


def begin_as(module: torch.nn.Module, buffers: Sequence[tuple[dict[str, Any], str, torch.Tensor]], *, training: bool) -> None:
    """Bring a swapped root to where it was before an event; ``buffers``: the dict that holds each, its name there, what it
    was."""
    for owner, name, tensor in buffers:
        owner[name] = tensor.clone()
    if module.training is not training:
        module.train(training)


class _Saved:
    """The attributes of one module, and the content of those that are plain containers."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._contents = [(value, value.copy()) for value in self._attributes.values() if isinstance(value, (list, dict, set))]
        self._tensors = [
            (value, value._version, value.detach().clone())
            for name, value in self._attributes.items()
            if isinstance(value, torch.Tensor) and not value.requires_grad and not value.is_inference()
        ]

    def stand_in(self, stand_ins: StandIns) -> None:
        held = self._module.__dict__
        held["_parameters"] = {name: None if p is None else stand_ins.of(p) for name, p in self._module._parameters.items()}
        for name, value in self._attributes.items():  # the flat weights of recurrent modules
            if isinstance(value, (list, tuple)) and any(isinstance(item, torch.nn.Parameter) for item in value):
                held[name] = [stand_ins.of(item) if isinstance(item, torch.nn.Parameter) else item for item in value]
            elif isinstance(value, torch.nn.Parameter):
                held[name] = stand_ins.of(value)

    def put_back(self) -> None:
        held = self._module.__dict__
        held.clear()
        held.update(self._attributes)
        for value, before in self._contents:
            if isinstance(value, list):
                value[:] = before
            else:
                value.clear()
                value.update(before)
        for tensor, version, before in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)


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
    """Execute what is needed to see ``calls`` of the present step, of which rows are wanted, once more; nothing runs in the
    session at present. ``numbered`` are the calls whose ordinals are known. Raises CannotRerun: nothing was executed, because it
    cannot be, or not without a risk for the training."""
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
    """Return the events to execute for the calls that allow it, and why another does not; raise `CannotRerun` where none does."""
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
                return f"it raised {type(error).__name__}: {first_line(error)}"
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
        """Return the tensor that stands for another now."""
        if isinstance(reference, Held):
            return self._stand_ins.of(reference.tensor)
        found = (self._given if reference.written else self._results).get(reference.event, [])
        if reference.place >= len(found):
            raise CannotRerun("what it was given was not made again")
        return found[reference.place]

    def _protect(self, event: Event) -> None:
        """Raise `CannotRerun` for a write where tensors of the training lie: a view of one may have been made again."""
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
