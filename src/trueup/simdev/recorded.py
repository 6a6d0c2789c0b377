"""``python -m trueup.simdev.recorded CAPTURE``: the calls of a capture once more, on the device that computes shapes alone.

What a capture holds of a call (its function, shapes, dtypes and arguments) says which operators it is made of on a device of its
own, forward and backward. Each different call of a line runs once and counts as often as it was recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture
from trueup.recording.adapters.torch.recorded_call import Place, assumed, rebuild
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls, RecordedTensor, home_of, tensor_nodes
from trueup.simdev import shapes, tensor

STEPS = 3
"""Steps of each rank that are looked at: what a later one asks for is what these do."""
LOW = ("float16", "bfloat16")
PACKAGES = ("site-packages", "dist-packages")


@dataclass
class Group:
    """Calls that do the same at one line in one step, and the backward calls of some of them."""

    call: RecordedCall
    site: tuple[str, int, str] | None
    times: int = 0
    backward: list[RecordedCall] = field(default_factory=list)
    parts: list[Group] = field(default_factory=list)
    behind: dict[int, list[Group]] = field(default_factory=dict)
    """The operators that were recorded inside the call, and inside each backward call."""


def run(directory: Path) -> None:
    """Run the calls of a capture; raises TrueupError where it holds none of PyTorch's."""
    capture = open_capture(directory)
    recorder: shapes.Shapes = tensor.runner.__self__  # type: ignore[union-attr]
    home = home_of(capture.ranks.values())
    with recorder.noting(None, "", "", 0):  # what is not a call of the capture is not noted
        for rank in capture.ranks:
            calls = RecordedCalls(capture)
            sites = {number: _site(frames) for number, (frames, _) in capture.sites(rank).items()}
            for at, step in enumerate(capture.steps[:STEPS]):
                recorder.at(at)
                for group in _groups(calls.of_step(rank, step), sites):
                    _execute(recorder, group, home)
    recorder.at(min(len(capture.steps), STEPS))


def _site(frames: tuple[str, ...]) -> tuple[str, int, str] | None:
    """Return the innermost line of the user's own, else of a library's."""
    found = []
    for frame in frames:
        place, _, name = frame.partition(" in ")
        file, _, line = place.rpartition(":")
        if line.isdecimal():
            found.append((file, int(line), name))
    own = [one for one in found if not any(part in one[0] for part in PACKAGES)]
    return next(iter([*own, *found]), None)


def _groups(calls: Iterable[RecordedCall], sites: dict[int, tuple[str, int, str] | None]) -> Iterator[Group]:
    """Yield the outermost functions of a step, each with its backward and the operators inside; operators alone where no function
    was recorded."""
    calls = [one for one in calls if one.key.phase not in ("collective", "data")]
    known = {one.seq: one for one in calls}
    top = [one for one in calls if not (one.parent in known and (one.key.level == "api" or known[one.parent].key.level == "api"))]
    top = [one for one in top if not (one.delivers or one.key.op == "torch.Tensor.backward")]
    if any(one.key.level == "api" and one.key.op != "torch.Tensor.backward" for one in top):
        top = [one for one in top if one.key.level == "api"]
    backward: dict[int, list[RecordedCall]] = {}
    inside: dict[int, list[RecordedCall]] = {}
    for one in calls:
        if one.delivers and one.forward_seq is not None:
            backward.setdefault(one.forward_seq, []).append(one)
        elif one.key.level == "aten" and one.parent is not None:
            inside.setdefault(one.parent, []).append(one)
    groups: dict[Any, Group] = {}
    for one in top:
        key = one.signature(), one.site, one.seq in backward
        group = groups.setdefault(key, Group(one, sites.get(one.site) if one.site is not None else None))
        if not group.times:
            group.backward = backward.get(one.seq, [])[:1]
            group.parts = [Group(part, group.site) for part in inside.get(one.seq, ())]
            group.behind = {each.seq: [Group(part, group.site) for part in inside.get(each.seq, ())] for each in group.backward}
        group.times += 1
    yield from groups.values()


REFUSED = (NotReplayable, RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)
"""What a call raises that cannot be made again from what a capture holds."""


def _execute(recorder: shapes.Shapes, group: Group, home: str) -> None:
    """Run a group's call and its backward; where one cannot be made again the operators that were recorded inside."""
    call = group.call
    function = call.key.op if call.key.level == "api" else ""
    phase = "backward" if call.key.phase == "backward" else "forward"
    wanted = {slot.removeprefix("grad_") for each in group.backward for slot in each.outputs if slot.startswith("grad_input.")}
    given = {slot: _made(one, home) for slot, one in call.inputs.items() if slot.startswith("input.")}
    ends: dict[str, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    try:
        made = rebuild(_differentiable(call, wanted), Place("npu", home), grad=bool(wanted), given=given)
        leaves = [*made.leaves.values()]
        with recorder.noting(group.site, function, phase, group.times), _autocast(call):
            ends = made.execute()
    except REFUSED as error:
        _inside(recorder, group, group.parts, home, phase, error)
    for each in group.backward:
        parts = group.behind.get(each.seq, [])
        received = {slot: _made(one, home) for slot, one in each.inputs.items() if slot.startswith("grad_output.")}
        pairs = [(ends.get(slot.removeprefix("grad_")), one) for slot, one in received.items()]
        try:
            outputs, gradients = [one for one, _ in pairs], [one for _, one in pairs]
            with recorder.noting(group.site, "", "backward", group.times):
                torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        except REFUSED as error:
            _inside(recorder, group, parts, home, "backward", error)


def _differentiable(call: RecordedCall, wanted: set[str]) -> RecordedCall:
    """Return a call whose arguments say of which of them gradients are wanted, as a capture with all tensors has it."""
    if call.invocation is not None or not wanted:
        return call
    invocation = assumed(call)
    nodes: Iterable[Any] = tensor_nodes(invocation)
    for node in nodes:
        node["grad"] = node["tensor"] in wanted
    return replace(call, invocation=invocation)


def _inside(recorder: shapes.Shapes, group: Group, parts: list[Group], home: str, phase: str, error: Exception) -> None:
    for part in parts:
        part.times = group.times
        _execute(recorder, part, home)
    if not parts:
        recorder.untold(group.call.key.op, group.site, phase, group.times, str(error).partition("\n")[0])


def _made(recorded: RecordedTensor, home: str) -> torch.Tensor:
    """Return a tensor of the device with a recorded one's shape and dtype; of the host where it was there beside a device."""
    hosted = recorded.device.startswith("cpu") and home != "cpu"
    dtype = getattr(torch, recorded.dtype)
    strides = recorded.strides or torch.empty(recorded.shape, device="meta").stride()
    return torch.empty_strided(recorded.shape, strides, dtype=dtype, device="cpu" if hosted else "npu")


def _autocast(call: RecordedCall) -> Any:
    """Return mixed precision where the result shows that it was on and the capture does not say so."""
    low = [one.dtype for one in call.outputs.values() if one.dtype in LOW]
    wide = any(one.dtype == "float32" for one in call.inputs.values())
    on = call.invocation is None and call.key.level == "api" and bool(low) and wide and call.key.op.startswith("torch.nn.")
    return torch.autocast("npu", getattr(torch, low[0]) if on else torch.bfloat16, enabled=on)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]))
    except TrueupError as error:
        raise SystemExit(str(error)) from None
