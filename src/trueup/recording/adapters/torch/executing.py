"""Recorded calls, executed by PyTorch and judged: what `trueup.analysis.rerun` and `trueup.analysis.anomalies` ask of this adapter.

A call is executed on the target and once more in float64 on the CPU (`execution.judging`). A chain of calls is executed in
order, results handed on as they lie in memory, and its last call judged. The verdict is that of a replay with one thing added:
the last call is given what those before it computed *there*, so their rounding reaches its result. How far is measured, not
guessed: the float64 truth runs the whole chain, and once more with every input moved by a unit in its last place, and every
result that is handed on by as much as rounding explains of the call that made it. What that moves is no error.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.environment import switches
from trueup.recording.adapters.torch.recorded_call import (
    Place,
    Rebuilt,
    as_tensor,
    load,
    rebuild,
    to_numpy,
    with_host,
)
from trueup.recording.adapters.torch.source import function_name, paths_of, plain_name, source_of
from trueup.recording.execution.case_errors import CaseErrors, OneCall, Source
from trueup.recording.execution.cases import Case, Chain, Link
from trueup.recording.execution.judging import MASK, Bitwise, Judging, Result, parallel
from trueup.recording.execution.local_error import Operation, rounding
from trueup.recording.execution.recorded import ContextBroken, NotReplayable, RecordedCall, RecordedCalls, Untold

WORKSPACES_OF: dict[str, tuple[str, str]] = {
    "aten::mkldnn_rnn_layer_backward": ("aten::mkldnn_rnn_layer", "output.3"),
    "aten::_ctc_loss_backward": ("aten::_ctc_loss", "output.1"),
}
"""Backward operators that read a workspace of their forward, which is not recorded (`workspace` in operators.toml)."""


class Replayer(Judging[Place]):
    """Executes and judges calls of a capture; see `Judging`."""

    place = Place

    def switches(self) -> dict[str, str]:
        return switches()

    def notes(self) -> list[str]:
        named = str(getattr(getattr(torch, "npu", None), "get_device_name", lambda: "")())
        found = ["npu is Trueup's simulated device: no accelerator was used"] if "Trueup simulated" in named else []
        return [*found, *super().notes()]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        kind = self.device.partition(":")[0]
        with torch.random.fork_rng([] if kind == "cpu" else None, device_type="cuda" if kind == "cpu" else kind):
            yield

    def rebuilt(self, call: RecordedCall, place: Place, *, grad: bool) -> Rebuilt:
        return rebuild(call, with_host(place, call), grad=grad)

    def result(self, call: RecordedCall, made: Rebuilt, place: Place) -> Result:
        before = torch.default_generator.get_state()
        self._refill(call, made, place)
        outputs = made.execute()
        if call.delivers:
            received = {s: as_tensor(call, t, place) for s, t in call.tensors.items() if s.startswith("grad_output.")}
            outputs = made.gradients(received, list(call.outputs))
        arrays = {slot: to_numpy(outputs[slot]) for slot in call.outputs if isinstance(outputs.get(slot), torch.Tensor)}
        given = made.random.get("cpu") or before.numpy().tobytes()
        random = torch.default_generator.get_state().numpy().tobytes() != given
        return Result(arrays, random, bool(made.drawn), tuple(made.unwritten), frozenset(made.inner))

    def _refill(self, call: RecordedCall, made: Rebuilt, place: Place) -> None:
        """Fill a workspace, which no capture holds, by executing again the operator that made it."""
        operator, output = WORKSPACES_OF.get(call.key.op, ("", ""))
        if not (operator and made.unwritten and call.forward_seq is not None):
            return
        step = self._calls.of_step(call.key.rank, call.key.step, ("aten",))
        for forward in step:
            if forward.key.op == operator and forward.parent == call.forward_seq and _same_inputs(forward, call):
                with suppress(NotReplayable):
                    workspace = rebuild(forward, place).execute().get(output)
                    slot = made.unwritten[-1]
                    if workspace is not None and workspace.shape == made.inputs[slot].shape:
                        made.inputs[slot].copy_(workspace)
                        made.unwritten.clear()
                return


def _same_inputs(forward: RecordedCall, backward: RecordedCall) -> bool:
    """Tell whether a backward operator was given the first two tensors of a forward one: input and weight, or scores and labels."""
    given = {tensor.digest for slot, tensor in backward.tensors.items() if slot.startswith("input.")}
    return all(one is not None and one.digest in given for one in map(forward.tensors.get, ("input.0", "input.1")))


def provide(device: str, *, simulated: bool) -> None:
    """Make sure that PyTorch knows a device; raise `TrueupError` where it does not, or there is none of this number."""
    kind = device.partition(":")[0]
    if simulated:
        from trueup import simdev

        simdev.install()
    elif kind == "npu" and not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except ImportError:
            raise TrueupError(
                "PyTorch knows no device npu here.\n  expected: torch_npu installed, or --simulated for the simulated device\n"
                "  got:      neither\n  next:     pip install torch_npu, or replay the candidate's capture with --device cpu"
            ) from None
    try:
        torch.ones(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = f"Nothing can be computed on {device}: {first_line(error)}"
        raise TrueupError(f"{said}\n  next:     name a device that is there") from None


Results = dict[int, dict[str, torch.Tensor]]


class ChainReplayer(Replayer):
    """Executes and judges the last call of a chain on the target device, after those before it."""

    def __init__(self, chain: Chain, device: str) -> None:
        self._chain, case = chain, chain.target
        super().__init__(OneCall(case), device)  # type: ignore[arg-type]
        self._stand(case.home, draws=False)
        self.random: set[int] = set()  # calls before the last one that drew random numbers when they were executed

    def rebuilt(self, call: RecordedCall, place: Place, *, grad: bool) -> Rebuilt:
        place = with_host(place, call)
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
        """Return the error that rounding explains in a result that is handed on, relative to its root mean square."""
        case = self._chain.cases[link.maker]
        key = case.call.key
        operation = Operation(key.op, key.level, key.phase)
        read = [self._operand(t, None) for t in case.inputs.values()]
        written = self._operand(case.call.tensors[link.slot], None)
        return rounding(operation, read, [written], self.precision)[link.slot]


def read_of(
    made: torch.Tensor, laid: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], start: int
) -> torch.Tensor:  # fmt: skip
    """Return the part of another call's result that a call read; laid out anew where the device's layout differs."""
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


class Verifier(Bitwise[Place], Replayer):
    """Executes calls of a capture where they were recorded; see `Bitwise`."""


# ---------------------------------------------------------------- reproducers
class TorchCases(CaseErrors):
    """Executes calls with PyTorch; see `CaseErrors`."""

    title, needs, template, plugin = "PyTorch", "torch, safetensors and pytest", "test_torch.py.j2", "torch_npu"

    def chained(self, chain: Chain, device: str) -> ChainReplayer:
        return ChainReplayer(chain, device)

    def seeded(self) -> bytes:
        return bytes(torch.Generator().manual_seed(0).get_state().numpy().tobytes())

    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        try:
            found_at = [paths_of(each, Place(against, each.home), results=_read_of(chain, k)) for k, each in enumerate(chain.cases)]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raise NotReplayable(f"{against} does not execute it: {error}") from None
        return source_of(chain, found_at, random=random)

    def names(self, case: Case) -> tuple[str, str]:
        return plain_name(case.call), function_name(case.made)

    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        save_file({k: t.contiguous() for k, t in tensors.items()}, path)
        return [(k, str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in tensors.items()]

    def switches(self) -> dict[str, str]:
        return switches()


def _read_of(chain: Chain, k: int) -> tuple[str, ...]:
    """Return the results of a call that later ones read."""
    return tuple({link.slot: 0 for links in chain.links for link in links.values() if link.maker == k})


CASES = TorchCases()
settled, judged, written = CASES.settled, CASES.judged, CASES.written


def limit_threads(number: int) -> None:
    """Set how many threads each operator uses."""
    torch.set_num_threads(number)


# ---------------------------------------------------------------- what became of an overflow
class WideExecutor(Replayer):
    """Executes calls of a capture in float64 on the CPU."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(RecordedCalls(capture), "cpu", draws=False)
        self._around: RecordedCall | None = None

    def execute_wide(self, call: RecordedCall, forward: RecordedCall | None) -> Mapping[str, NDArray[Any]]:
        """Return what a call gives, by slot (`effects_rerun.Executor`); raises Untold where it cannot be executed again,
        or draws random numbers in float64 that are not the recorded ones."""
        self._around = forward
        try:
            result = super().execute(call, self.truth)
        except (NotReplayable, TrueupError) as reason:
            raise Untold(" ".join(str(reason).split())) from None
        finally:
            self._around = None
        if result.unwritten:
            raise Untold(f"it reads {', '.join(result.unwritten)}, which the capture does not hold")
        if result.random and not all(
            parallel(array, call.outputs[slot].array()) for slot, array in result.arrays.items() if call.outputs[slot].kept
        ):
            raise Untold("float64 draws different random numbers")
        return result.arrays

    def _forward(self, call: RecordedCall) -> RecordedCall:
        return self._around if self._around is not None else super()._forward(call)


@contextmanager
def executing(capture: Capture) -> Iterator[SimpleNamespace]:
    """Yield the executor of a capture's calls; generators are left as they were."""
    replayer = WideExecutor(capture)
    with replayer.undisturbed(), torch.no_grad():
        yield SimpleNamespace(execute=replayer.execute_wide)
