"""A recorded call taken out of its capture: all that executing it takes, in memory, to be changed and handed on.

>>> case = Case.of(RecordedCalls(trueup.open_capture("runs/cpu")), call)
>>> case.with_tensors({"input.0": case.call.tensors["input.0"].array()[:1]}).size
48

No framework is needed. A case travels between our own processes as a file of one line of JSON and the bytes of its tensors.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.foundation.model import CallKey, TrueupError
from trueup.foundation.store.segment import numpy_dtype
from trueup.recording.execution.drawing import draw
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls, RecordedTensor


@dataclass(frozen=True)
class HeldTensor(RecordedTensor):
    """A tensor whose elements are in memory."""

    held: NDArray[Any] | None = field(default=None, repr=False)

    @property
    def kept(self) -> bool:
        """Whether its elements are there: always."""
        return True

    def array(self) -> NDArray[Any]:
        """Return the elements in the recorded shape."""
        assert self.held is not None
        return self.held

    @staticmethod
    def of(
        slot: str, array: NDArray[Any], strides: tuple[int, ...] | None = None, device: str = "", dtype: str = ""
    ) -> HeldTensor:  # fmt: skip
        """Hold an array; without strides it is contiguous."""
        if strides is None:
            strides = contiguous(array.shape)
        return HeldTensor(slot, dtype or array.dtype.name, array.shape, strides, device, _numbers(array), None, held=array)


@dataclass(frozen=True)
class Case:
    """A call of level api or aten, and its forward call where it is the backward of an api call."""

    call: RecordedCall
    forward: RecordedCall | None
    home: str
    """Type of device of the capture: its tensors move to the device that is tried."""
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Devices and environment, as the manifests have them."""
    drawn: tuple[str, ...] = ()
    """Slots whose elements were drawn to match recorded numbers."""

    @property
    def made(self) -> RecordedCall:
        """The call that is executed: of a backward call of level api, its forward."""
        return self.forward or self.call

    @property
    def inputs(self) -> dict[str, RecordedTensor]:
        """What it takes to execute it, by slot: inputs, and gradients that it receives."""
        return self.made.inputs | {s: t for s, t in self.call.inputs.items() if self.forward is None or s.startswith("grad_")}

    @property
    def size(self) -> int:
        """Bytes of its inputs."""
        return sum(t.numel * numpy_dtype(t.dtype).itemsize for t in self.inputs.values())

    @staticmethod
    def of(calls: RecordedCalls, call: RecordedCall) -> Case:
        """Take a call out of its capture, its inputs in memory; where only numbers were kept, drawn to match them.

        Raises:
            TrueupError: it is no call that can be executed by itself, or its file is damaged.
        """
        forward = None
        if call.delivers:
            if call.forward_seq is None:
                raise TrueupError("The capture does not say of which forward call this is the backward: name an aten call of it")
            forward = calls.at(call.key.rank, call.forward_seq)
        ranks, home = Case.surroundings(calls)
        return Case(call, forward, home, ranks).in_memory()

    @staticmethod
    def surroundings(calls: RecordedCalls) -> tuple[dict[int, dict[str, Any]], str]:
        """Return devices and environment of the ranks of a capture, and the type of device that it was taken on."""
        ranks = {n: {k: rank.get(k) for k in ("devices", "environment")} for n, rank in calls.capture.ranks.items()}
        kinds = [name.partition(":")[0] for rank in ranks.values() for name in rank["devices"] or () if isinstance(name, str)]
        return ranks, next((k for k in kinds if k != "cpu"), "cpu")

    def in_memory(self) -> Case:
        """Return it with its elements in memory; where only numbers were kept, drawn to match them.

        Raises:
            TrueupError: an input was kept by its digest alone, or its file is damaged.
        """
        drawn: list[str] = []
        held = replace(self.call, tensors=_held(self.call, drawn))
        forward = self.forward and replace(self.forward, tensors=_held(self.forward, drawn))
        return replace(self, call=held, forward=forward, drawn=(*self.drawn, *drawn))

    def with_tensors(self, arrays: Mapping[str, NDArray[Any]], *, plain: bool = False) -> Case:
        """Return it with other elements, also of other shapes; the order of strides stays.

        Args:
            arrays: by slot.
            plain: contiguous, and not within a larger storage.
        """
        forward = self.forward and _changed(self.forward, arrays, plain)
        return replace(self, call=_changed(self.call, arrays, plain), forward=forward)

    def with_invocation(self, invocation: Mapping[str, Any]) -> Case:
        """Return it made otherwise."""
        if self.forward is not None:
            return replace(self, forward=replace(self.forward, invocation=invocation))
        return replace(self, call=replace(self.call, invocation=invocation))

    def without(self, slot: str) -> Case:
        """Return it without a tensor: an argument that is None, a gradient that is not received."""
        call, forward = self.call, self.forward
        call = replace(call, tensors={s: t for s, t in call.tensors.items() if s not in (slot, f"grad_{slot}")})
        forward = forward and replace(forward, tensors={s: t for s, t in forward.tensors.items() if s != slot})
        return replace(self, call=call, forward=forward)

    def with_outputs(self, arrays: Mapping[str, NDArray[Any]]) -> Case:
        """Return it with these results as the recorded ones."""
        kept = {s: t for s, t in self.call.tensors.items() if s not in self.call.outputs}
        outputs = {slot: HeldTensor.of(slot, array) for slot, array in arrays.items()}
        return replace(self, call=replace(self.call, tensors=kept | outputs))

    def with_random(self, random: Mapping[str, bytes]) -> Case:
        """Return it with other states of the generators."""
        forward = self.forward and replace(self.forward, random=random)
        return replace(self, call=replace(self.call, random=random), forward=forward)

    # ---------------------------------------------------------------- between our processes
    def write(self, path: Path) -> None:
        """Write it to a file."""
        blobs: list[bytes] = []
        head = {
            "call": _written(self.call, blobs), "forward": self.forward and _written(self.forward, blobs), "home": self.home,
            "ranks": [[n, dict(rank)] for n, rank in self.ranks.items()], "drawn": self.drawn,
        }  # fmt: skip
        with path.open("wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.writelines(blobs)

    @staticmethod
    def read(path: Path) -> Case:
        """Read what `write` wrote; not for files of strangers."""
        with path.open("rb") as file:
            head = json.loads(file.readline())
            call, forward = (head[name] and _read(head[name], file) for name in ("call", "forward"))
        return Case(call, forward, head["home"], dict(head["ranks"]), tuple(head["drawn"]))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a plain array, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def relaid(shape: tuple[int, ...], before: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return strides for another shape in the order of the old ones: a transposed matrix stays one; None: not a plain array."""
    if strides is None or shape == before:
        return strides
    if len(shape) != len(before) or strides == contiguous(before):
        return contiguous(shape)
    found, step = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda k: (strides[k], -k)):
        if strides[place]:
            found[place] = step
            step *= max(shape[place], 1)
    return tuple(found)


def _numbers(array: NDArray[Any]) -> dict[str, float | None]:
    wide = np.abs(np.asarray(array)).astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
    real = wide if array.dtype.kind in "cb" else array.astype(np.float64)
    finite = real[np.isfinite(wide)]
    return {
        "min": float(finite.min()) if finite.size else 0.0, "max": float(finite.max()) if finite.size else 0.0,
        "mean": float(finite.mean()) if finite.size else 0.0, "l2": float(np.linalg.norm(finite)),
        "n_nan": float(np.isnan(wide).sum()), "n_zero": float((wide == 0).sum()),
        "n_posinf": float(np.isposinf(real).sum()), "n_neginf": float(np.isneginf(real).sum()),
    }  # fmt: skip


def _held(call: RecordedCall, drawn: list[str]) -> dict[str, RecordedTensor]:
    return {slot: _hold(call, slot, tensor, drawn) for slot, tensor in call.tensors.items()}


def _hold(call: RecordedCall, slot: str, tensor: RecordedTensor, drawn: list[str]) -> RecordedTensor:
    if tensor.strides is None:  # no plain array: it is refused where it is executed
        return tensor
    if tensor.kept:
        array = tensor.array()
    elif slot not in call.inputs:
        return tensor
    elif tensor.measured:
        array = draw(tensor)
        drawn.append(slot)
    elif tensor.digest is None:  # memory that nobody had written
        dtype = numpy_dtype(tensor.dtype)
        array = np.full(tensor.shape, np.nan if dtype.kind not in "biu" else 0).astype(dtype)
    else:
        raise TrueupError(
            f"{slot} was kept by its digest alone.\n  expected: a capture of detail tensor, or stats\n"
            "  got:      digest\n  next:     record again with --detail tensor"
        )
    return HeldTensor.of(slot, array, tensor.strides, tensor.device, tensor.dtype)


def _changed(call: RecordedCall, arrays: Mapping[str, NDArray[Any]], plain: bool) -> RecordedCall:
    tensors = dict(call.tensors)
    for slot, array in arrays.items():
        if slot in tensors and slot in call.inputs:
            old = tensors[slot]
            strides = contiguous(array.shape) if plain else relaid(array.shape, old.shape, old.strides)
            tensors[slot] = HeldTensor.of(slot, array, strides, old.device, old.dtype)
    return replace(call, tensors=tensors)


def _written(call: RecordedCall, blobs: list[bytes]) -> dict[str, Any]:
    tensors = []
    for slot, tensor in call.tensors.items():
        blob = tensor.array().tobytes() if tensor.kept else None
        if blob is not None:
            blobs.append(blob)
        length = None if blob is None else len(blob)
        facts = (slot, tensor.dtype, tensor.shape, tensor.strides, tensor.device, dict(tensor.numbers), tensor.digest, length)
        tensors.append(facts)
    return {
        "key": list(asdict(call.key).values()), "places": [call.seq, call.parent, call.forward_seq, call.site], "tensors": tensors,
        "value": call.value, "invocation": call.invocation,
        "random": {k: base64.b64encode(v).decode() for k, v in call.random.items()},
    }  # fmt: skip


def _read(head: Mapping[str, Any], file: Any) -> RecordedCall:
    tensors: dict[str, RecordedTensor] = {}
    for slot, dtype, shape, strides, device, numbers, digest, length in head["tensors"]:
        sizes, laid = tuple(shape), None if strides is None else tuple(strides)
        if length is None:
            tensors[slot] = RecordedTensor(slot, dtype, sizes, laid, device, numbers, digest)
        else:
            array = np.frombuffer(file.read(length), numpy_dtype(dtype)).reshape(sizes)
            tensors[slot] = HeldTensor(slot, dtype, sizes, laid, device, numbers, digest, held=array)
    random = {k: base64.b64decode(v) for k, v in head["random"].items()}
    seq, parent, forward, site = head["places"]
    return RecordedCall(CallKey(*head["key"]), seq, parent, forward, site, tensors, head["value"], head["invocation"], random)
