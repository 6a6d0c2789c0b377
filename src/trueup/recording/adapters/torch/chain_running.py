"""A chain of calls executed in order, results handed on as they lie in memory, and its last call judged.

The verdict is that of a replay (`replaying`) with one thing added: the last call is given what those before it computed *there*,
so their rounding reaches its result. How far is measured, not guessed: the float64 truth runs the whole chain, and once more with
every input moved by a unit in its last place, and every result that is handed on by as much as rounding explains of the call that
made it. What that moves is no error.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from trueup.recording.adapters.torch.recorded_call import NotReplayable, Place, Rebuilt, as_tensor, load, rebuild
from trueup.recording.adapters.torch.replay_arguments import first_line
from trueup.recording.adapters.torch.replaying import Replayer, with_host
from trueup.recording.execution.case_errors import OneCall
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain, Link
from trueup.recording.execution.places import ContextBroken as ContextBroken
from trueup.recording.execution.recorded import RecordedCall
from trueup.recording.execution.results import MASK
from trueup.recording.execution.rounding import Operation, rounding

Results = dict[int, dict[str, torch.Tensor]]


class ChainReplayer(Replayer):
    """Executes and judges the last call of a chain, after those before it.

    Args:
        chain: the calls.
        device: the target.
    """

    def __init__(self, chain: Chain, device: str) -> None:
        self._chain, case = chain, chain.target
        super().__init__(OneCall(case), device)  # type: ignore[arg-type]
        self._stand(case.home, draws=False)
        self.random: set[int] = set()
        """Calls before the last one that drew random numbers when they were executed."""

    def _rebuild(self, call: RecordedCall, place: Place, grad: bool) -> Rebuilt:
        results: Results = {}
        loaded = [self._load(k, place) for k in range(len(self._chain.cases))]  # all at first: nothing stands between the calls
        for k, case in enumerate(self._chain.cases[:-1]):
            try:
                results[k] = self._context_call(k, case, with_host(replace(place, hosted=()), case.made), loaded[k], results)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises is an answer
                raise ContextBroken(case.call.seq, first_line(error)) from None
        last = len(self._chain.cases) - 1
        return rebuild(call, place, grad=grad, given=loaded[last] | self._handed_to(last, place, results))

    def _load(self, k: int, place: Place) -> dict[str, torch.Tensor]:
        """Load what a call is given that no other one makes."""
        case = self._chain.cases[k]
        if len(self._chain.cases) == 1:
            return {}  # it is about to be loaded
        try:
            return load(case.made, with_host(replace(place, hosted=()), case.made), leave=frozenset(self._chain.links[k]))
        except Exception as error:
            if k == len(self._chain.cases) - 1:
                raise
            raise ContextBroken(case.call.seq, first_line(error)) from None

    def _context_call(self, k: int, case: Case, place: Place, loaded: dict[str, torch.Tensor], results: Results) -> dict[str, torch.Tensor]:  # noqa: E501
        grad = case.forward is not None
        made = rebuild(case.made, place, grad=grad, given=loaded | self._handed_to(k, place, results))
        before = made.random.get("cpu") or torch.default_generator.get_state().numpy().tobytes()
        found = made.execute()
        if torch.default_generator.get_state().numpy().tobytes() != before:
            self.random.add(k)
        if grad:
            received = {s: as_tensor(case.call, t, place) for s, t in case.call.inputs.items() if s.startswith("grad_output.")}
            found = made.gradients(received, [s for s in case.call.outputs if s.startswith("grad_input.")])
        return {slot: t for slot, t in found.items() if isinstance(t, torch.Tensor)}

    def _handed_to(self, k: int, place: Place, results: Results) -> dict[str, torch.Tensor]:
        inputs = self._chain.cases[k].inputs
        return {slot: self._handed(link, inputs[slot].shape, inputs[slot].strides or (), place, results)
                for slot, link in self._chain.links[k].items()}  # fmt: skip

    def _handed(
        self, link: Link, shape: tuple[int, ...], strides: tuple[int, ...], place: Place, results: Results
    ) -> torch.Tensor:  # fmt: skip
        made = results[link.maker].get(link.slot)
        if made is None:
            raise NotReplayable(f"call {link.maker + 1} gives no {link.slot}, which a later one reads")
        made = made.detach()
        if place.perturb:
            made = _moved(made, self._explained(link))
        if link.whole:
            return made
        return read_of(made, link.laid, shape, strides, link.start)

    def _explained(self, link: Link) -> float:
        """Return what rounding explains of a result that is handed on, relative to its root mean square."""
        case = self._chain.cases[link.maker]
        key = case.call.key
        operation = Operation(key.op, key.level, key.phase)
        read = [self._operand(t, None) for t in case.inputs.values()]
        written = self._operand(case.call.tensors[link.slot], None)
        return rounding(operation, read, [written], self.precision)[link.slot]


def read_of(
    made: torch.Tensor, laid: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:  # fmt: skip
    """Return what a call read of another one's result; a device that lays that result out otherwise has it laid out anew."""
    if made.stride() != laid:
        made = torch.empty_strided(made.shape, laid, dtype=made.dtype, device=made.device).copy_(made)
    return made.as_strided(shape, strides, made.storage_offset() + start)


def _moved(made: torch.Tensor, explained: float) -> torch.Tensor:
    """Return float64 results with each element moved by a share of their root mean square; zeros and masks stay."""
    if not made.is_floating_point() or not made.numel() or not math.isfinite(explained):
        return made
    kept = made.isfinite() & (made != 0) & (made.abs() < MASK)
    size = float(made[kept].square().mean().sqrt()) if bool(kept.any()) else 0.0
    signs = torch.from_numpy(np.random.default_rng(1).integers(0, 2, tuple(made.shape)) * 2.0 - 1.0)
    moved = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype) if 0 not in made.stride() else made.clone()
    return moved.copy_(torch.where(kept, made + explained * size * signs, made))
