"""Teacher forcing: each module of the live run computes with the baseline's recorded inputs, and its backward with its gradients.

Values are put in place of the module's own, weights included, once a step; the graph stays: in backward a gradient passes to where
the own input came from as if that had been used. The gradient that a module's backward starts from is replaced by the baseline's as
well. So every module, forward and backward, shows its own error and hands none on.

Teacher forcing call by call: each function, or operator, of the live run computes with the baseline's recorded inputs. The values
are written into the tensors that the call is given, past the version counter. So the call gets the very tensors that the program
handed it: the autograd graph, views, aliases and writes in place are the program's own, a gradient passes on as if nothing had
happened, and what autograd has saved holds the baseline's numbers too, as a backward without accumulated error needs them.

At level ``api`` the gradient that a call's backward starts from is replaced as well, by a hook at its result; at level ``aten``
backward's and the optimizer's operators are calls like any other. Random operators begin at the baseline's state of the
generators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.context import SessionCore
from trueup.recording.adapters.torch.recorded_call import Place, from_numpy, restore_random
from trueup.recording.adapters.torch.tensors import NamedTensors, is_plain, mapped, named_tensors
from trueup.recording.engine.replacing import Around, Replacement
from trueup.recording.execution.golden_inputs import GoldenInputs, Kept, Key
from trueup.recording.recorder import Call

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.context import ThreadState

MARK = "inputs were forced"
"""Start of the note that a forced capture bears; a comparison says it too."""


class _Forced(torch.autograd.Function):
    """Another value, the same place in the graph."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG004 - the interface
        return value[0]  # in a list, for an input that is returned would be a view, which nobody may write in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


