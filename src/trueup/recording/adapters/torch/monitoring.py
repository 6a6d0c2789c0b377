"""What `trueup monitor` takes of a PyTorch training, by few hooks: no call is recorded.

Each step: what ``backward()`` is called on, learning rates, the loss scale, the norm of each parameter's gradient as the optimizer
gets it and of all before clipping. Each `Wanted.every` steps everything else. All reductions run on the tensors' device under
``no_grad``, write nothing that the training reads and draw no random numbers; a step's numbers are joined into one tensor a device,
which travels once. On an accelerator it is read when the next step ends, so that nothing waits.

Modules that torch.compile compiled are not read inside: a hook there would change what is compiled.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trueup.foundation.kernels import ABOVE, ALIKE, APART, PAST_CACHES, SPREAD, STREAMED, copy, digest, streams
from trueup.foundation.settings import Group, severity
from trueup.recording.adapters.torch.context import paths, wrapped
from trueup.recording.adapters.torch.environment import describe_run, rank_and_world
from trueup.recording.adapters.torch.models import optimizer_facts
from trueup.recording.adapters.torch.monitored_layers import HALVES, TorchLayers, collectives
from trueup.recording.engine.monitored_step import DIGEST_BITS, EDGES, GOLDEN, ITERATIONS, Made, StepProbe
from trueup.recording.engine.monitoring import Block, Floats, Listener, Numbers, Wanted, labels
from trueup.recording.engine.replacing import Around

MOMENTUM = ("exp_avg", "momentum_buffer")  # state of Adam and its kind, of SGD
VARIANCE = ("exp_avg_sq",)
NO_ENDS = -math.inf, math.inf
CHUNK = 1 << 24  # elements that are widened at a time
KINDS = {getattr(torch, name): number for name, number in STREAMED.items()}
PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes of tensors that are their memory


class TorchKernels:
    """See `trueup.recording.engine.monitored_step.Kernels`."""

    def size(self, tensor: torch.Tensor) -> int:
        return int(plain([tensor])[0].numel())

    def norms(self, tensors: Sequence[torch.Tensor]) -> Numbers:
        """By kernels over all of a device at once."""
        rows = read(SPREAD, tensors)
        if rows is not None:
            return np.sqrt(rows[:, 0])
        held = plain(tensors)
        try:
            return list(torch._foreach_norm(held, 2, torch.float32))
        except (TypeError, RuntimeError):  # before PyTorch 2.4, or of dtypes that it does not take
            return [torch.linalg.vector_norm(one.float()) for one in held]

    def differences(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Numbers:
        rows = read(APART, tensors, others)
        if rows is not None:
            return np.sqrt(rows[:, [1, 0]]).T.ravel()
        held, before = plain(tensors), plain(others)
        return [*self.norms(torch._foreach_sub(held, before)), *self.norms(held)]

    def alike(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Numbers:
        rows = read(ALIKE, tensors, others)
        if rows is not None:
            return np.concatenate([rows[:, 2], rows[:, 3], np.sqrt(rows[:, 0]), np.sqrt(rows[:, 1])])
        ones, twos = plain(tensors), plain(others)
        products = [one.float() * other.float() for one, other in zip(ones, twos, strict=True)]
        signs = [one.sign().sum() for one in products]  # costs a tenth of a count
        return [*(one.sum() for one in products), *signs, *self.norms(ones), *self.norms(twos)]

    def above(self, momenta: Sequence[torch.Tensor], variances: Sequence[torch.Tensor]) -> Numbers:
        rows = read(ABOVE, momenta, variances)
        if rows is not None:
            return np.concatenate([np.sqrt(rows[:, 1]), np.sqrt(rows[:, 0]), rows[:, 3]])
        m, v = plain(momenta), plain(variances)
        signs = [torch.addcmul(two, one, one, value=-1.0).sign().sum() for one, two in zip(m, v, strict=True)]
        return [*self.norms(v), *self.norms(m), *signs]

    def spread(self, tensor: torch.Tensor, ends: tuple[float, float] | None) -> Numbers:
        half = tensor.dtype in HALVES
        if ends is None and half:  # what is above the largest number but one is at the largest
            most = torch.finfo(tensor.dtype).max
            below = most * (1 - torch.finfo(tensor.dtype).eps / 2)
        rows = read(SPREAD, [tensor], ends=ends or ((-below, below) if half else NO_ENDS))
        if rows is not None:
            squares, _, _, _, low, high, others, beyond = rows[0].tolist()
            return np.array([math.sqrt(squares), low, high, others, *([beyond] if ends is not None or half else ())])
        # On a CPU the norm of infinity takes 20 times as long as both ends.
        norm = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
        numbers = [norm, *torch.aminmax(tensor), torch.count_nonzero(tensor)]
        if ends is not None:
            numbers.append(((tensor < ends[0]) | (tensor > ends[1])).sum())
        elif half:
            numbers.append((tensor.abs() >= torch.finfo(tensor.dtype).max).sum())
        return numbers

    def ends(self, tensors: Sequence[torch.Tensor]) -> Numbers:
        rows = read(SPREAD, tensors)
        if rows is not None:
            return rows[:, [4, 5]].T.ravel()
        found = [torch.aminmax(one) for one in plain(tensors)]
        return [*(one.min for one in found), *(one.max for one in found)]

    def moved(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Numbers:
        pairs = [((one - other).abs(), other.abs()) for one, other in zip(plain(tensors), plain(others), strict=True)]
        return [(change <= edge * size).sum() for edge in EDGES for change, size in pairs]

    def routes(self, logits: torch.Tensor) -> list[torch.Tensor]:
        held = logits.reshape(-1, logits.shape[-1])
        each = held.float().softmax(-1)
        share = each.mean(0)
        chosen = (held.argmax(-1)[:, None] == torch.arange(held.shape[-1], device=held.device)).float().mean(0)
        entropy = -(each * each.clamp_min(1e-30).log()).sum(-1).mean()
        return [chosen.amax(), -(share * share.clamp_min(1e-30).log()).sum(), held.abs().amax(), entropy]

    def moments(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        held = tensor.float()
        rest = (held - held.mean()).square()
        return [held.mean(), rest.square().mean() / rest.mean().square(), tensor.isfinite().logical_not().sum()]

    def spectrum(self, weight: torch.Tensor) -> list[torch.Tensor]:
        vector = torch.arange(weight.shape[1], device=weight.device, dtype=torch.float32).mul_(GOLDEN).cos_()
        for _ in range(ITERATIONS):
            vector = weight.T @ (weight @ torch.nn.functional.normalize(vector, dim=0))
        return [torch.linalg.vector_norm(vector).sqrt(), torch.linalg.vector_norm(weight)]

    def similarity(self, rows: torch.Tensor) -> list[torch.Tensor]:
        held, count = torch.nn.functional.normalize(rows, dim=1), rows.shape[0]
        return [(held.sum(0).square().sum() - count) / max(1, count * (count - 1))]

    def matrix(self, weight: torch.Tensor) -> torch.Tensor | None:
        held = plain([weight])[0]
        return held.float().flatten(1) if held.dim() > 1 and held.numel() else None


class TorchProbe(StepProbe):
    """See `trueup.recording.engine.monitoring.Probe`; without ``models`` the outermost modules with parameters that run in the
    first step are read."""

    kernels = TorchKernels()
    _layers: TorchLayers

    def __init__(
        self, listener: Listener, wanted: Wanted, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:  # fmt: skip
        super().__init__(listener, wanted, models, optimizers)
        self._waiting: list[tuple[torch.Tensor, Made]] = []
        self._travelling: tuple[list[tuple[torch.Tensor, torch.Tensor, Any, list[tuple[int, Made]]]], list[Block]] | None = None
        self._travels = 0  # the step of what travels
        self._clips_at: float | None = None  # the largest norm that the script allows
        self._room: list[torch.Tensor] = []  # where weights are copied to
        self._scaled: weakref.ref[torch.Tensor] | None = None
        self._scaler: tuple[Any, bool] | None = None  # that makes a step now, and whether that reached the optimizer
        self._hooks: list[Any] = []
        self._replaced: list[Any] = []

    def make_layers(self) -> TorchLayers:
        return TorchLayers(self)

    # ---------------------------------------------------------------- life
    def attach(self) -> None:
        scaler, clip = torch.amp.grad_scaler.GradScaler, torch.nn.utils.clip_grad
        self._replaced = [
            Around(torch.autograd, "_engine_run_backward", self._backward), Around(scaler, "scale", self._scale),
            Around(scaler, "step", self._scaler_step), Around(clip, "_get_total_norm", self._measured),
            Around(clip, "_clip_grads_with_norm_", self._clips), *self._layers.replacements(),
            *(collectives(self._layers) if "collectives" in self._wanted.also else ()),
        ]  # fmt: skip
        for one in self._replaced:
            one.install()
        self._hooks = [
            register_optimizer_step_pre_hook(self._guard(self._before, "an optimizer's step")),
            register_optimizer_step_post_hook(self._guard(self._after, "an optimizer's step")),
        ]
        for model in self._wanted_models:
            self._adopt(model)
        if not self._models:
            self._hooks.append(register_module_forward_pre_hook(self._ran))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for one in self._replaced:
            one.remove()
        self._hooks, self._replaced = [], []
        self._layers.remove()

    def rank_and_world(self) -> tuple[int | None, int]:
        return rank_and_world()

    def describe(self) -> dict[str, Any]:
        devices = dict.fromkeys(str(p.device) for model in self._models for p in model.parameters())
        return describe_run(list(devices))

    def settings(self) -> dict[str, Any]:
        modules = {
            scope: {"class": type(module).__name__, **_set_numbers("module", vars(module))}
            for scope, module in self._layers.known()
        }  # fmt: skip
        optimizers = []
        with suppress(Exception):  # one of the user's own may hold anything
            facts = optimizer_facts(self.optimizer, waits=False)
            clips = {} if self._clips_at is None else {"clipping": self._clips_at}
            groups = [_set_numbers("optimizer", {**facts.settings, **more, **clips}) for more in ({}, *facts.groups)]
            optimizers = [{"class": facts.classes[0], "groups": groups}]
        return {"modules": modules, "optimizers": optimizers}

    def add(self, numbers: Numbers, made: Made, *, sampled: bool = True) -> None:  # noqa: ARG002
        if isinstance(numbers, np.ndarray) or all(isinstance(one, float) for one in numbers):
            self._host += made(np.asarray(numbers, np.float64)) if len(numbers) else ()
        else:
            self._waiting.append((torch.stack([torch.as_tensor(one).detach().reshape(()).float() for one in numbers]), made))

    def untracked(self) -> Any:
        return torch.no_grad()

    def _guard(self, call: Callable[..., Any], what: str) -> Callable[..., None]:
        def guarded(*given: Any) -> None:
            if not torch.compiler.is_compiling():
                self.guarded(what, call, *given)

        return guarded

    # ---------------------------------------------------------------- the model
    def _ran(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._layers.scopes or next(module.parameters(), None) is None:
            return
        self.guarded("a module", self._adopt, module)
        self._given(module, args, sys._getframe(1).f_locals.get("kwargs", {}))  # its own hook runs from the next call on

    def _adopt(self, model: torch.nn.Module) -> None:
        many = f"{len(self._models)}." if self._models else ""  # the second of two models: a discriminator
        self._models.append(model)
        for name, module in paths(wrapped(model)):
            self._layers.add(many + name, module)
            for own, parameter in module.named_parameters(recurse=False):
                self._names.setdefault(id(parameter), f"{many}{name}.{own}".replace("..", ".").lstrip("."))
                if torch.distributed.is_available() and torch.distributed.is_initialized() and parameter.requires_grad:
                    hook = self._guard(partial(self._accumulated, self._names[id(parameter)]), "a gradient")
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        self._hooks.append(model.register_forward_pre_hook(self._given, with_kwargs=True))

    def _given(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return  # what is compiled, a checkpoint that is computed again
        self._layers.trains = torch.is_grad_enabled()
        if not self._layers.trains:
            return
        self.guarded("a step's beginning", self._listener.begins, model)
        self._layers.awake = self.sampled  # a capture may have ended here
        if self._listener.paused:
            return
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.dim()]
        words = next((one for one in tensors if one.dtype in (torch.int64, torch.int32)), None)
        self._counted[1] += 0 if words is None else words.numel()
        self._counted[2] += tensors[0].shape[0] if tensors else 0

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if self.sampled and parameter.grad is not None:
            self._local[name] = self.kernels.norms([parameter.grad])[0]

    def parameters(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return [one for group in optimizer.param_groups for one in group["params"]]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def moment(self, optimizer: Optimizer, parameter: torch.Tensor, *, second: bool = False) -> torch.Tensor | None:
        held = optimizer.state.get(parameter, {}) if parameter in optimizer.state else {}
        return next((held[name] for name in (VARIANCE if second else MOMENTUM) if isinstance(held.get(name), torch.Tensor)), None)

    def rates(self, optimizer: Optimizer) -> list[Any]:
        return [group.get("lr") for group in optimizer.param_groups]

    def copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """On a CPU into the same memory each time: fresh pages cost twice as much as what is written to them; and past the caches,
        by which the lines that are filled are not read before."""
        held = [one.detach() for one in tensors]
        alike = len(held) == len(self._room) and all(
            one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and one.stride() == other.stride()
            for one, other in zip(held, self._room, strict=True)
        )  # fmt: skip
        if not alike:
            self._room = [one.clone() for one in held]
        else:
            rest = []
            for one, room in zip(held, self._room, strict=True):
                if one.nbytes >= PAST_CACHES and type(one) in PLAIN and one.is_cpu and one.is_contiguous():
                    copy(*(each.view(-1).view(torch.uint8).numpy() for each in (one, room)))
                else:
                    rest.append((room, one))
            if rest:
                torch._foreach_copy_([to for to, _ in rest], [one for _, one in rest])
        return self._room

    def scale(self, scaler: Any) -> torch.Tensor | None:
        scale = getattr(scaler, "_scale", None)
        return scale if isinstance(scale, torch.Tensor) else None

    # ---------------------------------------------------------------- what happens in a step
    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") and not self._listener.paused and not torch.compiler.is_compiling():
            self.guarded("the loss", self._take_loss, tensors)
            if "micro-batches" in self._wanted.also and self.sampled:
                result = original(tensors, *args, **kwargs)
                self.guarded("a backward pass", self.passed, [p.grad for model in self._models for p in model.parameters()])
                return result
        return original(tensors, *args, **kwargs)

    def _take_loss(self, tensors: Any) -> None:
        one = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if not isinstance(one, torch.Tensor) or one.numel() != 1:
            return
        if self._scaled is not None and self._scaled() is one:
            self._scaled = None
            return
        self._add_loss(one)

    def _add_loss(self, loss: torch.Tensor) -> None:
        if loss.is_cpu:
            self.lost(loss.item())  # a number of Python's: each operation on a tensor takes longer than the number does
            return
        value = loss.detach().reshape(()).float()
        self.lost(value.to(self._loss.device) if isinstance(self._loss, torch.Tensor) else value.clone())

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        result = original(scaler, outputs)
        if not self._listener.paused and isinstance(outputs, torch.Tensor) and outputs.numel() == 1 and scaler.is_enabled():
            self.guarded("the loss", self._add_loss, outputs)
            self._scaled = weakref.ref(result)
        return result

    def _measured(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._listener.paused:
            self._clipped.append((result.detach() if isinstance(result, torch.Tensor) else None, None))
        return result

    def _clips(self, original: Any, parameters: Any, max_norm: float, *rest: Any, **kwargs: Any) -> Any:
        if self._clipped and not self._listener.paused and isinstance(max_norm, (int, float)):
            self._clipped[-1] = self._clipped[-1][0], float(max_norm)
            self._clips_at = float(max_norm)
        return original(parameters, max_norm, *rest, **kwargs)

    def _scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled() or self._scaler is not None:
            return original(scaler, optimizer, *args, **kwargs)
        self._scaler = scaler, False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._scaler[1]:
                self.guarded("a skipped step", self._skipped, scaler, optimizer)
        finally:
            self._scaler = None
        return result

    def _skipped(self, scaler: Any, optimizer: Optimizer) -> None:
        if self.follows(optimizer):
            if not self._listener.paused:
                self.gradients(optimizer)
            self.end(optimizer, skipped=True, scaler=scaler)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._scaler is not None:
            self._scaler = self._scaler[0], True
        closure = any(map(callable, (*args[1:2], kwargs.get("closure"))))
        if not self._listener.paused and self.follows(optimizer) and not closure:
            self.before(optimizer)  # with a closure gradients come later: they are taken after the step

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.follows(optimizer):
            return
        if not self._listener.paused:
            if any(map(callable, (*args[1:2], kwargs.get("closure")))):
                self.gradients(optimizer)
            self.after(optimizer)
        self.end(optimizer, scaler=self._scaler[0] if self._scaler is not None else None)

    # ---------------------------------------------------------------- its end
    def finish(self) -> None:
        super().finish()
        if self._models and self._hooks and not self._wanted_models:
            self._wanted_models = list(self._models)
            for hook in [one for one in self._hooks if getattr(one, "hooks_dict_ref", lambda: None)() is _global_hooks()]:
                hook.remove()  # later modules are parts of these, or of no training

    def hand_over(self) -> None:
        before, of = self._travelling, self._travels
        arrived = self.send()
        self._forget()
        if arrived is not None:
            self._listener.arrived(arrived, None if before is None else of)
        self.over()
        self._travels = self._listener.step - 1

    def send(self) -> list[Block] | None:
        """Of this step on a CPU, else of the step before."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, Made]]] = {}
        for vector, made in self._waiting:
            by_device.setdefault(vector.device, []).append((vector, made))
        sent = []
        for device, held in by_device.items():
            packed = torch.cat([vector for vector, _ in held])
            target = packed
            if device.type != "cpu":
                pinned = device.type == "cuda"
                target = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=pinned)
                target.copy_(packed, non_blocking=pinned)
            sent.append((target, packed, _event(device), [(len(vector), made) for vector, made in held]))
        now = (sent, self._host)
        self._waiting, self._host = [], []
        if all(event is None for _, _, event, _ in sent) and self._travelling is None:
            return _arrived(*now)
        before, self._travelling = self._travelling, now
        return None if before is None else _arrived(*before)

    def drain(self) -> None:
        before, self._travelling = self._travelling, None
        if before is not None:
            self._listener.arrived(_arrived(*before), self._travels)

    def digests(self) -> None:
        named = {self._names[id(p)]: p for model in self._models for p in model.parameters() if id(p) in self._names}
        names = labels("digest", list(named))
        on_cpu = [p.device.type == "cpu" for p in named.values()]
        if all(on_cpu):
            found = [float(_bytes_digest(p) & DIGEST_BITS) for p in named.values()]
            self._host.append((names, np.array(found)))
        else:  # a float32 vector would not hold them: two halves of 24 bits each travel
            halves = [half for p in named.values() for half in _device_digest(p)]
            self.add(halves, lambda got: [(names, got[0::2] * (1 << 24) + got[1::2])])


