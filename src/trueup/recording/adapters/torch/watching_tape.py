"""What a step did outside modules, in order: enough to execute the step once more while its parameters are untouched.

An event is a module that began outside any other, a function outside all modules (the loss), or a backward pass. It refers to what
an earlier event made by number, and holds the other tensors that it was given (the batch) by reference, with their versions: one
that was changed in place since cannot be given again. So the tape costs no memory but that of the batch, a copy of the buffers
and the states of the random number generators.

Besides its arguments an event depends on gradient and inference mode, autocast, and random number generators.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from trueup.foundation.facts.operators import has
from trueup.recording.adapters.torch.functions import Names
from trueup.recording.adapters.torch.random_states import Generators, put
from trueup.recording.adapters.torch.tensors import NamedTensors, named_tensors


@dataclass(slots=True)
class Surroundings:
    """What else an event depends on."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    random: dict[str, Any] | None  # states of the random number generators by name, where the event may draw


def surroundings(devices: dict[str, None], *, draws: bool) -> Surroundings:
    """Return the modes and random states that an event depends on besides its arguments."""
    kinds = {"cpu", *(name.partition(":")[0] for name in devices)} - {"meta"}
    cast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if _casts(kind))
    return Surroundings(
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, torch.is_autocast_cache_enabled(),
        random_states(devices) if draws else None,
    )  # fmt: skip


def _casts(kind: str) -> bool:
    return bool(torch.amp.is_autocast_available(kind))


def random_states(devices: dict[str, None]) -> dict[str, Any]:
    """Return where every generator stands that a training draws from: Python's, NumPy's, PyTorch's on each device."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": Generators(devices).state()}
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put the generators back to what `random_states` returned."""
    random.setstate(states["python"])
    put(states["torch"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])


MOST_EVENTS = 1024
"""Events of a step; with more, the tape begins anew and earlier calls cannot be executed again."""
MOST_BYTES = 256 << 20
"""Held in tensors that the training itself may have let go."""


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an event made (or, ``written``, was given and wrote to)."""

    event: int
    place: int  # position among the tensors of its result, or of its arguments
    written: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor from elsewhere."""

    tensor: torch.Tensor
    version: int | None

    @property
    def changed(self) -> bool:
        """Whether it was written since."""
        return self.version is not None and self.tensor._version != self.version


@dataclass(slots=True)
class Event:
    """Something that executed outside modules."""

    kind: str
    """``module``, ``function`` or ``backward``."""
    name: str
    run: Any
    args: Any
    kwargs: Any
    first: int
    """Number of the first call that it makes."""
    surroundings: Surroundings
    number: int
    """Its place on the tape."""
    last: int = -1
    """Number of the first call after it; -1 while it runs."""
    writes: list[int] = field(default_factory=list)
    """Positions of the tensors among its arguments to which it wrote."""
    opaque: bool = False
    """Whether it cannot be executed again: it wrote to a tensor that no event made."""
    buffers: list[tuple[Any, str, torch.Tensor]] = field(default_factory=list)
    """Of a module: the dict that holds a buffer, its name there, and what it was before the event."""
    training: bool = True

    def needs(self) -> list[Made]:
        """Return the tensors that earlier events gave it."""
        found: list[Made] = []
        mapped((self.args, self.kwargs), lambda x: found.append(x) if isinstance(x, Made) else None)
        return found

    def holds(self) -> list[Held]:
        """Return the tensors that it was given from elsewhere."""
        found: list[Held] = []
        mapped((self.args, self.kwargs), lambda x: found.append(x) if isinstance(x, Held) else None)
        return found


