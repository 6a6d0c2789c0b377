"""A recorded call as Paddle executes it: function, arguments on a place, and the modes and random state around it.

>>> call = RecordedCalls(trueup.open_capture("runs/cpu")).at(rank=0, seq=4711)
>>> made = rebuild(call, Place("npu", home="cpu"))              # or Place("cpu", home="cpu", wide=True): the float64 truth
>>> outputs = made.execute()                                    # {'output.0': tensor, 'output.written.1': ...}, slots as recorded
>>> backward = rebuild(forward_call, place, grad=True)
>>> backward.execute(); backward.gradients({"grad_output.0": g}, ["grad_input.0"])

A function is looked up in `allowed`. What cannot be made again raises `NotReplayable` with the reason, never something else in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.amp.amp_lists import black_list, white_list
from paddle.base import core, framework

from trueup.foundation.facts.operators import says
from trueup.recording.adapters.paddle import allowed, random_states
from trueup.recording.adapters.paddle.calls import name_of
from trueup.recording.adapters.paddle.replay_arguments import Builder, Place, first_line
from trueup.recording.adapters.paddle.tensors import named_tensors
from trueup.recording.execution.decoding import damaged
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall

LEVELS = ("O1", "O2", "OD")

IN_BYTES = frozenset({"as_strided", "view_dtype"})
"""Operators that are told places in memory in bytes, or read bits as another dtype: in float64 they do something else."""


@dataclass
class Rebuilt:
    """A call ready to be executed, once: what it is given may be written by it."""

    call: RecordedCall
    place: Place
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: dict[str, paddle.Tensor]
    """Tensor arguments by slot, as they are given; memory that the capture has no bytes of holds NaN (integers: 0)."""
    leaves: dict[str, paddle.Tensor]
    """Those that gradients are taken of."""
    grad: bool
    amp: Mapping[str, Any] | None
    """Automatic mixed precision: dtype, level, and what differs from its lists."""
    drawn: list[str]
    """Slots whose elements were drawn to match recorded numbers."""
    unwritten: list[str]
    """Slots that nobody had written before the call."""
    outputs: dict[str, paddle.Tensor] = field(default_factory=dict)
    result: Any = None
    """As the function returned it."""
    random: bool = False
    """Whether it drew random numbers of a generator of the CPU's."""

    def execute(self) -> dict[str, paddle.Tensor]:
        """Execute the call and return what it computed, by the slots in which a capture records it.

        Raises:
            Exception: whatever the function raises.
        """
        generator = random_states.generator_of("cpu")
        with self.modes():
            before = random_states.described(generator)
            self.result = self.function(*self.args, **self.kwargs)
            self.random = random_states.described(generator) != before
        self.outputs = self._named(self.result)
        return self.outputs

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Set the generators, mixed precision and the grad mode as they were when the call was recorded."""
        restore_random(self.call.random, self.place)
        default = paddle.get_default_dtype()
        paddle.set_default_dtype(self.place.dtype(default))  # of quotients of integers
        try:
            with paddle.set_grad_enabled(self.grad), _amp(self.amp):
                yield
        finally:
            paddle.set_default_dtype(default)

    def gradients(self, received: Mapping[str, paddle.Tensor], wanted: Sequence[str]) -> dict[str, paddle.Tensor]:
        """Return the gradients ``grad_input.…`` that the call sends back for ``grad_output.…`` received; after `execute`.

        Raises:
            NotReplayable: an output or input that a gradient belongs to is not there, or carries none.
        """
        ends, given = [], []
        for slot, gradient in received.items():
            output = self.outputs.get(slot.removeprefix("grad_"))
            if output is None or output.stop_gradient:
                raise NotReplayable(f"the result that {slot} belongs to carries no gradient when the call is made alone")
            ends.append(output)
            given.append(gradient if gradient.dtype == output.dtype else gradient.cast(output.dtype))
        missing = [slot for slot in wanted if slot.removeprefix("grad_") not in self.leaves]
        if missing:
            raise NotReplayable(f"{missing[0]} belongs to no argument of the call")
        leaves = [self.leaves[slot.removeprefix("grad_")] for slot in wanted]
        found = paddle.grad(ends, leaves, given, allow_unused=True)
        return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}

    def _named(self, result: Any) -> dict[str, paddle.Tensor]:
        unwritten = tuple(says(self.call.key.op, "unwritten") or ())
        found = {s: t for s, t in named_tensors("output", result) if not s.startswith(unwritten)}
        if isinstance(out := self.kwargs.get("out"), paddle.Tensor):
            found.setdefault("output.out", out)
        for slot, tensor in self.inputs.items():
            if (written := slot.replace("input", "output.written", 1)) in self.call.tensors:
                found[written] = tensor
        return found


def rebuild(call: RecordedCall, place: Place, *, grad: bool = False) -> Rebuilt:
    """Make a recorded call of level api ready to be executed.

    Args:
        call: a forward call. Of a backward call its forward call.
        place: where.
        grad: gradients will be asked for.

    Raises:
        NotReplayable: it cannot be executed again, and why.
        TrueupError: the file that holds its tensors is damaged.
    """
    function = function_of(call)
    if call.invocation is None:
        raise NotReplayable("the capture does not say how it was made")
    if place.wide and name_of(call.key.op) in IN_BYTES:
        raise NotReplayable("it is about bytes, which float64 has others of")
    try:
        return _rebuild(call, place, function, grad)
    except (TypeError, KeyError, IndexError, OverflowError, AttributeError):  # no capture of ours
        return damaged()  # type: ignore[no-any-return]
    except (RuntimeError, ValueError, OSError) as error:  # no memory, among others
        raise NotReplayable(f"its arguments cannot be made on {place.here}: {first_line(error)}") from None


def _rebuild(call: RecordedCall, place: Place, function: Callable[..., Any], grad: bool) -> Rebuilt:
    builder = Builder(call, place, grad=grad)
    invocation = builder.invocation
    args = tuple(builder.value(v) for v in invocation["args"])
    kwargs = {str(name): builder.value(v) for name, v in dict(invocation.get("kwargs") or {}).items()}
    if "out" in invocation:
        kwargs["out"] = builder.out(invocation["out"])
    enabled = bool(invocation.get("grad", False)) or grad
    return Rebuilt(
        call, place, function, args, kwargs, builder.tensors, builder.leaves, enabled,
        None if place.wide else amp_of(invocation), builder.drawn, builder.unwritten,
    )  # fmt: skip


def function_of(call: RecordedCall) -> Callable[..., Any]:
    """Return what a call executes.

    Raises:
        NotReplayable: it is not among what a capture may have executed.
    """
    if call.key.level == "module":
        raise NotReplayable("a Layer is code, which no capture holds; its api calls are executed instead")
    if call.key.phase == "collective":
        raise NotReplayable("a collective needs the other ranks")
    found = allowed.function(call.key.op)
    if found is None:
        if call.key.op.endswith(".apply"):
            raise NotReplayable("a PyLayer is code, which no capture holds; the calls inside it are executed instead")
        raise NotReplayable(f"{call.key.op} is not among the functions that a capture may have executed")
    return found


def amp_of(invocation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return dtype, level and lists of automatic mixed precision; None where it was off."""
    casts, how = invocation.get("autocast"), invocation.get("amp")
    if not (isinstance(casts, dict) and isinstance(how, dict)):
        return None
    dtype = next(iter(casts.values()), None)
    if dtype not in ("float16", "bfloat16") or how.get("level") not in LEVELS:
        damaged()
    return {"dtype": dtype, **how}


