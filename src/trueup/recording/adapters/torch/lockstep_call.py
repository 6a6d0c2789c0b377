"""What lockstep needs of one module call: its tensors on both sides, its local gradients, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trueup.comparison.measures.roundoff import roundoff
from trueup.recording.adapters.torch.host import to_numpy
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.execution.local_error import Distance, judge
from trueup.recording.execution.lockstep_result import Parting
from trueup.recording.execution.rounding import Operand, Operation, rounding

Named = dict[str, torch.Tensor]


@dataclass
class Side:
    """A call of both models: where it stands, and what its judgement takes."""

    path: str
    kind: str
    """Class of a module, or name of a function."""
    level: str
    ordinal: int
    mine: Named = field(default_factory=dict)
    """The second model's inputs: leaves of a graph of their own."""
    gradients: Named = field(default_factory=dict)
    """Of the first model's call: ``grad_output.0``, ``grad_input.0``."""


@dataclass
class Call(Side):
    """A module call of both models, waiting for its backward."""

    module: torch.nn.Module = field(default_factory=torch.nn.Module)
    other: torch.nn.Module = field(default_factory=torch.nn.Module)
    inputs: Named = field(default_factory=dict)
    """What the first model's module got: copies in the graph, whose gradients are this module's own."""
    outputs: Named = field(default_factory=dict)
    made: Named = field(default_factory=dict)
    """The second model's outputs."""
    call: Callable[..., Any] | None = None
    """``nn.Module.__call__`` as it was."""
    given: Any = None
    """The second model's arguments, positional and by keyword."""
    drawn: bool = False
    """Whether random numbers were drawn."""
    buffers: Named = field(default_factory=dict)
    """Of the first model's module, before the call."""


def parting(
    step: Side, phase: str, slot: str, expected: torch.Tensor, other: torch.Tensor, moved: Distance | None = None
) -> Parting:
    """Judge one tensor; ``moved`` is how far rounding of the inputs moves the first model's own result."""
    def said(state: str, error: float = 0.0, explained: float = 0.0, excess: float = 0.0, reason: str = "") -> Parting:
        place = step.path, step.kind, phase, step.ordinal, slot, dtype_of(other), tuple(other.shape)
        return Parting(*place, error, explained, excess, state, reason)

    if expected.shape != other.shape:
        text = f"its shape is {list(other.shape)}, the first model's {list(expected.shape)}"
        return said("wrong", excess=float("inf"), reason=text)
    distance = Distance.of(wide(expected), to_numpy(other.cpu()))
    dtype = dtype_of(expected) if unit_of(expected) > unit_of(other) else dtype_of(other)
    operation = Operation(step.kind, step.level, phase)
    norm = distance.truth_rms * distance.counted**0.5
    operands = [operand(name, tensor) for name, tensor in (step.gradients | step.mine).items() if tensor.is_floating_point()]
    output = Operand(slot, dtype, tuple(other.shape), norm, distance.truth_largest)
    allowed = rounding(operation, operands if phase == "backward" else [], [output])[slot]
    found = judge(operation, dtype_of(other), distance, rounding=allowed, perturbed=moved)
    return said(found.verdict, found.error, found.explained, found.excess, found.sentence)


def operand(slot: str, tensor: torch.Tensor) -> Operand:
    """Describe a tensor that a module reads, by its numbers."""
    host = tensor.detach().double().cpu() if tensor.device.type == "cpu" else tensor.detach().cpu().double()
    largest = float(host.abs().max()) if host.numel() else 0.0
    return Operand(slot, dtype_of(tensor), tuple(tensor.shape), float(host.norm()), largest)


def local_gradients(
    step: Call, module: torch.nn.Module, inputs: Named, outputs: Named, through: Mapping[torch.dtype, torch.dtype] | None = None
) -> Named:
    """Return the gradients of a module's inputs and own parameters, from those that the first model's module got.

    Args:
        through: dtypes to which those are rounded first, by what they are.
    """
    arrived = [(t, step.gradients.get(slot.replace("output", "grad_output", 1))) for slot, t in outputs.items() if t.requires_grad]
    rounded = [(t, None if g is None else g.to((through or {}).get(g.dtype, g.dtype))) for t, g in arrived]
    started = [(tensor, gradient.to(tensor.device, tensor.dtype)) for tensor, gradient in rounded if gradient is not None]
    own = {f"grad_param.{name}": p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    wanted = {f"grad_{slot}": tensor for slot, tensor in inputs.items()} | own
    if not started or not wanted:
        return {}
    found = torch.autograd.grad([t for t, _ in started], [*wanted.values()], [g for _, g in started], allow_unused=True)
    return {slot: gradient for slot, gradient in zip(wanted, found, strict=True) if gradient is not None}


def loss_of(result: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Return the loss; without one, the outputs weighted by fixed numbers, so that every element has a gradient of its own."""
    if loss is not None:
        return loss(result)
    found = getattr(result, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    total = torch.zeros(())
    for number, (_, tensor) in enumerate(named_tensors("output", result)):
        if tensor.is_floating_point():
            source = torch.Generator().manual_seed(number)
            weights = torch.randn(tensor.shape, generator=source).to(tensor.device, tensor.dtype)
            total = total.to(tensor.device) + (tensor * weights).mean()
    return total


@contextmanager
def kept_as_they_were(*models: torch.nn.Module) -> Iterator[None]:
    """Put gradients and buffers back as they were."""
    gradients = [(p, p.grad) for model in models for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for model in models for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def casts(first: torch.nn.Module, second: torch.nn.Module) -> dict[torch.dtype, torch.dtype]:
    """Return which floating dtype of the first model is which of the second: that of most parameters."""
    others = dict(second.named_parameters())
    pairs = Counter((p.dtype, others[n].dtype) for n, p in first.named_parameters() if n in others)
    found: dict[torch.dtype, torch.dtype] = {}
    for (one, other), _ in pairs.most_common():
        if one.is_floating_point and other.is_floating_point:
            found.setdefault(one, other)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a structure with its tensors changed; a dict of a class of its own (transformers' outputs) is changed in place."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[mapped(item, change) for item in value])
    if type(value) in (list, tuple):
        return type(value)([mapped(item, change) for item in value])
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, dict):  # ModelOutput keeps its class
        for key in list(value):
            value[key] = mapped(value[key], change)
    return value


def wide(tensor: torch.Tensor) -> Any:
    """Return the elements as a float64, complex128 or integer array."""
    host = tensor.detach().cpu()
    if host.is_complex():
        return to_numpy(host.to(torch.complex128))
    return to_numpy(host.double() if host.is_floating_point() else host)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def unit_of(tensor: torch.Tensor) -> float:
    """Return the unit roundoff of a tensor's dtype, 0 for integers."""
    return roundoff(dtype_of(tensor))