def forced(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return another value that stands where a tensor stands in the graph."""
    return _Forced.apply(own, [value]) if own.requires_grad and torch.is_grad_enabled() else value


class _ForcedGradient(torch.autograd.Function):
    """The same value; in backward another gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, gradient: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        ctx.gradient = gradient
        return own.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        forced = ctx.gradient()
        return (gradient if forced is None else forced), None


class Forcing:
    """Replaces what modules are given, while a capture runs."""

    def __init__(self, session: SessionCore, golden: GoldenInputs) -> None:
        self._session = session
        self._golden = golden
        self._ordinals: Counter[tuple[str, str, str]] = Counter()
        self._step: int | None = None
        self._set: set[int] = set()  # parameters that have the baseline's values in this step, by id
        self.forced = self.gradients = 0
        self.unmatched: Counter[str] = Counter()  # what kept its own inputs, by why
        self._first: dict[str, str] = {}

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the calls that are forced."""
        return self._golden.levels

    def give(self, call: Call, inputs: NamedTensors) -> None:
        """Hear that a single call begins."""

    def watch(self, call: Call, outputs: NamedTensors) -> None:
        """Hear what a function returned."""

    def replacements(self) -> list[Replacement]:
        """Return what goes around the module calls of the session; it must be installed after that."""
        return [Around(torch.nn.Module, "__call__", self._call)]

    def _call(self, original: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        state = session.threads.state
        if not state.modules and not state.busy:
            session.enter_model(module)  # the step that is due ends before its calls are numbered
        if not session.active or state.busy or not session.sees():
            return original(module, *args, **kwargs)
        kept: tuple[Key, Kept] | None = None
        with session.observing(state, "the baseline's inputs"):
            kept = self._find(module, state)
            if kept is not None:
                self._set_parameters(module, *kept)
                args, kwargs = self._given(*kept, args, kwargs)
        result = original(module, *args, **kwargs)
        if kept is not None and session.active and torch.is_grad_enabled():
            with session.observing(state, "the baseline's gradients"):
                result = self._returned(*kept, result)
        return result

    def finish(self) -> None:
        """Note how many calls were forced, and why others were not."""
        calls, lender = f"{self.forced:,} {self._golden.level} calls", self._golden.path
        note = f"{MARK}: {calls} computed with the inputs of {lender}, {self.gradients:,} gradients are its"
        if not self.forced:
            note = f"{MARK} nowhere: no {self._golden.level} call has a counterpart in {self._golden.path}"
        self._session.recorder.note(note)
        for why, count in self.unmatched.most_common(8):
            self._session.recorder.note(f"own inputs were kept in {count:,} calls: {why}; the first is {self._first[why]}")

    # ---------------------------------------------------------------- inside
    def _find(self, module: torch.nn.Module, state: ThreadState) -> tuple[Key, Kept] | None:
        session = self._session
        step = session.recorder.step
        if step != self._step:
            self._step = step
            self._ordinals.clear()
            self._set.clear()
        parent = state.running[-1] if state.running else None
        scope, name = session.scopes.path(module, parent), type(module).__name__
        phase = _phase(state)
        if phase is None:
            return None
        ordinal = self._ordinals[phase, scope, name]
        self._ordinals[phase, scope, name] += 1
        key = phase, scope, name, ordinal
        found = self._golden.step(session.rank or 0, step).get(key)
        if found is None:
            self._keep("the baseline has no such call" if self._golden.holds(step) else "the baseline has no such step", key)
            return None
        return key, found

    def _set_parameters(self, module: torch.nn.Module, key: Key, kept: Kept) -> None:
        """Give a module the baseline's weights, once a step: what a wrong gradient made of them is no error of this step."""
        for name, parameter in module.named_parameters(recurse=False):
            row = kept.inputs.get(f"param.{name}")
            if row is None or id(parameter) in self._set:
                continue
            self._set.add(id(parameter))
            value = self._value(key, row, parameter)
            if value is not None:
                with torch.no_grad():
                    parameter.copy_(value)
                self._session.buffers.written(parameter)

    def _given(self, key: Key, kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed: dict[int, torch.Tensor] = {}
        for slot, tensor in named_tensors("input", args, kwargs):
            row = kept.inputs.get(slot)
            if row is None:
                self._keep("an input that the baseline's call lacks", key)
                continue
            value = self._value(key, row, tensor)
            if value is not None:
                changed[id(tensor)] = forced(tensor, value)
        self.forced += bool(changed)
        return _replaced(args, changed), _replaced(kwargs, changed)

    def _returned(self, key: Key, kept: Kept, result: Any) -> Any:
        changed: dict[int, torch.Tensor] = {}
        for slot, tensor in named_tensors("output", result):
            row = kept.gradients.get(slot.replace("output", "grad_output", 1))
            if row is not None and tensor.requires_grad and tensor.is_floating_point():
                changed[id(tensor)] = _ForcedGradient.apply(tensor, self._gradient(key, row, tensor))
        return _replaced(result, changed)

    def _gradient(self, key: Key, row: dict[str, Any], like: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        shape, dtype, device, session = like.shape, like.dtype, like.device, self._session

        def gradient() -> torch.Tensor | None:
            found = None
            if session.active:
                with session.observing(session.threads.state, "the baseline's gradients"):
                    found = self._tensor(key, row, shape, dtype, device)
                    self.gradients += found is not None
            return found

        return gradient

    def _value(self, key: Key, row: dict[str, Any], own: torch.Tensor) -> torch.Tensor | None:
        if not is_plain(own):
            self._keep("a tensor that is no plain array", key)
            return None
        return self._tensor(key, row, own.shape, own.dtype, own.device)

    def _tensor(self, key: Key, row: dict[str, Any], shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        if list(row["shape"] or ()) != list(shape):
            self._keep(f"another shape than the baseline's {row['slot'].partition('.')[0]}", key)
            return None
        try:
            array = self._golden.array(self._session.rank or 0, row)
        except TrueupError as error:
            self._keep(first_line(error, 120), key)
            return None
        with torch.no_grad():
            return from_numpy(array).clone().to(dtype).to(device)  # memory of its own: a view may not be written in place

    def _keep(self, why: str, key: Key) -> None:
        self.unmatched[why] += 1
        phase, scope, name, ordinal = key
        self._first.setdefault(why, f"{scope or name}, {phase}, step {self._step}, call {ordinal}")


def _phase(state: ThreadState) -> str | None:
    """Name the phase of a module call as the capture does; None: outside what is forced (inside a function's own backward)."""
    if state.contexts:
        return state.contexts[-1].call.phase
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    return "recompute" if torch.is_grad_enabled() else None


def _replaced(value: Any, changed: dict[int, torch.Tensor]) -> Any:
    """Return a structure with some of its tensors replaced."""
    return mapped(value, lambda tensor: changed.get(id(tensor), tensor))


def forcing(session: SessionCore, baseline: str, level: str | None) -> Forcing:
    """Return what forces the modules of a session, or its single calls; raise `TrueupError` where the baseline cannot lend its
    inputs."""
    golden = GoldenInputs(baseline, level)
    return Forcing(session, golden) if golden.level == "module" else CallForcing(session, golden)


@lru_cache(maxsize=4096)
def _draws(op: str) -> bool:
    """Tell whether an operator draws random numbers."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten::"), None) if op.startswith("aten::") else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in overloads)


class CallForcing(Forcing):
    """Writes the baseline's values into what calls of a level are given; where those are operators, the functions around, too."""

    def __init__(self, session: SessionCore, golden: GoldenInputs) -> None:
        super().__init__(session, golden)
        self._lenders = {level: golden if level == golden.level else GoldenInputs(golden.path, level) for level in golden.levels}
        self._functions: dict[int, Key] = {}  # functions of this step by execution number
        self._counts: Counter[int | None] = Counter()  # operators so far of each function
        self._parted: set[int] = set()  # functions that executed another operator than in the baseline

    def replacements(self) -> list[Replacement]:
        """Return nothing: calls are met where they are recorded."""
        return []

    def give(self, call: Call, inputs: NamedTensors) -> None:
        """Write the values into a call's inputs, which it is about to read."""
        found = self._counterpart(call)
        if call.kind.level == "api":
            self._functions[call.seq] = call.kind.phase, call.kind.scope, call.kind.op, call.ordinal
        elif not self._lines_up(call, None if found is None else found[1]):
            if found is not None:
                self._keep("the function around it executes other operators than in the baseline", found[0])
            return
        if found is None:
            return
        key, kept = found
        if kept.random and (call.kind.level == "api" or _draws(call.kind.op)):
            kinds = [t.device.type for _, t in inputs if t.device.type != "cpu"]
            restore_random(kept.random, Place(kinds[0] if kinds else "cpu", self._golden.home))
        done = False
        for slot, tensor in inputs:
            row = kept.inputs.get(slot)
            if row is None:
                self._keep("an input that the baseline's call lacks", key)
            elif (value := self._value(key, row, tensor)) is not None:
                done |= self._write(key, tensor, value)
        self.forced += done and call.kind.level == self._golden.level

    def _lines_up(self, call: Call, kept: Kept | None) -> bool:
        """Tell whether an operator is the same one in the same function: two devices may take a function apart otherwise."""
        parent = call.parent
        number = self._counts[parent]
        self._counts[parent] += 1
        around = call.forward_seq if call.kind.phase == "backward" else parent
        owner = None if around is None else self._functions.get(around)
        if kept is None or parent in self._parted or kept.place != (owner, number):
            if parent is not None:
                self._parted.add(parent)
            return False
        return True

    def watch(self, call: Call, outputs: NamedTensors) -> None:
        """Let the backward of a function start from the baseline's gradients."""
        found = self._counterpart(call, said=True)
        if found is None or not torch.is_grad_enabled():
            return
        key, kept = found
        for slot, tensor in outputs:
            row = kept.gradients.get(slot.replace("output", "grad_output", 1))
            if row is not None and tensor.grad_fn is not None and tensor.is_floating_point():
                gradient = self._gradient(key, row, tensor)
                tensor.register_hook(lambda own, gradient=gradient: own if (forced := gradient()) is None else forced)

    def _counterpart(self, call: Call, *, said: bool = False) -> tuple[Key, Kept] | None:
        """Return the baseline's call of the same place and number; ``said``: that there is none was counted already."""
        step, kind = self._session.recorder.step, call.kind
        if step != self._step:
            self._functions.clear()
            self._counts.clear()
            self._parted.clear()
        self._step = step
        key = kind.phase, kind.scope, kind.op, call.ordinal
        golden = self._lenders[kind.level]
        found = golden.step(self._session.rank or 0, step).get(key)
        if found is None and not said:
            self._keep("the baseline has no such call" if golden.holds(step) else "the baseline has no such step", key)
        return None if found is None else (key, found)

    def _write(self, key: Key, own: torch.Tensor, value: torch.Tensor) -> bool:
        into = own.data  # past the version counter: what autograd saved is to hold the baseline's numbers as well
        if 0 in own.stride() and own.numel():  # repeated elements: each is written once
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in own.stride())
            into, value = into[once], value[once]
        try:
            with torch.no_grad():
                into.copy_(value)
        except RuntimeError:
            self._keep("a tensor whose elements share memory", key)
            return False
        buffers = self._session.buffers
        buffers.written(own)
        if is_plain(own) and (storage := buffers.storage(own)) is not None:
            storage.producers.clear()  # what is read now is the baseline's
        return True