@contextmanager
def _amp(how: Mapping[str, Any] | None) -> Iterator[None]:
    """Let Paddle cast as it did; on the CPU it never does."""
    if how is None:
        yield
        return
    tracer = framework._dygraph_tracer()
    dtype, level = how["dtype"], how["level"]
    before = tracer._amp_level, tracer._amp_dtype, tracer._use_promote, tracer._get_amp_op_list()
    lists = [
        {str(name) for name in how.get(key) or ()} | set(names[dtype][level])
        for key, names in (("white", white_list()), ("black", black_list()))
    ]
    try:
        tracer._amp_level, tracer._amp_dtype = getattr(core.AmpLevel, level), dtype
        tracer._use_promote = how.get("promote") is True
        tracer._set_amp_op_list(*lists)
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype, tracer._use_promote = before[:3]
        tracer._set_amp_op_list(*before[3])


def restore_random(random: Mapping[str, bytes], place: Place) -> None:
    """Set the generators to recorded states, those that take them; without one, so that all executions draw alike."""
    if not random:
        paddle.seed(0)
    for kind, state in random.items():
        name, _, number = place.of(kind).partition(":")
        generator = random_states.generator_of(name, int(number) if number.isdigit() else 0)
        if generator is None or not random_states.set_state(generator, state):  # kernels that a device lacks draw on the CPU
            random_states.set_state(random_states.generator_of("cpu"), state)
