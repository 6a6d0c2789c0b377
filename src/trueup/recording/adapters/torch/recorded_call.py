"""A recorded call as PyTorch executes it: function, arguments on a device, and the modes and random state around it.

>>> call = RecordedCalls(trueup.open_capture("runs/cpu")).at(rank=0, seq=4711)
>>> made = rebuild(call, Place("npu", home="cpu"))              # or Place("cpu", home="cpu", wide=True): the float64 truth
>>> outputs = made.execute()                                    # {'output.0': tensor, 'output.written.1': ...}, slots as recorded
>>> backward = rebuild(forward_call, place, grad=True)
>>> backward.execute(); backward.gradients({"grad_output.0": g}, ["grad_input.0"])

A function or operator is looked up in `allowed`; arguments are numbers, names of dtypes and the like, and tensors that are filled
with the recorded bytes, laid out in memory as they were (strides, alignment, arguments that share memory). What cannot be made
again raises `NotReplayable` with the reason, never something else in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trueup.recording.adapters.torch import allowed, transforms
from trueup.recording.adapters.torch.dispatch import Operator, _outputs
from trueup.recording.adapters.torch.functions import BUFFERS_WRITTEN
from trueup.recording.adapters.torch.replay_arguments import Builder, first_line
from trueup.recording.adapters.torch.replay_arguments import Place as Place
from trueup.recording.adapters.torch.replay_arguments import as_tensor as as_tensor
from trueup.recording.adapters.torch.replay_arguments import load as load
from trueup.recording.adapters.torch.replay_arguments import writes as writes
from trueup.recording.adapters.torch.replay_guessing import assumed as assumed
from trueup.recording.adapters.torch.replay_memory import NotReplayable as NotReplayable
from trueup.recording.adapters.torch.replay_memory import bits as bits
from trueup.recording.adapters.torch.replay_memory import constant, damaged
from trueup.recording.adapters.torch.replay_memory import fill as fill
from trueup.recording.adapters.torch.replay_memory import from_numpy as from_numpy
from trueup.recording.adapters.torch.replay_memory import to_numpy as to_numpy
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.execution.recorded import RecordedCall


@dataclass
class Rebuilt:
    """A call ready to be executed, once: what it is given may be written by it."""

    call: RecordedCall
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    """Tensor arguments by slot, as they are given; memory that the capture has no bytes of holds NaN (integers: 0)."""
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that gradients are taken of."""
    grad: bool = False
    autocast: dict[str, str] = field(default_factory=dict)
    caches: bool = True
    """Whether autocast casts a weight once for all its uses in the call, so that their gradients add up in the narrow dtype."""
    random: Mapping[str, bytes] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    """Slots whose elements were drawn to match recorded numbers."""
    unwritten: list[str] = field(default_factory=list)
    """Slots that nobody had written before the call."""
    transforms: Sequence[transforms.Transform] = ()
    """Those of `torch.func` that it was made in."""
    samples: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Slots with all samples of a vmap: where those lie, by the level of the vmap."""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    inner: set[str] = field(default_factory=set)
    """Gradients that the call itself sends to one of its results, beside what it is given."""

    def execute(self) -> dict[str, torch.Tensor]:
        """Execute the call and return what it computed, by the slots in which a capture records it.

        Raises:
            Exception: whatever the function raises.
        """
        with self.modes():
            if self.transforms:
                self._execute_inside()
            else:
                self.outputs = self._named(self.function(*self.args, **self.kwargs))
        return self.outputs

    def _execute_inside(self) -> None:
        """Execute the call inside the `torch.func` transforms that it was made in."""
        slots = list(self.samples)

        def call(given: list[torch.Tensor]) -> None:
            inner = {id(self.inputs[slot]): tensor for slot, tensor in zip(slots, given, strict=True)}
            args, kwargs = tree_map_only(torch.Tensor, lambda t: inner.get(id(t), t), (self.args, self.kwargs))
            result = self.function(*args, **kwargs)
            self.outputs = self._named(tree_map_only(torch.Tensor, transforms.below, result))

        transforms.execute(self.transforms, [self.inputs[slot] for slot in slots], list(self.samples.values()), call)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the generators, autocast and the grad mode as they were when the call was recorded."""
        if self.random:
            restore_random(self.random, self.place)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast.items():
                where = self.place.of(kind).type
                stack.enter_context(torch.autocast(where, dtype=constant(torch.dtype, dtype), cache_enabled=self.caches))
            yield

    def gradients(self, received: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the gradients ``grad_input.…`` that the call sends back for ``grad_output.…`` received; after `execute`.

        Raises:
            NotReplayable: an output or input that a gradient belongs to is not there, or carries none.
        """
        ends, given = [], []
        for slot, gradient in received.items():
            output = self.outputs.get(slot.removeprefix("grad_"))
            if output is None or not output.requires_grad:
                raise NotReplayable(f"the result that {slot} belongs to carries no gradient when the call is made alone")
            gradient = gradient.to(output.dtype)
            ends.append(output)
            given.append(gradient)
            # What was recorded is all that arrived there, also from another result of the call that was computed from this one
            # (the cell state of `lstm_cell`): it takes the place of what arrives now.
            output.register_hook(partial(self._instead, slot, gradient))
        missing = [slot for slot in wanted if slot.removeprefix("grad_") not in self.leaves]
        if missing:
            raise NotReplayable(f"{missing[0]} belongs to no argument of the call")
        leaves = [self.leaves[slot.removeprefix("grad_")] for slot in wanted]
        found = torch.autograd.grad(ends, leaves, given, allow_unused=True)
        return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _instead(self, slot: str, recorded: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        if recorded.shape != arrived.shape:
            return arrived
        if not torch.equal(recorded, arrived):
            self.inner.add(slot)
        return recorded

    def _named(self, result: Any) -> dict[str, torch.Tensor]:
        if self.call.key.level == "aten" and getattr(self.function, "_schema", None) is not None:
            pairs, _ = _outputs(Operator.of(self.function), self.args, self.kwargs, result)
            return dict(pairs)
        found = dict(named_tensors("output", result))
        found |= {slot.replace("input", "output.written", 1): t for slot, t in self.inputs.items()}
        for slot, (position, keyword) in BUFFERS_WRITTEN.get(self.call.key.op, {}).items():
            tensor = self.kwargs.get(keyword, self.args[position] if len(self.args) > position else None)
            if isinstance(tensor, torch.Tensor):
                found[f"output.{slot}"] = tensor
        if "out" in self.kwargs:
            found |= dict(named_tensors("output", (), {"out": self.kwargs["out"]}))
        return {slot: t for slot, t in found.items() if slot in self.call.tensors or not slot.startswith("output.written")}


def rebuild(
    call: RecordedCall, place: Place, *, grad: bool = False, given: Mapping[str, torch.Tensor] | None = None
) -> Rebuilt:  # fmt: skip
    """Make a recorded call of level api or aten ready to be executed.

    Args:
        call: a forward call, or any call of level aten. Of a backward call of level api, its forward call.
        place: where.
        grad: gradients will be asked for.
        given: tensors on the place to take for what was recorded, by slot: results of calls that were executed before.

    Raises:
        NotReplayable: it cannot be executed again, and why.
        TrueupError: the file that holds its tensors is damaged.
    """
    function = _function(call)
    try:
        return _rebuild(call, place, function, grad, given)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError):  # no capture of ours
        return damaged()  # type: ignore[no-any-return]
    except RuntimeError as error:  # no memory, among others
        raise NotReplayable(f"its arguments cannot be made on {place.device}: {first_line(error)}") from None


def _rebuild(
    call: RecordedCall, place: Place, function: Callable[..., Any], grad: bool, given: Mapping[str, torch.Tensor] | None
) -> Rebuilt:
    builder = Builder(call, place, grad, given)
    invocation = call.invocation if call.invocation is not None else assumed(call)
    args = tuple(builder.value(v) for v in invocation["args"])
    kwargs = {str(name): builder.value(v) for name, v in dict(invocation.get("kwargs") or {}).items()}
    if "out" in invocation:
        kwargs["out"] = builder.out(invocation["out"])
    enabled = bool(invocation.get("grad", False)) or grad
    around = invocation.get("transforms") or []
    if not transforms.is_known(around):
        damaged()
    if grad and around:
        raise NotReplayable("it is the backward of a call inside a torch.func transform; its aten calls are executed instead")
    autocast = {} if place.wide else {str(k): str(v) for k, v in dict(invocation.get("autocast") or {}).items()}
    return Rebuilt(
        call, place, function, args, kwargs, builder.tensors, builder.leaves, enabled, autocast,
        invocation.get("autocast_cache") is not False, call.random, builder.drawn, builder.unwritten, around, builder.samples,
    )  # fmt: skip


def _function(call: RecordedCall) -> Callable[..., Any]:
    op, level = call.key.op, call.key.level
    if level == "module":
        raise NotReplayable("a module is code, which no capture holds; its api and aten calls are executed instead")
    if call.key.phase == "collective":
        raise NotReplayable("a collective needs the other ranks")
    if level == "aten":
        overload = (call.invocation or {}).get("overload")
        found = allowed.operator(op, overload if isinstance(overload, str) else None)
    else:
        found = allowed.function(op)
    if found is not None and op in TANGENTS:
        raise NotReplayable("it is about tangents of forward-mode differentiation, which no capture holds")
    if found is None:
        raise NotReplayable(f"{op} is not among the functions that a capture may have executed")
    return found


TANGENTS = frozenset({"torch._make_dual", "torch._unpack_dual", "aten::_make_dual", "aten::_unpack_dual"})


def restore_random(random: Mapping[str, bytes], place: Place) -> None:
    """Set the generators to recorded states, those that take them: a GPU's cannot go on from a CPU's."""
    for kind, state in random.items():
        where = place.of(kind).type
        tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        try:
            if where == "cpu":
                torch.set_rng_state(tensor)
            else:
                torch.get_device_module(where).set_rng_state(tensor)
        except (RuntimeError, TypeError, AttributeError):
            continue
