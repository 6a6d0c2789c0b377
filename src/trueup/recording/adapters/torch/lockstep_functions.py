"""Two models, call by call in one process: each function that the first model calls is executed on the second's device as well.

The second execution is given copies of the very inputs, in the second model's device and dtype, under the same grad mode and
autocast. For the backward the first model's call is executed once more on copies, too: its own graph is not touched (no clones, no
hooks but those that look at the gradient of a result), so writes in place and views stay what the program meant. Both copies get
the gradients that the program's call got. Buffers and weights come as inputs of the functions that read them.

Random numbers: both sides begin at the state that the first model's generator had. Where the second device takes that state and
draws the same numbers, the call is compared; else it is counted as not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trueup.foundation.facts.operators import has
from trueup.foundation.words.wording import first_line
from trueup.recording.adapters.torch.functions import Names
from trueup.recording.adapters.torch.lockstep import NOT_PLAIN, RAISED, RANDOM, Lockstep, Named, Side, _keeps, gradients_of, wide
from trueup.recording.adapters.torch.random_states import put, set_state, state_of
from trueup.recording.adapters.torch.tensors import is_plain, mapped, named_tensors
from trueup.recording.execution.judging import parallel
from trueup.recording.execution.local_error import Distance

PASSED = frozenset({"torch.Tensor.backward", "torch.Tensor.detach", "torch.Tensor.data", "torch.Tensor.requires_grad_"})
"""Functions that are executed by the first model alone: they belong to its graph."""

TRANSFORMED = "inside a torch.func transform such as vmap, where tensors stand for several"

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Execution:
    """A function executed on copies."""

    outputs: Named  # what it returned and wrote
    leaves: Named  # inputs that gradients are taken of


@dataclass
class FunctionCall(Side):
    """A function call of both models, waiting for its backward."""

    function: Callable[..., Any] = field(default=lambda: None)
    given: Any = None  # copies of what the first model's call was given
    drawn: bool = False
    modes: Callable[[torch.device], ExitStack] = field(default=lambda _: ExitStack())
    first: Execution | None = None
    second: Execution | None = None


class FunctionLockstep(Lockstep):
    """Runs the comparison call by call; see `trueup.lockstep`."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__(first, second)
        self._running: list[str] = []

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with super()._watching(), _Mode(self):
            yield

    def _around(self, original: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._running.append(self._paths.get(id(module), self._running[-1] if self._running else ""))
        try:
            return original(module, *args, **kwargs)
        finally:
            self._running.pop()

    # ---------------------------------------------------------------- forward
    def called(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a function for the first model, and beside it for the second."""
        inputs = named_tensors("input", args, kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            self.left[TRANSFORMED] += 1
            return func(*args, **kwargs)
        if not inputs or not all(is_plain(t) for _, t in inputs):
            if inputs:
                self.left[NOT_PLAIN] += 1
            return func(*args, **kwargs)
        scope = self._running[-1] if self._running else ""
        key = f"{scope}|{name}"
        step = FunctionCall(scope, name, "api", self._ordinals[key], function=func)
        self._ordinals[key] += 1
        step.given = mapped((args, kwargs), _copied)
        step.modes = _modes(self._home)
        versions = [t._version for _, t in inputs]
        before = self._random.state()
        result = func(*args, **kwargs)
        after = self._random.state()
        step.drawn = self._random.drew(before)
        expected = dict(named_tensors("output", result))
        expected |= {
            slot.replace("input", "output.written", 1): t for (slot, t), v in zip(inputs, versions, strict=True) if t._version != v
        }  # fmt: skip
        if expected:
            try:
                self._beside_function(step, expected, before)
            finally:
                put(after)
            self._watch_gradients(step, result)
        return result

    def _beside_function(self, step: FunctionCall, expected: Named, before: Any) -> None:
        try:
            if step.drawn:
                put(before)
                if not self._one_kind and (state := state_of(str(self._home))) is not None:
                    set_state(str(self._device), state)  # so that it begins where the first one's did
            step.second = self._executed(step, self._device, self._to_second)
        except Exception as error:  # noqa: BLE001 - whatever the second device does, the comparison goes on
            self.left[RAISED.format(f"{type(error).__name__}: {first_line(error, 80)}")] += 1
            return
        if step.drawn and not self._one_kind and not _one_draw(expected, step.second.outputs):
            self.left[RANDOM] += 1
            step.second = None
            return
        if torch.is_grad_enabled() and any(t.requires_grad for t in step.second.outputs.values()):
            put(before)
            step.first = self._executed(step, self._home, lambda t: t.detach().clone())
            self._calls.append(step)
        step.mine = {s: t for s, t in named_tensors("input", *step.given) if t.is_floating_point()}
        self.modules.add(step.path)
        self._compare(step, "forward", expected, step.second.outputs)

    def _executed(self, step: FunctionCall, device: torch.device, change: Change) -> Execution:
        leaves: Named = {}
        seen: dict[int, torch.Tensor] = {}

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in seen:
                leaf = change(tensor).requires_grad_(tensor.requires_grad)
                seen[id(tensor)] = leaf.clone() if tensor.requires_grad else leaf  # it may be written, which a leaf may not
                leaves.update({slot: leaf for slot, t in named if t is tensor and tensor.requires_grad})
            return seen[id(tensor)]

        named = named_tensors("input", *step.given)
        self._busy = True
        try:
            args, kwargs = mapped(step.given, made)
            args, kwargs = self._there(args, device), self._there(kwargs, device)
            versions = {slot: t._version for slot, t in named_tensors("input", args, kwargs)}
            with step.modes(device):
                result = step.function(*args, **kwargs)
        finally:
            self._busy = False
        written = {
            slot.replace("input", "output.written", 1): t for slot, t in named_tensors("input", args, kwargs)
            if t._version != versions[slot]
        }  # fmt: skip
        return Execution(dict(named_tensors("output", result)) | written, leaves)

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
    def _watch_gradients(self, step: FunctionCall, result: Any) -> None:
        if step.first is None or not torch.is_grad_enabled():
            return
        for slot, tensor in named_tensors("output", result):
            if tensor.grad_fn is not None and tensor.requires_grad:
                tensor.register_hook(_keeps(step.gradients, slot.replace("output", "grad_output", 1)))

    def _compare_all_backward(self) -> None:
        for step in reversed(self._calls):
            if step.gradients and step.first is not None and step.second is not None:
                arrived = dict(step.gradients)
                made = (gradients_of(one.outputs, one.leaves, arrived) for one in (step.first, step.second))
                self._compare(step, "backward", *made)
            step.first = step.second = step.given = None

    # -------------------------------------------------------------- comparing
    def _moved(self, step: FunctionCall, phase: str, slot: str, expected: torch.Tensor) -> Distance | None:
        """Say how far the first model's result moves when its inputs are rounded as the second's, and by one unit more."""
        if step.drawn or step.given is None:
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
                found = self._executed(step, self._home, near)
            arrived = {name: near(gradient) for name, gradient in step.gradients.items()}  # they are rounded on their way, too
            outputs = gradients_of(found.outputs, found.leaves, arrived) if phase == "backward" else found.outputs
        except RuntimeError:
            return None
        other = outputs.get(slot)
        return None if other is None or other.shape != expected.shape else Distance.of(wide(expected), wide(other.detach()))


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
