"""What `trueup monitor` takes of a PyTorch training, by few hooks: no call is recorded.

Each step: what ``backward()`` is called on, learning rates, the loss scale, the norm of each parameter's gradient as the optimizer
gets it and of all before clipping. Each `Wanted.every` steps everything else. All reductions run on the tensors' device under
``no_grad``, write nothing that the training reads and draw no random numbers; a step's numbers are joined into one tensor a device,
which travels once. On an accelerator it is read when the next step ends, so that nothing waits.

Modules that torch.compile compiled are not read inside: a hook there would change what is compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trueup.foundation.kernels import digest
from trueup.recording.adapters.torch.context import paths, wrapped
from trueup.recording.adapters.torch.environment import describe_run, rank_and_world
from trueup.recording.adapters.torch.monitored_layers import Layers
from trueup.recording.engine.monitoring import Block, Listener, Names, Wanted, by_layer, joined
from trueup.recording.engine.replacing import Around, Replacement

Floats = NDArray[np.float64]
Made = Callable[[Floats], Sequence[Block]]
MOMENTUM = ("exp_avg", "momentum_buffer")  # state of Adam and its kind, of SGD
VARIANCE = "exp_avg_sq"
DIGEST_BITS = (1 << 52) - 1  # a float64 holds them exactly
CHUNK = 1 << 24  # elements that are widened at a time


class TorchProbe:
    """See `trueup.recording.engine.monitoring.Probe`; without ``models`` the outermost modules with parameters that run in the
    first step are read."""

    def __init__(
        self, listener: Listener, wanted: Wanted, models: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:  # fmt: skip
        self._listener, self._wanted = listener, wanted
        self._only = [weakref.ref(one) for one in optimizers]
        self._models: list[torch.nn.Module] = []
        self._names: dict[int, str] = {}  # of parameters, by identity
        self._layers = Layers(self)
        self._plans: dict[tuple[int, bytes], _Plan] = {}
        self._primary: weakref.ref[Optimizer] | None = None
        self._waiting: list[tuple[torch.Tensor, Made]] = []
        self._host: list[Block] = []
        self._travelling: tuple[list[tuple[torch.Tensor, torch.Tensor, Any, list[tuple[int, Made]]]], list[Block]] | None = None
        self._loss: torch.Tensor | None = None
        self._scaled: weakref.ref[torch.Tensor] | None = None
        self._counted = np.zeros(3)  # backward passes, tokens, samples of the present step
        self._clipped: list[tuple[torch.Tensor | None, float | None]] = []
        self._copies: list[torch.Tensor] = []
        self._scaler: tuple[Any, bool] | None = None  # that makes a step now, and whether that reached the optimizer
        self._hooks: list[Any] = []
        self._replaced: list[Replacement] = []
        self._wanted_models = list(models)
        self._local: dict[str, torch.Tensor] = {}  # norms of gradients before reduction

    # ---------------------------------------------------------------- life
    def attach(self) -> None:
        scaler, clip = torch.amp.grad_scaler.GradScaler, torch.nn.utils.clip_grad
        self._replaced = [
            Around(torch.autograd, "_engine_run_backward", self._backward), Around(scaler, "scale", self._scale),
            Around(scaler, "step", self._scaler_step), Around(clip, "_get_total_norm", self._measured),
            Around(clip, "_clip_grads_with_norm_", self._clips), *self._layers.replacements(),
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
            self._hooks.append(register_module_forward_pre_hook(self._guard(self._ran, "a module")))

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

    @property
    def sampled(self) -> bool:
        """Whether the present step has everything."""
        return not self._listener.paused and self._listener.step % self._wanted.every == 0

    def add(self, numbers: Sequence[torch.Tensor], made: Made) -> None:
        """Add numbers of the present step: tensors of one element on one device, and what makes blocks of them on the host."""
        if numbers:
            self._waiting.append((torch.stack([one.detach().reshape(()).float() for one in numbers]), made))

    def guarded(self, what: str, call: Callable[..., Any], *given: Any) -> None:
        """Call something of ours, which the training must not feel."""
        try:
            with torch.no_grad():
                call(*given)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._listener.failed(error, what)

    def _guard(self, call: Callable[..., Any], what: str) -> Callable[..., None]:
        def guarded(*given: Any) -> None:
            if not torch.compiler.is_compiling():
                self.guarded(what, call, *given)

        return guarded

    # ---------------------------------------------------------------- the model
    def _ran(self, module: torch.nn.Module, _: Any) -> None:
        if id(module) not in self._layers.scopes and next(module.parameters(), None) is not None:
            self._adopt(module)

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
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return  # what is compiled, a checkpoint that is computed again, an evaluation
        self.guarded("a step's beginning", self._listener.begins, model)
        if self._listener.paused:
            return
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.dim()]
        words = next((one for one in tensors if one.dtype in (torch.int64, torch.int32)), None)
        self._counted[1] += 0 if words is None else words.numel()
        self._counted[2] += tensors[0].shape[0] if tensors else 0

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if self.sampled and parameter.grad is not None:
            self._local[name] = _norms([parameter.grad])[0]

    # ---------------------------------------------------------------- what happens in a step
    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad") and not self._listener.paused and not torch.compiler.is_compiling():
            self.guarded("the loss", self._take_loss, tensors)
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
        value = loss.detach().reshape(()).double() if loss.device.type == "cpu" else loss.detach().reshape(()).float()
        self._loss = value.clone() if self._loss is None else self._loss + value.to(self._loss.device)
        self._counted[0] += 1

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
        if self._follows(optimizer):
            if not self._listener.paused:
                self._gradients(optimizer)
            self._end(optimizer, skipped=True, scaler=scaler)

    def _follows(self, optimizer: Optimizer) -> bool:
        return not self._only or any(one() is optimizer for one in self._only)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._scaler is not None:
            self._scaler = self._scaler[0], True
        closure = any(map(callable, (*args[1:2], kwargs.get("closure"))))
        if self._listener.paused or not self._follows(optimizer) or closure:
            return  # with a closure gradients come later: they are taken after the step
        plan = self._gradients(optimizer)
        if plan is not None and self.sampled:
            plan.compare_with_momentum(self, optimizer)
            self._copies = [one.detach().clone() for one in plan.parameters(optimizer)]

    def _gradients(self, optimizer: Optimizer) -> _Plan | None:
        every = _parameters(optimizer)
        mask = np.array([one.grad is not None for one in every], bool)
        if not mask.any():
            return None
        key = id(optimizer), mask.tobytes()
        if key not in self._plans:
            if len(self._plans) > 256:
                self._plans.clear()
            self._plans[key] = _Plan([self._named(k, one) for k, one in enumerate(every)], mask)
        plan = self._plans[key]
        plan.gradient_norms(self, [one.grad for one in every if one.grad is not None])
        return plan

    def _named(self, place: int, parameter: torch.Tensor) -> str:
        return self._names.setdefault(id(parameter), f"parameter{place}")

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._follows(optimizer):
            return
        if self._listener.paused:
            self._end(optimizer, skipped=False, scaler=None)
            return
        if any(map(callable, (*args[1:2], kwargs.get("closure")))):
            plan = self._gradients(optimizer)
        else:
            every = _parameters(optimizer)
            plan = self._plans.get((id(optimizer), np.array([one.grad is not None for one in every], bool).tobytes()))
        if plan is not None and self.sampled:
            plan.updates(self, optimizer, self._copies)
        self._copies = []
        self._end(optimizer, skipped=False, scaler=self._scaler[0] if self._scaler is not None else None)

    # ---------------------------------------------------------------- its end
    def _end(self, optimizer: Optimizer, *, skipped: bool, scaler: Any) -> None:
        rates = [group.get("lr") for group in optimizer.param_groups]
        known = self._primary() if self._primary is not None else None
        first = known is None or known is optimizer
        if first and self._listener.paused:
            self._loss, self._counted, self._clipped, self._local = None, np.zeros(3), [], {}
            self._primary = weakref.ref(optimizer)
            self._listener.ended([])
            return
        self._rates(rates, "" if first else f"{type(optimizer).__name__}.")
        if not first:  # its numbers are of the step that the first optimizer ends
            return
        self._primary = weakref.ref(optimizer)
        self._host.append((_SKIPPED, np.array([float(skipped)])))
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor):
            self.add([scale], lambda got: [(_SCALE, got)])
        self._finish()

    def _rates(self, rates: Sequence[Any], prefix: str) -> None:
        names = _rate_names(prefix, len(rates))
        if any(isinstance(one, torch.Tensor) for one in rates):
            self.add([torch.as_tensor(one) for one in rates], lambda got: [(names, got)])
        else:
            self._host.append((names, np.array([np.nan if one is None else float(one) for one in rates])))

    def end_step(self) -> None:
        if self._listener.paused:
            self._listener.ended([])
            return
        self._host.append((_SKIPPED, np.zeros(1)))
        self.guarded("the end of a step", self._finish)

    def _finish(self) -> None:
        if self._loss is not None:
            loss = self._loss
            if loss.device.type == "cpu":
                self._host.append((_LOSS, np.array([float(loss)])))
            else:
                self.add([loss], lambda got: [(_LOSS, got)])
        self._host.append((_COUNTS, self._counted))
        for total, most in self._clipped[-1:]:
            if total is not None:
                self.add([total], partial(_clip, most))
        if self._local:
            names, norms = list(self._local), list(self._local.values())
            layers, places = by_layer(names)
            labels = _labels("local_gradient_norm", layers)
            self.add(norms, lambda got: [(labels, joined(got, places, len(layers)))])
        self._layers.finish()
        step = self._listener.step
        if self._wanted.digests and step % self._wanted.digests == 0 and self.rank_and_world()[1] > 1:
            self._digests()
        arrived = self._send()
        self._loss, self._counted, self._clipped, self._local = None, np.zeros(3), [], {}
        if len(self._models) and self._hooks and not self._wanted_models:
            self._wanted_models = list(self._models)
            for hook in [one for one in self._hooks if getattr(one, "hooks_dict_ref", lambda: None)() is _global_hooks()]:
                hook.remove()  # later modules are parts of these, or of no training
        if arrived is not None:
            self._listener.ended(arrived)

    def _send(self) -> list[Block] | None:
        """Let the step's numbers travel; return those that have arrived: of this step on a CPU, else of the step before."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, Made]]] = {}
        for vector, made in self._waiting:
            by_device.setdefault(vector.device, []).append((vector, made))
        sent = []
        for device, held in by_device.items():
            packed = torch.cat([vector for vector, _ in held])
            event = None
            target = packed
            if device.type != "cpu":
                module = getattr(torch, device.type, None)
                pinned = device.type == "cuda"
                target = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=pinned)
                target.copy_(packed, non_blocking=pinned)
                if pinned and module is not None:
                    event = module.Event()
                    event.record()
            sent.append((target, packed, event, [(len(vector), made) for vector, made in held]))
        now = (sent, self._host)
        self._waiting, self._host = [], []
        if all(event is None for _, _, event, _ in sent) and self._travelling is None:
            return _arrived(*now)
        before, self._travelling = self._travelling, now
        return None if before is None else _arrived(*before)

    def drain(self) -> None:
        before, self._travelling = self._travelling, None
        if before is not None:
            self._listener.ended(_arrived(*before))

    def _digests(self) -> None:
        named = {self._names[id(p)]: p for model in self._models for p in model.parameters() if id(p) in self._names}
        names = _labels("digest", list(named))
        on_cpu = [p.device.type == "cpu" for p in named.values()]
        if all(on_cpu):
            found = [float(_bytes_digest(p) & DIGEST_BITS) for p in named.values()]
            self._host.append((names, np.array(found)))
        else:  # a float32 vector would not hold them: two halves of 24 bits each travel
            halves = [half for p in named.values() for half in _device_digest(p)]
            self.add(halves, lambda got: [(names, got[0::2] * (1 << 24) + got[1::2])])


