"""Two models, module by module in one process: the second model's module gets what the first one's got, forward and backward.

While the first model runs, each of its module calls is followed at once by the call of the module of the same path in the second
model, on copies of the same inputs; inner modules come before the module around them, so what a module's own functions do is
compared when the modules inside agree. In backward each module of the second model gets the gradients that the first one's got. So
no error is handed on, and the first module that differs is the culprit.

Where a call drew random numbers, the other model's is given the same draw, if that is possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trueup.foundation.facts.roundoff import roundoff
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.buffers import to_numpy
from trueup.recording.adapters.torch.random_states import Generators, put
from trueup.recording.adapters.torch.tensors import is_plain, mapped, named_tensors
from trueup.recording.engine.replacing import Around
from trueup.recording.execution.local_error import Distance, Operand, Operation, judge, rounding
from trueup.recording.execution.shadow import LockstepResult, Parting

Named = dict[str, torch.Tensor]


@dataclass
class Side:
    """A call of both models: where it stands, and what its judgement takes."""

    path: str
    kind: str  # class of a module, or name of a function
    level: str
    ordinal: int
    mine: Named = field(default_factory=dict)  # the second model's inputs: leaves of a graph of their own
    gradients: Named = field(default_factory=dict)  # of the first model's call: ``grad_output.0``, ``grad_input.0``


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
    """Return gradients of a module's inputs and own parameters, from those the first model's module got, rounded to the dtypes
    ``through`` first."""
    arrived = {slot: g.to((through or {}).get(g.dtype, g.dtype)) for slot, g in step.gradients.items()}
    own = {f"param.{name}": p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    return gradients_of(outputs, inputs | own, arrived)


def gradients_of(outputs: Named, leaves: Named, arrived: Named) -> Named:
    """Return the gradients of leaves for those that arrived at outputs, as ``grad_<slot>``."""
    ends = [(t, arrived.get(slot.replace("output", "grad_output", 1))) for slot, t in outputs.items() if t.requires_grad]
    pairs = [(tensor, gradient.to(tensor.device, tensor.dtype)) for tensor, gradient in ends if gradient is not None]
    if not pairs or not leaves:
        return {}
    found = torch.autograd.grad([t for t, _ in pairs], [*leaves.values()], [g for _, g in pairs], allow_unused=True)
    return {f"grad_{slot}": gradient for slot, gradient in zip(leaves, found, strict=True) if gradient is not None}


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


NOT_PLAIN = "a tensor that is no plain array"
RANDOM = "random numbers were drawn, and the two devices draw different ones"
RAISED = "the second model's module raised: {}"


class _Parted(Exception):
    """The culprit is known, and the run ends: no error."""


class Lockstep:
    """Runs the comparison; see `trueup.lockstep`."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        self._first, self._second = first, second
        self._paths = {id(module): path for path, module in first.named_modules()}
        self._others = dict(second.named_modules())
        missing = [path for path in self._paths.values() if path not in self._others]
        if missing:
            raise TrueupError(
                f"the two models do not line up: the second has no module {missing[0]!r} (of {len(missing)} that it lacks)\n"
                "  expected: the same model twice, on two devices or in two dtypes\n  next:     build both from the same code"
            )
        self._casts = casts(first, second)
        self._home, self._device = (next((p.device for p in m.parameters()), torch.device("cpu")) for m in (first, second))
        self._random = Generators((self._home, self._device))
        self._one_kind = self._home.type == self._device.type
        """Whether both models draw from generators of one kind, so that the same state gives the same numbers."""
        self._busy = False
        self._calls: list[Any] = []
        self._ordinals: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.modules: set[str] = set()
        self.left: Counter[str] = Counter()
        self.culprit: Parting | None = None
        self.suspects: list[Parting] = []

    def run(
        self, inputs: Any, keywords: Mapping[str, Any], loss: Callable[[Any], torch.Tensor] | None, *, backward: bool
    ) -> LockstepResult:
        """Run both models; return what they showed."""
        try:
            with kept_as_they_were(self._first, self._second):
                self._weights()
                with self._watching():
                    result = self._first(*inputs, **keywords)
                if backward:
                    self._backward(result, loss)
        except _Parted:
            pass
        finally:
            self._calls.clear()
        word: Any = "wrong" if self.culprit else "sound" if self.compared and not self.left else "could not tell"
        return LockstepResult(
            word, self.culprit, tuple(self.suspects), dict(self.compared), len(self.modules), dict(self.left.most_common())
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Meet the first model's calls."""
        replacement = Around(torch.nn.Module, "__call__", self._around)
        replacement.install()
        try:
            yield
        finally:
            replacement.remove()

    # ---------------------------------------------------------------- forward
    def _around(self, original: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None or self._busy or torch._C._current_graph_task_id() != -1:
            return original(module, *args, **kwargs)
        step = Call(path, type(module).__name__, "module", self._ordinals[path], module=module, other=self._others[path])
        self._ordinals[path] += 1
        self._calls.append(step)
        step.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        copies = self._copied((args, kwargs))
        args, kwargs = self._entered(step, (args, kwargs))
        before = self._random.state()
        result = original(module, *args, **kwargs)
        result = self._left_module(step, result)
        step.given, step.call = copies, original
        self._beside(step, before)
        return result

    def _copied(self, given: Any) -> Any:
        """Copy what the first model's module is given to the second's device and dtype, before anything is written in place."""
        seen: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in seen:
                made = tensor.detach().to(self._device, self._casts.get(tensor.dtype, tensor.dtype), copy=True)
                seen[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            return seen[id(tensor)]

        return mapped(given, copy)

    def _entered(self, step: Call, given: Any) -> Any:
        """Put a copy of each input into the graph: the gradient that arrives there is this module's own."""
        made: dict[int, torch.Tensor] = {}
        for slot, tensor in named_tensors("input", *given):
            if not (tensor.requires_grad and torch.is_grad_enabled() and is_plain(tensor)):
                continue
            if id(tensor) not in made:
                made[id(tensor)] = tensor.clone()
                made[id(tensor)].register_hook(_keeps(step.gradients, slot.replace("input", "grad_input", 1)))
                step.inputs[slot] = made[id(tensor)]
        return mapped(given, lambda tensor: made.get(id(tensor), tensor))

    def _left_module(self, step: Call, result: Any) -> Any:
        made: dict[int, torch.Tensor] = {}
        for slot, tensor in named_tensors("output", result):
            step.outputs[slot] = tensor.detach().clone() if is_plain(tensor) else tensor
            if tensor.requires_grad and torch.is_grad_enabled() and is_plain(tensor) and id(tensor) not in made:
                made[id(tensor)] = tensor.clone()
                made[id(tensor)].register_hook(_keeps(step.gradients, slot.replace("output", "grad_output", 1)))
        return mapped(result, lambda tensor: made.get(id(tensor), tensor))

    def _beside(self, step: Call, before: Any) -> None:
        """Call the second model's module and compare."""
        step.drawn = self._random.drew(before)
        if step.drawn and not self._one_kind:
            self.left[RANDOM] += 1
            self._calls.remove(step)
            return
        args, kwargs = step.given
        step.mine = {slot: t for slot, t in named_tensors("input", args, kwargs) if t.requires_grad}
        after = self._random.state()
        try:
            if step.drawn:
                put(before)
            result, buffers = self._called(step, step.other, step.given)
        except Exception as error:  # noqa: BLE001 - whatever the second model does, the comparison goes on
            self.left[RAISED.format(f"{type(error).__name__}: {first_line(error, 80)}")] += 1
            self._calls.remove(step)
            return
        finally:
            if step.drawn:
                put(after)
        step.made = dict(named_tensors("output", result))
        self.modules.add(step.path)
        own = {f"buffer.{n}": b for n, b in step.module.named_buffers(recurse=False)}
        mine = {f"buffer.{n}": b for n, b in buffers.items() if "." not in n}
        self._compare(step, "forward", step.outputs | own, step.made | mine)
        if not any(tensor.requires_grad for tensor in step.made.values()):
            self._calls.remove(step)
        step.outputs = {}

    def _called(self, step: Call, module: torch.nn.Module, given: Any) -> tuple[Any, Named]:
        """Call a module of either model beside the run, with buffers of its own; return its result and those buffers."""
        args, kwargs = mapped(given, lambda tensor: tensor.clone())  # it may write them in place, and a leaf it may not
        held: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
        swapped: Named = {}
        for path, owner in module.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{path}.{name}" if path else name
                if buffer is not None and full in step.buffers:
                    swapped[full] = step.buffers[full].to(buffer.device, buffer.dtype, copy=True)
                    held.append((owner, name, buffer, swapped[full]))
        self._busy = True
        try:
            for owner, name, _, instead in held:
                owner._buffers[name] = instead
            assert step.call is not None
            return step.call(module, *args, **kwargs), swapped
        finally:
            self._busy = False
            for owner, name, buffer, _ in held:
                owner._buffers[name] = buffer

    # ---------------------------------------------------------------- backward
    def _backward(self, result: Any, loss: Callable[[Any], torch.Tensor] | None) -> None:
        value = loss_of(result, loss)
        if not value.requires_grad:
            self.left["nothing requires a gradient: no backward"] += 1
            return
        value.backward()
        self._compare_all_backward()

    def _compare_all_backward(self) -> None:
        summed: dict[tuple[str, str], torch.Tensor] = {}
        uses: Counter[tuple[str, str]] = Counter()
        # The module that began last is the first in backward, and comes before the module that it is part of.
        for step in reversed(self._calls):
            self._compare_backward(step, summed, uses)

    def _compare_backward(self, step: Call, summed: dict[tuple[str, str], torch.Tensor], uses: Counter[tuple[str, str]]) -> None:
        made = local_gradients(step, step.other, step.mine, step.made)
        for slot in [slot for slot in made if slot.startswith("grad_param.")]:
            key = step.path, slot
            summed[key] = summed[key] + made[slot] if key in summed else made[slot]
            uses[key] += 1
            made[slot] = summed[key]
        truth = {slot: g for slot, g in step.gradients.items() if slot.startswith("grad_input")}
        for name, p in step.module.named_parameters(recurse=False):
            whole = uses[step.path, f"grad_param.{name}"] == self._ordinals[step.path]  # the last of its calls
            if p.grad is not None and whole and not self._tied(p):
                truth[f"grad_param.{name}"] = p.grad
        self._compare(step, "backward", truth, made)
        step.made = {}

    def _tied(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether several modules hold a parameter: its gradient is the sum of theirs."""
        holders = sum(parameter is p for m in self._first.modules() for p in m._parameters.values())
        return holders > 1

    # -------------------------------------------------------------- comparing
    def _moved(self, step: Any, phase: str, slot: str, expected: torch.Tensor) -> Distance | None:
        """Say how far the first model's result moves when its inputs are rounded as the second's, and by one unit more."""
        if step.drawn or step.given is None or slot.startswith("buffer."):
            return None
        back = {other: one for one, other in self._casts.items()}
        source = torch.Generator().manual_seed(1)
        made: dict[int, torch.Tensor] = {}

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                near = tensor.detach().to(self._home, back.get(tensor.dtype, tensor.dtype), copy=True)
                if tensor.is_floating_point():
                    signs = torch.randint(0, 2, tensor.shape, generator=source).mul_(2).sub_(1).to(self._home)
                    near = near * (1 + torch.finfo(tensor.dtype).eps * signs)
                made[id(tensor)] = near.to(back.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)
            return made[id(tensor)]

        try:
            given = mapped(step.given, other)
            with torch.enable_grad() if phase == "backward" else torch.no_grad():
                result, _ = self._called(step, step.module, given)
                outputs = dict(named_tensors("output", result))
                inputs = {s: t for s, t in named_tensors("input", *given) if t.requires_grad}
                if phase == "backward":
                    outputs = local_gradients(step, step.module, inputs, outputs, self._casts)
                found = outputs.get(slot)
        except RuntimeError:
            return None
        if found is None or found.shape != expected.shape:
            return None
        return Distance.of(wide(expected), wide(found.detach()))

    def _weights(self) -> None:
        others = dict(self._second.named_parameters())
        for name, parameter in self._first.named_parameters():
            other = others.get(name)
            if other is None or other.shape != parameter.shape or not is_plain(parameter) or not is_plain(other):
                continue
            distance = Distance.of(wide(parameter), to_numpy(other.detach().cpu()))
            unit = max(unit_of(parameter), unit_of(other))
            if distance.relative > 4 * unit or distance.disagreeing:
                path, _, slot = name.rpartition(".")
                self.culprit = Parting(
                    path, type(self._first.get_submodule(path)).__name__, "forward", 0, f"param.{slot}", dtype_of(other),
                    tuple(other.shape), distance.relative, 4 * unit, distance.relative / (4 * unit), "wrong",
                    "the two models have other weights",
                )  # fmt: skip
                raise _Parted

    def _compare(self, step: Side, phase: str, truth: Named, made: Named) -> None:
        at_all = False
        for slot, expected in truth.items():
            other = made.get(slot)
            if other is None:
                continue
            if not is_plain(expected) or not is_plain(other):
                self.left[NOT_PLAIN] += 1
                continue
            at_all = True
            found = parting(step, phase, slot, expected.detach(), other.detach())
            if found.state in ("wrong", "suspicious") and (moved := self._moved(step, phase, slot, expected.detach())) is not None:
                found = parting(step, phase, slot, expected.detach(), other.detach(), moved)
            if found.state == "wrong":
                self.culprit = found
                self.compared[phase] += 1
                raise _Parted
            if found.state == "suspicious":
                self.suspects.append(found)
        self.compared[phase] += at_all


def _keeps(into: Named, slot: str) -> Callable[[torch.Tensor], None]:
    def keep(gradient: torch.Tensor) -> None:
        into[slot] = gradient.detach().clone()

    return keep