def _event(device: torch.device) -> Any:
    """Return an event behind what a device was asked for; None where a copy waits for it."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _arrived(sent: Sequence[tuple[torch.Tensor, torch.Tensor, Any, Sequence[tuple[int, Made]]]], host: list[Block]) -> list[Block]:
    blocks = list(host)
    for target, _, event, held in sent:
        if event is not None:
            event.synchronize()
        values = target.numpy().astype(np.float64)
        at = 0
        for count, made in held:
            blocks += made(values[at : at + count])
            at += count
    return blocks


def _set_numbers(group: Group, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of settings that change what is computed; rates have a series, and counts of parameters are no setting."""
    return {
        name: value for name, value in held.items()
        if type(value) in (int, float) and math.isfinite(value) and name not in ("lr", "parameters")
        and severity(group, name) == "changes"
    }  # fmt: skip


def _global_hooks() -> Any:
    return torch.nn.modules.module._global_forward_pre_hooks


def plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of each: a shard of a DTensor, the values of a sparse gradient."""
    return [one if type(one) in PLAIN and one.layout is torch.strided else _own(one) for one in tensors]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach()
    held = held.to_local() if hasattr(held, "to_local") else held
    return held.coalesce().values() if held.is_sparse else held


def read(
    what: int, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = (), ends: tuple[float, float] = NO_ENDS
) -> Floats | None:  # fmt: skip
    """Return a row of the compiled kernel (`trueup.foundation.kernels.streams`) for each tensor or pair on a CPU, of what this rank
    holds of it; None where a tensor is none for it."""
    if tensors and not tensors[0].is_cpu:
        return None
    kept: list[torch.Tensor] = []  # until the kernel has read them
    table = _table(tensors, others, kept)
    if table is None:
        table = _table(plain(tensors), plain(others), kept)
    return None if table is None else streams(what, table, ends, torch.get_num_threads())


def _table(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor], kept: list[torch.Tensor]) -> NDArray[np.int64] | None:
    """Return what the kernel is told of tensors or pairs; ``kept`` gets the copies that have to be made."""
    try:
        if not others:
            return _entries(ones, kept)
        pairs = [(one, other) if other.stride() == one.stride() and other.numel() == one.numel() else _alike(one, other)
                 for one, other in zip(ones, others, strict=True)]  # fmt: skip
        left, right = (_entries([pair[side] for pair in pairs], kept) for side in (0, 1))
    except RuntimeError:  # a tensor that stands for another, or of another size
        return None
    if left is None or right is None:
        return None
    left[:, 2:4] = right[:, :2]
    return left


def _entries(tensors: Sequence[torch.Tensor], kept: list[torch.Tensor]) -> NDArray[np.int64] | None:
    table: list[int] = []
    for one in tensors:
        kind = KINDS.get(one.dtype)
        if kind is None or type(one) not in PLAIN or not one.is_cpu or one.layout is not torch.strided:
            return None
        if not one.is_contiguous():
            one = _in_a_row(one)
        kept.append(one)
        table += (one.data_ptr(), kind, 0, 0, one.numel())
    return np.array(table, np.int64).reshape(-1, 5)


def _alike(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors whose elements lie in the same order."""
    return one.contiguous(), other.contiguous().reshape(one.shape)


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order in which they lie, or a copy where they do not lie in a row."""
    held = tensor.permute(sorted(range(tensor.dim()), key=lambda k: (-tensor.stride(k), -tensor.shape[k])))
    return held if held.is_contiguous() else tensor.contiguous()


def _bytes_digest(parameter: torch.Tensor) -> int:
    held = plain([parameter])[0].contiguous().reshape(-1).view(torch.uint8)
    return int(digest(held.numpy()))


def _device_digest(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 48 bits of a sum over the bits of a tensor, each weighted by its place: exact in whatever order."""
    held = plain([parameter])[0].contiguous().reshape(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[held.element_size()]
    bits, total = held.view(kind), torch.zeros((), dtype=torch.int64, device=held.device)
    for at in range(0, len(bits), CHUNK):
        part = bits[at : at + CHUNK].to(torch.int64)
        places = torch.arange(at, at + len(part), device=held.device, dtype=torch.int64)
        total = total + (part * (2 * places + 0x9E3779B1)).sum()
    return (total >> 24) & 0xFFFFFF, total & 0xFFFFFF


def steps_made(optimizer: Optimizer) -> int | None:
    """Return how many steps an optimizer has made, as its state tells (Adam and its kind after a checkpoint was loaded)."""
    for held in list(optimizer.state.values())[:1]:
        step = held.get("step") if isinstance(held, dict) else None
        if step is not None:
            return int(step)
    return None


def probe(
    listener: Listener, wanted: Wanted, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
) -> TorchProbe:  # fmt: skip
    """Return the probe of this framework."""
    return TorchProbe(listener, wanted, models, optimizers)