_LOSS: Names = ("loss",)
_SKIPPED: Names = ("skipped",)
_SCALE: Names = ("loss_scale",)
_COUNTS: Names = ("backward_passes", "tokens", "samples")
_CLIP: Names = ("gradient_norm_before_clip", "clip_ratio")
_UNCLIPPED: Names = ("gradient_norm_before_clip",)
_TOTAL: Names = ("gradient_norm",)
_label_cache: dict[tuple[str, tuple[str, ...]], Names] = {}


def _labels(kind: str, scopes: Sequence[str]) -> Names:
    key = kind, tuple(scopes)
    if key not in _label_cache:
        _label_cache[key] = tuple(f"{kind}/{scope}" if scope else kind for scope in scopes)
    return _label_cache[key]


def _rate_names(prefix: str, count: int) -> Names:
    return _labels("lr", [f"{prefix}{k}" for k in range(count)])


def _clip(most: float | None, got: Floats) -> Sequence[Block]:
    if most is None:
        return [(_UNCLIPPED, got)]
    ratio = min(1.0, most / got[0]) if got[0] > 0 else 1.0
    return [(_CLIP, np.array([got[0], ratio]))]


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


def _global_hooks() -> Any:
    return torch.nn.modules.module._global_forward_pre_hooks


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of each: a shard of a DTensor, the values of a sparse gradient."""
    found = []
    for one in tensors:
        held = one.to_local() if hasattr(one, "to_local") else one
        found.append(held.coalesce().values() if held.is_sparse else held)
    return found


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the l2 norm of each, float32, by kernels over all of a device at once."""
    plain = _plain(tensors)
    try:
        return list(torch._foreach_norm(plain, 2, torch.float32))
    except (TypeError, RuntimeError):  # before PyTorch 2.4, or of dtypes that it does not take
        return [torch.linalg.vector_norm(one.float()) for one in plain]