class Tape:
    """The events of the present step; ``next_seq`` gives the next call's number, ``devices`` are those that tensors were seen
    on."""

    def __init__(self, next_seq: Callable[[], int], devices: dict[str, None]) -> None:
        self._next_seq, self._devices = next_seq, devices
        self.events: list[Event] = []
        self.cut: str | None = None  # why earlier events of the step are not there
        self.updates: list[tuple[int, weakref.ref[torch.optim.Optimizer]]] = []
        """Optimizers that stepped, each with the number of events before it."""
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Made]] = {}
        self._held: dict[int, int] = {}
        self._buffers: weakref.WeakKeyDictionary[torch.nn.Module, list[_Buffer]] = weakref.WeakKeyDictionary()

    def clear(self, cut: str | None = None) -> None:
        """Forget the events."""
        self.events, self.cut = [], cut
        self._made.clear()
        self._held.clear()
        self.updates.clear()

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to change its parameters."""
        self.updates.append((len(self.events), weakref.ref(optimizer)))

    # ---------------------------------------------------------------- what happens
    def module(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Event:
        """Begin the event of a module that runs outside any other."""
        event = self._begin("module", type(module).__name__, module, args, kwargs, draws=True)
        event.buffers = self._buffers_of(module)
        event.training = module.training
        return event

    def function(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Event:
        """Begin the event of a function outside modules."""
        return self._begin("function", name, function, args, kwargs, draws=has(name, "may-draw"))

    def backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Event:
        """Begin the event of a backward pass."""
        return self._begin("backward", "backward", None, args, kwargs, draws=False)

    def end(self, event: Event, given: NamedTensors, versions: list[int | None], result: Any) -> None:
        """End an event: ``given`` are the tensors among its arguments, ``versions`` theirs before it ran."""
        event.last, number = self._next_seq(), event.number
        if number >= len(self.events) or self.events[number] is not event:
            return  # the tape began anew meanwhile
        for place, ((_, tensor), before) in enumerate(zip(given, versions, strict=True)):
            if before is not None and tensor._version != before:
                event.writes.append(place)
                if self._known(tensor) is None:
                    event.opaque = True
                else:
                    self._made[id(tensor)] = weakref.ref(tensor), Made(number, place, written=True)
        if event.opaque:
            return
        for place, (_, tensor) in enumerate(named_tensors("output", result)):
            self._made[id(tensor)] = weakref.ref(tensor), Made(number, place)

    # ---------------------------------------------------------------- inside
    def _begin(self, kind: str, name: str, run: Any, args: Any, kwargs: Any, *, draws: bool) -> Event:
        if len(self.events) >= MOST_EVENTS:
            self.clear(f"more than {MOST_EVENTS} functions and modules ran outside modules in this step")
        event = Event(
            kind, name, run, mapped(args, self._refer), mapped(kwargs, self._refer), self._next_seq(),
            surroundings(self._devices, draws=draws), len(self.events),
        )  # fmt: skip
        if sum(self._held.values()) > MOST_BYTES:
            self.clear(f"the step was given more than {MOST_BYTES >> 20} MB from outside the model, which are not held")
            event.args, event.kwargs, event.number = mapped(args, self._refer), mapped(kwargs, self._refer), 0
        self.events.append(event)
        return event

    def _known(self, tensor: torch.Tensor) -> Made | None:
        found = self._made.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def _refer(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = self._known(value)
        if made is not None:
            return made
        if not (value.is_leaf and value.requires_grad):  # parameters live anyway
            self._held[id(value)] = _bytes(value)
        return Held(value, version_of(value))

    def _buffers_of(self, module: torch.nn.Module) -> list[tuple[Any, str, torch.Tensor]]:
        known = self._buffers.get(module)
        if known is None:
            places = [(m._buffers, name) for m in module.modules() for name, b in m._buffers.items() if b is not None]
            known = self._buffers[module] = [_Buffer(owner, name) for owner, name in places]
        return [(one.owner, one.name, copy) for one in known if (copy := one.copy()) is not None]


class _Buffer:
    """A buffer of a module, copied again only where it may have been written since."""

    __slots__ = ("_copy", "_version", "name", "owner")

    def __init__(self, owner: dict[str, Any], name: str) -> None:
        self.owner, self.name = owner, name
        self._copy: torch.Tensor | None = None
        self._version: tuple[int, int | None] = 0, None

    def copy(self) -> torch.Tensor | None:
        buffer = self.owner.get(self.name)
        if buffer is None:
            return None
        version = id(buffer), version_of(buffer)
        # Normalisation layers write their statistics without a trace in the version; they are small.
        if self._copy is None or version != self._version or self.name.startswith("running_"):
            self._copy, self._version = buffer.detach().clone(), version
        return self._copy


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the version of a tensor; None where it tracks none (inference)."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _bytes(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse, nested
        return int(tensor.numel() * tensor.element_size()) if not tensor.is_nested else 0


def mapped(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return nested lists, tuples and dicts with ``change`` applied to each tensor, or reference to one, that they hold."""
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in (Made, Held):
        return change(value)
    if depth > 8:
        return value
    if kind is list or kind is tuple:
        return kind([mapped(item, change, depth + 1) for item in value])
    if kind is dict:
        return {name: mapped(item, change, depth + 1) for name, item in value.items()}
    if kind in _pytree.SUPPORTED_NODES:  # named tuples, ModelOutput and whatever else was registered
        leaves, shape = _pytree.tree_flatten(value)
        return _pytree.tree_unflatten([mapped(leaf, change, depth + 1) for leaf in leaves], shape)
    return value


# ---------------------------------------------------------------- functions outside modules
Follow = Callable[[str, Callable[[], Event], Any, Any, Callable[[], Any]], Any]
"""``follow(name, begin, args, kwargs, run)`` runs something between the begin and the end of its event."""


class TapeMode(TorchFunctionMode):
    """Puts functions outside modules on the tape, where ``sees()``; it is off inside modules, and while an optimizer steps."""

    def __init__(self, sees: Callable[[], bool], tape: Tape, follow: Follow) -> None:
        super().__init__()
        self._sees, self._tape, self._follow = sees, tape, follow
        self._names = Names()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = self._names.of(func)
        if name is None or name == "torch.Tensor.backward" or not self._sees():
            return func(*args, **kwargs)
        begin = partial(self._tape.function, name, func, args, kwargs)
        return self._follow(name, begin, args, kwargs, partial(func, *args, **kwargs))
