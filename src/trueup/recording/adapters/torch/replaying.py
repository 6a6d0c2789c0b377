"""One recorded call, executed by PyTorch on the target and once more in float64 on the CPU, and judged (`execution.judging`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.environment import switches
from trueup.recording.adapters.torch.recorded_call import NotReplayable, Place, Rebuilt, as_tensor, rebuild, to_numpy
from trueup.recording.execution.judging import Arrays as Arrays
from trueup.recording.execution.judging import Judging
from trueup.recording.execution.judging import Result as Result
from trueup.recording.execution.recorded import RecordedCall

ON_HOST: dict[str, tuple[str, ...]] = {
    "aten::_pack_padded_sequence": ("input.1",), "torch._pack_padded_sequence": ("input.1",),
    "aten::_pack_padded_sequence_backward": ("input.2",), "torch._pack_padded_sequence_backward": ("input.2",),
    "aten::_pad_packed_sequence": ("input.1",), "torch._pad_packed_sequence": ("input.1",),
    "torch.lstm": ("input.1",), "torch.gru": ("input.1",), "torch.rnn_tanh": ("input.1",), "torch.rnn_relu": ("input.1",),
    "torch.nn.utils.rnn.pack_padded_sequence": ("input.1",), "aten::tensor_split": ("input.1",), "torch.tensor_split": ("input.1",),
}  # fmt: skip
"""Arguments that are on the CPU whatever the device (PyTorch 2.13, `native_functions.yaml` and the functions' checks)."""

WORKSPACES_OF: dict[str, tuple[str, str]] = {"aten::mkldnn_rnn_layer_backward": ("aten::mkldnn_rnn_layer", "output.3")}
"""Backward operators that read a workspace of their forward, which is not recorded (`dispatch.WORKSPACES`)."""


class Replayer(Judging[Place]):
    """Executes and judges calls of a capture; see `Judging`."""

    place = Place

    def switches(self) -> dict[str, str]:
        """Return the values of PyTorch's numeric switches."""
        return switches()

    def notes(self) -> list[str]:
        """Say what a reader must know of the device and of the capture."""
        named = str(getattr(getattr(torch, "npu", None), "get_device_name", lambda: "")())
        found = ["npu is Trueup's simulated device: no accelerator was used"] if "Trueup simulated" in named else []
        return [*found, *super().notes()]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave the generators of this process, which calls set, as they were."""
        kind = self.device.partition(":")[0]
        with torch.random.fork_rng([] if kind == "cpu" else None, device_type="cuda" if kind == "cpu" else kind):
            yield

    def execute(self, call: RecordedCall, place: Place) -> Result:
        """Execute a call, forward or backward, and return its results by slot.

        Raises:
            NotReplayable: it cannot be, or raises.
        """
        backward = call.delivers
        wanted = list(call.outputs)
        if not wanted:
            raise NotReplayable("nothing that it computes was recorded")
        made = self._rebuild(self._forward(call) if backward else call, with_host(place, call), backward)
        before = torch.default_generator.get_state()
        try:
            self._refill(call, made, place)
            outputs = made.execute()
            if backward:
                received = {s: as_tensor(call, t, place) for s, t in call.tensors.items() if s.startswith("grad_output.")}
                outputs = made.gradients(received, wanted)
            arrays = {slot: to_numpy(outputs[slot]) for slot in wanted if isinstance(outputs.get(slot), torch.Tensor)}
        except (NotReplayable, TrueupError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is an answer
            where = "the float64 CPU" if place.wide else place.device
            text = (str(error).splitlines() or [""])[0][:200]
            raise NotReplayable(f"{where} does not execute it: {type(error).__name__}: {text}") from None
        given = made.random.get("cpu") or before.numpy().tobytes()
        random = torch.default_generator.get_state().numpy().tobytes() != given
        return Result(arrays, random, bool(made.drawn), tuple(made.unwritten), frozenset(made.inner))

    def _rebuild(self, call: RecordedCall, place: Place, grad: bool) -> Rebuilt:
        return rebuild(call, place, grad=grad)

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
    """Tell whether a backward operator was given the input and the first weight of a forward one."""
    sides = [(forward.tensors.get(s), backward.tensors.get(s)) for s in ("input.0", "input.1")]
    return all(a is not None and b is not None and a.digest == b.digest for a, b in sides)


def with_host(place: Place, call: RecordedCall) -> Place:
    """Return the place for a call some of whose arguments stay on the CPU."""
    return replace(place, hosted=ON_HOST[call.key.op]) if call.key.op in ON_HOST else place


def provide(device: str, *, simulated: bool) -> None:
    """Make sure that PyTorch knows a device.

    Raises:
        TrueupError: it does not, or there is none of this number.
    """
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
        said = (str(error).splitlines() or [""])[0][:200]
        raise TrueupError(f"Nothing can be computed on {device}: {said}\n  next:     name a device that is there") from None