def _bytes_digest(parameter: torch.Tensor) -> int:
    held = _plain([parameter.detach()])[0].contiguous().reshape(-1).view(torch.uint8)
    return int(digest(held.numpy()))


def _device_digest(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 48 bits of a sum over the bits of a tensor, each weighted by its place: exact in whatever order."""
    held = _plain([parameter.detach()])[0].contiguous().reshape(-1)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[held.element_size()]
    bits, total = held.view(kind), torch.zeros((), dtype=torch.int64, device=held.device)
    for at in range(0, len(bits), CHUNK):
        part = bits[at : at + CHUNK].to(torch.int64)
        places = torch.arange(at, at + len(part), device=held.device, dtype=torch.int64)
        total = total + (part * (2 * places + 0x9E3779B1)).sum()
    return (total >> 24) & 0xFFFFFF, total & 0xFFFFFF


class _Plan:
    """Names of series for one set of parameters with gradients."""

    def __init__(self, names: Sequence[str], mask: NDArray[np.bool_]) -> None:
        self._mask = mask
        self._layers, self._places = by_layer([name for name, there in zip(names, mask, strict=True) if there])
        self._labels = {
            kind: _labels(kind, self._layers)
            for kind in (
                "gradient_norm", "update_ratio", "weight_norm", "momentum_norm", "variance_norm", "momentum_to_variance",
                "momentum_above_variance", "gradient_momentum_cosine", "gradient_momentum_agreement",
            )
        }  # fmt: skip

    def parameters(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return [one for one, there in zip(_parameters(optimizer), self._mask, strict=True) if there]

    def _of_layers(self, got: Floats) -> Floats:
        return joined(got, self._places, len(self._layers))

    def _sums(self, got: Floats) -> Floats:
        found: Floats = np.bincount(self._places, got, len(self._layers)).astype(np.float64)
        return found

    def gradient_norms(self, probe: TorchProbe, gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of each layer's gradient and of all."""

        def made(got: Floats) -> Sequence[Block]:
            with np.errstate(over="ignore", invalid="ignore"):
                layers = self._of_layers(got)
                return [(_TOTAL, np.sqrt(np.sum(got * got, keepdims=True))), (self._labels["gradient_norm"], layers)]

        probe.add(_norms(gradients), made)

    def compare_with_momentum(self, probe: TorchProbe, optimizer: Optimizer) -> None:
        """Take the cosine of gradient and momentum, and the share of elements whose signs agree, before the step mixes them."""
        pairs = [(one.grad, _state(optimizer, one, MOMENTUM)) for one in self.parameters(optimizer)]
        if any(momentum is None for _, momentum in pairs):
            return
        gradients, momenta = _plain([g for g, _ in pairs]), _plain([m for _, m in pairs])
        products = [g.float() * m.float() for g, m in zip(gradients, momenta, strict=True)]
        numbers = [*(one.sum() for one in products), *(one.sign().sum() for one in products), *_norms(gradients), *_norms(momenta)]
        sizes = self._sums(np.array([float(one.numel()) for one in products]))

        def made(got: Floats) -> Sequence[Block]:
            dots, agree, of_gradients, of_momenta = got.reshape(4, -1)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                cosine = self._sums(dots) / (self._of_layers(of_gradients) * self._of_layers(of_momenta))
                shares = (1 + self._sums(agree) / sizes) / 2
            return [(self._labels["gradient_momentum_cosine"], cosine), (self._labels["gradient_momentum_agreement"], shares)]

        probe.add(numbers, made)

    def updates(self, probe: TorchProbe, optimizer: Optimizer, copies: Sequence[torch.Tensor]) -> None:
        """Take what the step made: the ratio of update and weights, and the moments."""
        parameters = self.parameters(optimizer)
        weights = _norms([one.detach() for one in parameters])
        if len(copies) == len(parameters):
            plain = _plain([one.detach() for one in parameters])
            apart = _norms(torch._foreach_sub(plain, _plain(copies)))

            def ratio(got: Floats) -> Sequence[Block]:
                made, held = (self._of_layers(half) for half in got.reshape(2, -1))
                with np.errstate(divide="ignore", invalid="ignore"):
                    return [(self._labels["update_ratio"], made / held), (self._labels["weight_norm"], held)]

            probe.add([*apart, *weights], ratio)
        momenta = [_state(optimizer, one, MOMENTUM) for one in parameters]
        if any(one is None for one in momenta):
            return
        probe.add(_norms([one for one in momenta if one is not None]), lambda got: [
            (self._labels["momentum_norm"], self._of_layers(got))
        ])  # fmt: skip
        variances = [_state(optimizer, one, (VARIANCE,)) for one in parameters]
        if any(one is None for one in variances):
            return
        plain_m, plain_v = (_plain([one for one in some if one is not None]) for some in (momenta, variances))
        pairs = list(zip(plain_m, plain_v, strict=True))
        # A sum of signs costs a tenth of a count.
        above = [torch.addcmul(v, m, m, value=-1.0).sign().sum() for m, v in pairs]
        sizes = self._sums(np.array([float(m.numel()) for m, _ in pairs]))

        def moments(got: Floats) -> Sequence[Block]:
            of_v, of_m, larger = got.reshape(3, -1)
            v, m = self._of_layers(of_v), self._of_layers(of_m)
            with np.errstate(divide="ignore", invalid="ignore"):
                return [
                    (self._labels["variance_norm"], v), (self._labels["momentum_to_variance"], m / np.sqrt(v)),
                    (self._labels["momentum_above_variance"], (1 - self._sums(larger) / sizes) / 2),
                ]  # fmt: skip

        probe.add([*_norms([v for _, v in pairs]), *_norms([m for m, _ in pairs]), *above], moments)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _state(optimizer: Optimizer, parameter: torch.Tensor, names: Sequence[str]) -> torch.Tensor | None:
    held = optimizer.state.get(parameter, {}) if parameter in optimizer.state else {}
    return next((held[name] for name in names if isinstance(held.get(name), torch.Tensor)), None)


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
