"""Two models, call by call in one process: the second makes each call of the first, on copies of the very inputs.

A call is a function (level ``api``), which is executed once more on the second model's device, or a module (level ``module``), for
which the module of the same path in the second model is called. The second execution is given copies of the inputs, in the second
model's device and dtype, under the same grad mode and autocast. For the backward the first model's call is executed once more on
copies, too: the program's own graph is not touched (no clones, no hooks but those that look at the gradient of a result), so writes
in place and views stay what the program meant. Both copies get the gradients that the program's call got. So no error is handed on,
and the first call that differs is the culprit: inner modules come before the module around them.

Random numbers: both sides begin at the state that the first model's generator had. Where the second device takes that state and
draws the same numbers, a function is compared; else the call is counted as not compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueup.foundation.facts.operators import has
from trueup.foundation.facts.slots import roundoff
from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.buffers import to_numpy
from trueup.recording.adapters.torch.functions import Names
from trueup.recording.adapters.torch.random_states import Generators, put, set_state, state_of
from trueup.recording.adapters.torch.tensors import is_plain, mapped, named_tensors
from trueup.recording.engine.replacing import Around
from trueup.recording.execution.judging import parallel
from trueup.recording.execution.local_error import Distance, Operand, Operation, judge, rounding
from trueup.recording.execution.shadow import LockstepResult, Parting

Named = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Execution:
    """A call made on copies."""

    outputs: Named  # what it returned and wrote, buffers of its module included
    leaves: Named  # inputs, and parameters of its module, that gradients are taken of


@dataclass
class Call:
    """A call of both models, waiting for its backward."""

    path: str
    kind: str  # class of a module, or name of a function
    level: str
    ordinal: int
    sides: tuple[Callable[..., Any], Callable[..., Any]]
    """What the first and what the second model call: a function twice, or two modules."""
    given: Any  # copies of what the first model's call was given, positional and by keyword
    modes: Callable[[torch.device], AbstractContextManager[Any]]
    drawn: bool = False  # whether random numbers were drawn
    gradients: Named = field(default_factory=dict)  # what the first model's call got in its backward: ``grad_output.0``
    buffers: Named = field(default_factory=dict)  # of the first model's module, before the call
    first: Execution | None = None
    second: Execution | None = None

    @property
    def inputs(self) -> Named:
        """The floating-point tensors that it was given."""
        return {slot: t for slot, t in named_tensors("input", *self.given) if t.is_floating_point()}


def parting(
    call: Call, phase: str, slot: str, expected: torch.Tensor, other: torch.Tensor, moved: Distance | None = None
) -> Parting:
    """Judge one tensor; ``moved`` is how far rounding of the inputs moves the first model's own result."""
    def said(state: str, error: float = 0.0, explained: float = 0.0, excess: float = 0.0, reason: str = "") -> Parting:
        place = call.path, call.kind, phase, call.ordinal, slot, dtype_of(other), tuple(other.shape)
        return Parting(*place, error, explained, excess, state, reason)

    if expected.shape != other.shape:
        text = f"its shape is {list(other.shape)}, the first model's {list(expected.shape)}"
        return said("wrong", excess=float("inf"), reason=text)
    distance = Distance.of(wide(expected), to_numpy(other.cpu()))
    dtype = dtype_of(expected) if unit_of(expected) > unit_of(other) else dtype_of(other)
    operation = Operation(call.kind, call.level, phase)
    norm = distance.truth_rms * distance.counted**0.5
    operands = [operand(name, tensor) for name, tensor in (call.gradients | call.inputs).items()] if phase == "backward" else []
    output = Operand(slot, dtype, tuple(other.shape), norm, distance.truth_largest)
    allowed = rounding(operation, operands, [output])[slot]
    found = judge(operation, dtype_of(other), distance, rounding=allowed, perturbed=moved)
    return said(found.verdict, found.error, found.explained, found.excess, found.sentence)


def operand(slot: str, tensor: torch.Tensor) -> Operand:
    """Describe a floating-point tensor that a call reads, by its numbers."""
    host = tensor.detach().cpu().double()
    largest = float(host.abs().max()) if host.numel() else 0.0
    return Operand(slot, dtype_of(tensor), tuple(tensor.shape), float(host.norm()), largest)


