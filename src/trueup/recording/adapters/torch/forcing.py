"""Teacher forcing: each module, function or operator of the live run computes with the baseline's recorded inputs.

The values are written into the tensors that the call is given, past the version counter. So the call gets the very tensors that the
program handed it: the autograd graph, views, aliases and writes in place are the program's own, a gradient passes on as if nothing
had happened, and what autograd has saved holds the baseline's numbers too, as a backward without accumulated error needs them. A
module is given the baseline's weights as well.

At levels ``module`` and ``api`` a hook at each result replaces the gradient that the call's backward starts from; at level ``aten``
backward's and the optimizer's operators are calls like any other. Random operators begin at the baseline's state of the generators.
So every call, forward and backward, shows its own error and hands none on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.context import SessionCore
from trueup.recording.adapters.torch.recorded_call import Place, from_numpy, restore_random
from trueup.recording.adapters.torch.tensors import NamedTensors, is_plain
from trueup.recording.execution.recorded import BaselineInputs, Kept, Key
from trueup.recording.recorder import Call

MARK = "inputs were forced"
"""Start of the note that a forced capture bears; a comparison says it too."""


@lru_cache(maxsize=4096)
def _draws(op: str) -> bool:
    """Tell whether an operator draws random numbers."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten::"), None) if op.startswith("aten::") else None
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in overloads)


class Forcing:
    """Writes the values of ``baseline`` into what calls of a level are given (None: the first of ``module``, ``api``, ``aten`` that
    it has); where those are operators, the functions around them, too. Raises TrueupError where it cannot lend its inputs."""

    def __init__(self, session: SessionCore, baseline: str, level: str | None) -> None:
        self._session = session
        self._baseline = lender = BaselineInputs(baseline, level)
        self.levels = lender.levels  # of the calls that are forced
        self._lenders = {level: lender if level == lender.level else BaselineInputs(lender.path, level) for level in lender.levels}
        self._step: int | None = None
        self._functions: dict[int, Key] = {}  # functions of this step by execution number
        self._counts: Counter[int | None] = Counter()  # operators so far of each function
        self._parted: set[int] = set()  # functions that executed another operator than in the baseline
        self.forced = self.gradients = 0
        self.unmatched: Counter[str] = Counter()  # what kept its own inputs, by why
        self._first: dict[str, str] = {}

    def finish(self) -> None:
        """Note how many calls were forced, and why others were not."""
        calls, lender = f"{self.forced:,} {self._baseline.level} calls", self._baseline.path
        note = f"{MARK}: {calls} computed with the inputs of {lender}, {self.gradients:,} gradients are its"
        if not self.forced:
            note = f"{MARK} nowhere: no {self._baseline.level} call has a counterpart in {self._baseline.path}"
        self._session.recorder.note(note)
        for why, count in self.unmatched.most_common(8):
            self._session.recorder.note(f"own inputs were kept in {count:,} calls: {why}; the first is {self._first[why]}")

    def give(self, call: Call, inputs: NamedTensors) -> None:
        """Write the values into a call's inputs, which it is about to read."""
        found = self._counterpart(call)
        if call.kind.level == "api":
            self._functions[call.seq] = call.kind.phase, call.kind.scope, call.kind.op, call.ordinal
        elif call.kind.level == "aten" and not self._lines_up(call, None if found is None else found[1]):
            if found is not None:
                self._keep("the function around it executes different operators than in the baseline", found[0])
            return
        if found is None:
            return
        key, kept = found
        if kept.random and (call.kind.level == "api" or _draws(call.kind.op)):
            kinds = [t.device.type for _, t in inputs if t.device.type != "cpu"]
            restore_random(kept.random, Place(kinds[0] if kinds else "cpu", self._baseline.home))
        done = False
        for slot, tensor in inputs:
            row = kept.inputs.get(slot)
            if row is None:
                self._keep("an input that the baseline's call lacks", key)
            elif not is_plain(tensor):
                self._keep("a tensor that is not a plain array", key)
            elif (value := self._tensor(key, row, tensor.shape, tensor.dtype, tensor.device)) is not None:
                done |= self._write(key, tensor, value)
        self.forced += done and call.kind.level == self._baseline.level

    def _lines_up(self, call: Call, kept: Kept | None) -> bool:
        """Tell whether an operator is the same one in the same function: two devices may take a function apart differently."""
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
        """Let the backward of a call, which returned ``outputs``, start from the baseline's gradients."""
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
        lender = self._lenders[kind.level]
        found = lender.step(self._session.rank or 0, step).get(key)
        if found is None and not said:
            self._keep("the baseline has no such call" if lender.holds(step) else "the baseline has no such step", key)
        return None if found is None else (key, found)

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

    def _tensor(self, key: Key, row: dict[str, Any], shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        if list(row["shape"] or ()) != list(shape):
            self._keep(f"a different shape than the baseline's {row['slot'].partition('.')[0]}", key)
            return None
        try:
            array = self._baseline.array(self._session.rank or 0, row)
        except TrueupError as error:
            self._keep(first_line(error, 120), key)
            return None
        with torch.no_grad():
            return from_numpy(array).clone().to(dtype).to(device)  # memory of its own: a view may not be written in place

    def _keep(self, why: str, key: Key) -> None:
        self.unmatched[why] += 1
        phase, scope, name, ordinal = key
        self._first.setdefault(why, f"{scope or name}, {phase}, step {self._step}, call {ordinal}")

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
        if (storage := buffers.storage(own)) is not None:
            storage.producers.clear()  # what is read now is the baseline's
        return True
