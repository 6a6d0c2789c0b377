"""Two models, module by module in one process: the second model's module gets what the first one's got, forward and backward.

While the first model runs, each of its module calls is followed at once by the call of the module of the same path in the second
model, on copies of the same inputs; inner modules come before the module around them, so what a module's own functions do is
compared when the modules inside agree. In backward each module of the second model gets the gradients that the first one's got. So
no error is handed on, and the first module that differs is the culprit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.host import to_numpy
from trueup.recording.adapters.torch.layouts import is_plain
from trueup.recording.adapters.torch.lockstep_call import (
    Call,
    Named,
    Side,
    casts,
    dtype_of,
    kept_as_they_were,
    local_gradients,
    loss_of,
    mapped,
    parting,
    unit_of,
    wide,
)
from trueup.recording.adapters.torch.lockstep_random import RandomStates
from trueup.recording.adapters.torch.tensors import named_tensors
from trueup.recording.execution.local_error import Distance
from trueup.recording.execution.lockstep_result import LockstepResult, Parting
from trueup.recording.recorder.replacing import Replacement

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
        self._device = next((p.device for p in second.parameters()), torch.device("cpu"))
        self._random = RandomStates(next((p.device for p in first.parameters()), torch.device("cpu")), self._device)
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
        replacement = Replacement(torch.nn.Module, "__call__", self._around)
        replacement.install()
        try:
            yield
        finally:
            replacement.remove()

    # ---------------------------------------------------------------- forward
    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None or self._busy or torch._C._current_graph_task_id() != -1:
                return original(module, *args, **kwargs)
            step = Call(
                path, type(module).__name__, "module", self._ordinals[path], module=module, other=self._others[path]
            )  # fmt: skip
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

        return call

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
        step.drawn = self._random.drawn(before)
        if step.drawn and not self._random.shared:
            self.left[RANDOM] += 1
            self._calls.remove(step)
            return
        args, kwargs = step.given
        step.mine = {slot: t for slot, t in named_tensors("input", args, kwargs) if t.requires_grad}
        after = self._random.state()
        try:
            if step.drawn:
                self._random.set(before)
            result, buffers = self._called(step, step.other, step.given)
        except Exception as error:  # noqa: BLE001 - whatever the second model does, the comparison goes on
            self.left[RAISED.format(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}")] += 1
            self._calls.remove(step)
            return
        finally:
            if step.drawn:
                self._random.set(after)
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

    def _compare_backward(
        self, step: Call, summed: dict[tuple[str, str], torch.Tensor], uses: Counter[tuple[str, str]]
    ) -> None:
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
        device = next((p.device for p in self._first.parameters()), torch.device("cpu"))
        back = {other: one for one, other in self._casts.items()}
        source = torch.Generator().manual_seed(1)
        made: dict[int, torch.Tensor] = {}

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in made:
                near = tensor.detach().to(device, back.get(tensor.dtype, tensor.dtype), copy=True)
                if tensor.is_floating_point():
                    signs = torch.randint(0, 2, tensor.shape, generator=source).mul_(2).sub_(1).to(device)
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
