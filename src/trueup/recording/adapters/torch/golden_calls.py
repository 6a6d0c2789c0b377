"""Teacher forcing call by call: each function, or operator, of the live run computes with the baseline's recorded inputs.

The values are written into the tensors that the call is given, past the version counter. So the call gets the very tensors that the
program handed it: the autograd graph, views, aliases and writes in place are the program's own, a gradient passes on as if nothing
had happened, and what autograd has saved holds the baseline's numbers too, which is what a backward of no accumulated error needs.

At level ``api`` the gradient that a call's backward starts from is replaced as well, by a hook at its result; at level ``aten``
backward's and the optimizer's operators are calls like any other. Random operators begin at the baseline's state of the generators.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from trueup.recording.adapters.torch.golden_forcing import Forcing
from trueup.recording.adapters.torch.layouts import is_plain
from trueup.recording.adapters.torch.recorded_call import restore_random
from trueup.recording.adapters.torch.replay_arguments import Place
from trueup.recording.adapters.torch.tensors import NamedTensors
from trueup.recording.execution.golden_inputs import GoldenInputs, Kept, Key
from trueup.recording.recorder import Call
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def forcing(session: Session, baseline: str, level: str | None) -> Forcing:
    """Return what forces the modules of a session, or its single calls.

    Raises:
        TrueupError: the baseline cannot lend its inputs.
    """
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

    def __init__(self, session: Session, golden: GoldenInputs) -> None:
        super().__init__(session, golden)
        self._lenders = {
            level: golden if level == golden.level else GoldenInputs(golden.path, level) for level in golden.levels
        }  # fmt: skip
        self._functions: dict[int, Key] = {}
        """Functions of this step by execution number."""
        self._counts: Counter[int | None] = Counter()
        """Operators so far of each function."""
        self._parted: set[int] = set()
        """Functions that executed another operator than in the baseline."""

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
        for slot, tensor in outputs if found is not None and torch.is_grad_enabled() else ():
            row = found[1].gradients.get(slot.replace("output", "grad_output", 1)) if found is not None else None
            if row is not None and found is not None and tensor.grad_fn is not None and tensor.is_floating_point():
                gradient = self._gradient(found[0], row, tensor)
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