def gradients_of(made: Execution, arrived: Named) -> Named:
    """Return the gradients of leaves for those that arrived at outputs, as ``grad_<slot>``."""
    ends = [(t, arrived.get(slot.replace("output", "grad_output", 1))) for slot, t in made.outputs.items() if t.requires_grad]
    pairs = [(tensor, gradient.to(tensor.device, tensor.dtype)) for tensor, gradient in ends if gradient is not None]
    if not pairs or not made.leaves:
        return {}
    found = torch.autograd.grad([t for t, _ in pairs], [*made.leaves.values()], [g for _, g in pairs], allow_unused=True)
    return {f"grad_{slot}": gradient for slot, gradient in zip(made.leaves, found, strict=True) if gradient is not None}


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


NOT_PLAIN = "a tensor that is not a plain array"
RANDOM = "random numbers were drawn, and the two devices draw different ones"
RAISED = "the second model's module raised: {}"
TRANSFORMED = "inside a torch.func transform such as vmap, where tensors stand for several"

PASSED = frozenset({"torch.Tensor.backward", "torch.Tensor.detach", "torch.Tensor.data", "torch.Tensor.requires_grad_"})
"""Functions that are executed by the first model alone: they belong to its graph."""


class _Parted(Exception):
    """The culprit is known, and the run ends: no error."""


class Lockstep(ABC):
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
        self._calls: list[Call] = []
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
                    self._backward(loss_of(result, loss))
        except _Parted:
            pass
        finally:
            self._calls.clear()
        word: Any = "wrong" if self.culprit else "sound" if self.compared and not self.left else "could not tell"
        return LockstepResult(
            word, self.culprit, tuple(self.suspects), dict(self.compared), len(self.modules), dict(self.left.most_common())
        )

    @abstractmethod
    def _watching(self) -> AbstractContextManager[Any]:
        """Meet the first model's calls in a block, and hand each to `_follow`."""

    def _made(self, call: Call, side: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Named, Named]:  # noqa: ARG002
        """Make a call of either model; return its result, and the buffers and parameters of its module, by slot."""
        return side(*args, **kwargs), {}, {}

    # ---------------------------------------------------------------- forward
    def _follow(
        self, path: str, kind: str, level: str, sides: tuple[Callable[..., Any], Callable[..., Any]], run: Callable[..., Any],
        args: Any, kwargs: Any, buffers: Callable[[], Named] = dict,
    ) -> Any:  # fmt: skip
        """Make a call of the first model by ``run``, and beside it the second's; ``buffers`` returns those that it has now."""
        key = f"{path}|{kind}"
        before_it = {name: b.detach().clone() for name, b in buffers().items()}
        call = Call(
            path, kind, level, self._ordinals[key], sides, mapped((args, kwargs), _copied), _modes(self._home), buffers=before_it
        )
        self._ordinals[key] += 1
        self._calls.append(call)
        inputs = _numbered(args, kwargs)
        before = self._random.state()
        result = run(*args, **kwargs)
        after = self._random.state()
        call.drawn = self._random.drew(before)
        expected = dict(named_tensors("output", result)) | _written(inputs)
        if expected:
            try:
                self._beside(call, expected | {f"buffer.{n}": b for n, b in buffers().items() if "." not in n}, before)
            finally:
                put(after)
            self._watch_gradients(call, result)
        return result

    def _beside(self, call: Call, expected: Named, before: Any) -> None:
        """Make the second model's call and compare; where gradients follow, the first model's once more."""
        if call.drawn and call.level == "module" and not self._one_kind:  # what it drew is not all of its result
            self.left[RANDOM] += 1
            return
        try:
            if call.drawn:
                put(before)
                if not self._one_kind and (state := state_of(str(self._home))) is not None:
                    set_state(str(self._device), state)  # so that it begins where the first one's did
            second = self._executed(call, call.sides[1], self._device, self._to_second)
        except Exception as error:  # noqa: BLE001 - whatever the second model does, the comparison goes on
            self.left[RAISED.format(f"{type(error).__name__}: {first_line(error, 80)}")] += 1
            return
        if call.drawn and not self._one_kind and not _one_draw(expected, second.outputs):
            self.left[RANDOM] += 1
            return
        if torch.is_grad_enabled() and any(t.requires_grad for t in second.outputs.values()):
            put(before)
            call.first, call.second = self._executed(call, call.sides[0], self._home, lambda t: t.detach().clone()), second
        self.modules.add(call.path)
        self._compare(call, "forward", expected, second.outputs)

    def _executed(self, call: Call, side: Callable[..., Any], device: torch.device, change: Change) -> Execution:
        """Make a call of either model on a device, with copies of what it was given as ``change`` makes them."""
        leaves: Named = {}
        seen: dict[int, torch.Tensor] = {}
        named = named_tensors("input", *call.given)

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in seen:
                leaf = change(tensor).requires_grad_(tensor.requires_grad)
                seen[id(tensor)] = leaf.clone() if tensor.requires_grad else leaf  # it may be written, which a leaf may not
                leaves.update({slot: leaf for slot, t in named if t is tensor and tensor.requires_grad})
            return seen[id(tensor)]

        self._busy = True
        try:
            args, kwargs = (self._there(value, device) for value in mapped(call.given, made))
            inputs = _numbered(args, kwargs)
            with call.modes(device):
                result, buffers, own = self._made(call, side, args, kwargs)
        finally:
            self._busy = False
        return Execution(dict(named_tensors("output", result)) | _written(inputs) | buffers, leaves | own)

    def _to_second(self, tensor: torch.Tensor) -> torch.Tensor:
        host = tensor.device.type == "cpu" and self._home.type != "cpu"
        where = tensor.device if host else self._device
        return tensor.detach().to(where, self._casts.get(tensor.dtype, tensor.dtype), copy=True)

    def _there(self, value: Any, device: torch.device) -> Any:
        """Name the device that stands for the first model's one."""
        if isinstance(value, torch.device):
            return device if value.type == self._home.type else value
        if isinstance(value, str) and value.partition(":")[0] == self._home.type:
            return str(device)
        if type(value) in (list, tuple):
            return type(value)([self._there(item, device) for item in value])
        return {k: self._there(v, device) for k, v in value.items()} if type(value) is dict else value

    # ---------------------------------------------------------------- backward
    def _watch_gradients(self, call: Call, result: Any) -> None:
        for slot, tensor in named_tensors("output", result) if call.first is not None else ():
            if tensor.grad_fn is not None and tensor.requires_grad:
                tensor.register_hook(_keeps(call.gradients, slot.replace("output", "grad_output", 1)))

    def _backward(self, loss: torch.Tensor) -> None:
        if not loss.requires_grad:
            self.left["nothing requires a gradient: no backward"] += 1
            return
        loss.backward()
        # The call that began last is the first in backward, and a module comes before the module that it is part of.
        for call in reversed(self._calls):
            if call.gradients and call.first is not None and call.second is not None:
                self._compare(call, "backward", *(gradients_of(made, dict(call.gradients)) for made in (call.first, call.second)))
            call.first = call.second = call.given = None

    # ---------------------------------------------------------------- comparing
    def _moved(self, call: Call, phase: str, slot: str, expected: torch.Tensor) -> Distance | None:
        """Say how far the first model's result moves when its inputs are rounded as the second's, and by one unit more."""
        if call.drawn or slot.startswith("buffer."):
            return None
        source = torch.Generator().manual_seed(1)

        def near(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor.detach().clone()
            other = tensor.detach().to(self._casts.get(tensor.dtype, tensor.dtype))
            signs = torch.randint(0, 2, tensor.shape, generator=source).mul_(2).sub_(1).to(tensor.device)
            return (other.to(tensor.dtype) * (1 + torch.finfo(other.dtype).eps * signs)).contiguous()

        try:
            with torch.set_grad_enabled(phase == "backward"):
                found = self._executed(call, call.sides[0], self._home, near)
            arrived = {name: near(gradient) for name, gradient in call.gradients.items()}  # they are rounded on their way, too
            other = (gradients_of(found, arrived) if phase == "backward" else found.outputs).get(slot)
        except RuntimeError:
            return None
        return None if other is None or other.shape != expected.shape else Distance.of(wide(expected), wide(other.detach()))

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

    def _compare(self, call: Call, phase: str, truth: Named, made: Named) -> None:
        at_all = False
        for slot, expected in truth.items():
            other = made.get(slot)
            if other is None:
                continue
            if not is_plain(expected) or not is_plain(other):
                self.left[NOT_PLAIN] += 1
                continue
            at_all = True
            found = parting(call, phase, slot, expected.detach(), other.detach())
            if found.state in ("wrong", "suspicious") and (moved := self._moved(call, phase, slot, expected.detach())) is not None:
                found = parting(call, phase, slot, expected.detach(), other.detach(), moved)
            if found.state == "wrong":
                self.culprit = found
                self.compared[phase] += 1
                raise _Parted
            if found.state == "suspicious":
                self.suspects.append(found)
        self.compared[phase] += at_all


class ModuleLockstep(Lockstep):
    """Compares module by module: the module of the same path in the second model stands beside the first one's."""

    @contextmanager
    def _watching(self) -> Iterator[None]:
        replacement = Around(torch.nn.Module, "__call__", self._around)
        replacement.install()
        try:
            yield
        finally:
            replacement.remove()

    def _around(self, original: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if path is None or self._busy or torch._C._current_graph_task_id() != -1:
            return original(module, *args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            return original(module, *args, **kwargs)

        sides = module, self._others[path]
        return self._follow(path, type(module).__name__, "module", sides, run, args, kwargs, lambda: dict(module.named_buffers()))

    def _made(self, call: Call, side: Any, args: Any, kwargs: Any) -> tuple[Any, Named, Named]:
        """Call a module of either model with buffers of its own: those that the first one's had."""
        held: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
        swapped: Named = {}
        for path, owner in side.named_modules():
            for name, buffer in owner._buffers.items():
                full = f"{path}.{name}" if path else name
                if buffer is not None and full in call.buffers:
                    swapped[full] = call.buffers[full].to(buffer.device, buffer.dtype, copy=True)
                    held.append((owner, name, buffer, swapped[full]))
        try:
            for owner, name, _, instead in held:
                owner._buffers[name] = instead
            result = side(*args, **kwargs)
        finally:
            for owner, name, buffer, _ in held:
                owner._buffers[name] = buffer
        own = {f"param.{name}": p for name, p in side.named_parameters(recurse=False) if p.requires_grad}
        return result, {f"buffer.{name}": b for name, b in swapped.items() if "." not in name}, own


class FunctionLockstep(Lockstep):
    """Compares function by function: each is executed on the second model's device as well. Buffers and weights come as inputs of
    the functions that read them."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__(first, second)
        self._running: list[str] = []

    @contextmanager
    def _watching(self) -> Iterator[None]:
        replacement = Around(torch.nn.Module, "__call__", self._around)
        replacement.install()
        try:
            with _Mode(self):
                yield
        finally:
            replacement.remove()

    def _around(self, original: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._running.append(self._paths.get(id(module), self._running[-1] if self._running else ""))
        try:
            return original(module, *args, **kwargs)
        finally:
            self._running.pop()

    def called(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function for the first model, and beside it for the second."""
        inputs = [tensor for _, tensor in named_tensors("input", args, kwargs)]
        transformed = torch._C._functorch.maybe_current_level() is not None
        if transformed or not inputs or not all(map(is_plain, inputs)):
            if transformed or inputs:
                self.left[TRANSFORMED if transformed else NOT_PLAIN] += 1
            return func(*args, **kwargs)
        return self._follow(self._running[-1] if self._running else "", name, "api", (func, func), func, args, kwargs)


class _Mode(TorchFunctionMode):
    def __init__(self, owner: FunctionLockstep) -> None:
        super().__init__()
        self._owner = owner
        self._names = Names()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._owner._busy or torch._C._current_graph_task_id() != -1:
            return func(*args, **kwargs)
        name = self._names.of(func)
        if name is None or has(name, "allocates") or name in PASSED:
            return func(*args, **kwargs)
        return self._owner.called(name, func, args, kwargs)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy what a call is given before it writes it; whether it requires a gradient is kept, not its graph."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _numbered(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor, int | None]]:
    """Return what a call is given, each tensor with its version (an inference tensor has none), to tell later what it wrote."""
    named = named_tensors("input", args, kwargs)
    return [(slot.replace("input", "output.written", 1), t, None if t.is_inference() else t._version) for slot, t in named]


def _written(given: list[tuple[str, torch.Tensor, int | None]]) -> Named:
    return {slot: tensor for slot, tensor, version in given if version is not None and tensor._version != version}


def _modes(home: torch.device) -> Callable[[torch.device], ExitStack]:
    """Note grad mode and autocast as they are now, to be entered for another device."""
    grad = torch.is_grad_enabled()
    casts = {kind: torch.get_autocast_dtype(kind) for kind in {home.type, "cpu"} if torch.is_autocast_enabled(kind)}

    def modes(device: torch.device) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(device.type if kind == home.type else kind, dtype=dtype, cache_enabled=False))
        return stack

    return modes


def _one_draw(expected: Named, made: Named) -> bool:
    """Tell whether two devices drew the same numbers: their results then point the same way."""
    same = [slot for slot, t in expected.items() if slot in made and made[slot].shape == t.shape]
    return bool(same) and all(parallel(wide(expected[slot]), wide(made[slot])) for slot in same)


def _keeps(into: Named, slot: str) -> Callable[[torch.Tensor], None]:
    def keep(gradient: torch.Tensor) -> None:
        into[slot] = gradient.detach().clone()

    return keep
