"""What the rules of a policy ask of Paddle: tensors elsewhere and back, and calls in another way.

`engine.ruled.Framework` says what each function does.

A cast is an operator that autograd knows. A copy from one place to another is none: ``Tensor.cpu`` and ``copy_to`` lose the
gradient (Paddle 3.3), so it is a PyLayer that sends the gradient back. Post-hooks on PyLayers do not run, so each begins behind an
``assign``, on whose node a capture sees the gradient that the call makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle
from paddle import _C_ops
from paddle.base import core, framework

from trueup.foundation.facts.operators import has
from trueup.recording.adapters.paddle.buffers import Base, base_of
from trueup.recording.adapters.paddle.invocations import amp, auto_cast, casting, drawing_from, drew, flags, state
from trueup.recording.adapters.paddle.session import RUNNING
from trueup.recording.adapters.paddle.tensors import dtype_name as name_of
from trueup.recording.adapters.paddle.tensors import holds, is_dtype
from trueup.recording.engine import policies, ruled
from trueup.recording.engine.ruled import Arguments, CannotSplit, Form, ReturnsArgument, SplitCall, Way
from trueup.recording.policy_file import PolicyRule
from trueup.recording.recorder.arguments import Place
from trueup.recording.recorder.arguments import leaves as leaves_in
from trueup.recording.recorder.arguments import mapped as mapped_in

FLOATS = ("float16", "bfloat16", "float32", "float64")


# ---------------------------------------------------------------- tensors
def mapped(value: Any, change: Callable[[Any], Any], *, kind: type | None = None) -> Any:
    """Return a value with every tensor that holds something (or object of another kind) changed."""
    return mapped_in(value, change, holds if kind is None else lambda item: isinstance(item, kind))


def tensors_in(value: Any) -> list[paddle.Tensor]:
    """Return every tensor of a nested value, in order; one that holds nothing stands for an argument that was not given."""
    return leaves_in(value, holds)


def is_plain(tensor: paddle.Tensor) -> bool:
    """Tell whether a tensor is dense and whole: what is sparse, distributed or of selected rows is given as it is."""
    return bool(tensor.is_dense()) and not tensor.is_dist()


def dtype_name(tensor: paddle.Tensor) -> str:
    return name_of(tensor.dtype)


def device_of(tensor: paddle.Tensor) -> Any:
    return tensor.place


def on_host(tensor: paddle.Tensor) -> bool:
    return bool(tensor.place.is_cpu_place())


def in_form(tensor: paddle.Tensor, form: Form | None) -> paddle.Tensor:
    narrow, place = (tensor, paddle.CPUPlace()) if form is None else (_cast(tensor, form[0]), form[1])
    return narrow if str(narrow.place) == str(place) else _moved(narrow, place)


def _cast(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
    return tensor if dtype_name(tensor) == dtype else _C_ops.cast(tensor, getattr(paddle, dtype))


def _moved(tensor: paddle.Tensor, place: Any) -> paddle.Tensor:
    """Return a tensor on another place, by an operation that autograd knows."""
    if tensor.stop_gradient or not paddle.is_grad_enabled():
        return tensor._copy_to(place, True)
    # As `PyLayer.apply` does; a capture that stands in its place would take this for a call.
    return super(paddle.autograd.PyLayer, _Move).apply(_C_ops.assign(tensor), place)


class _Move(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: paddle.Tensor, place: Any) -> paddle.Tensor:
        ctx.place = tensor.place
        return tensor._copy_to(place, True)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        with unseen():
            return gradient._copy_to(ctx.place, True)


def version(tensor: paddle.Tensor) -> int | None:
    return int(tensor._inplace_version())


def memory(tensor: paddle.Tensor) -> Base | None:
    return (base_of(tensor) or None) if is_plain(tensor) and tensor._is_initialized() else None


def lies_alike(original: paddle.Tensor, made: paddle.Tensor) -> bool:
    return list(original.get_strides()) == list(made.get_strides())


def differs(original: paddle.Tensor, made: paddle.Tensor) -> bool:
    if list(original.shape) != list(made.shape):
        return True
    with paddle.no_grad():
        return bool(original.cpu().astype(made.dtype).numpy().tobytes() != made.cpu().numpy().tobytes())


def write_back(original: paddle.Tensor, made: paddle.Tensor) -> None:
    there = made if str(made.place) == str(original.place) else _moved(made, original.place)
    source = _cast(there, dtype_name(original))
    leaf = original.is_leaf and not original.stop_gradient
    with paddle.no_grad() if leaf else nullcontext():  # a parameter that its Layer, or an optimizer, changes
        _C_ops.assign_out_(source, original)


class Copies(ruled.Copies):
    """Copies of Paddle's tensors: batch norms write their statistics without counting it, and return them as other tensors."""

    def original(self, tensor: paddle.Tensor) -> Any:
        """Return the original of a copy; batch norms return the statistics that they write as another tensor of that memory."""
        found = super().original(tensor)
        if found is not None or id(tensor) in self._held or (at := memory(tensor)) is None:
            return found
        alike = (
            original for original, made, _ in self._held.values()
            if original.stop_gradient and memory(made) == at and list(made.shape) == list(tensor.shape)
        )  # fmt: skip
        return next(alike, None)

    def written(self, also: frozenset[int] = frozenset(), *, all_of_them: bool = False) -> list[tuple[Any, Any]]:
        """Return ``(original, copy)`` of what the call wrote; what nobody counts only where it differs: to write it counts."""
        found = super().written(all_of_them=all_of_them)
        known = {id(original) for original, _ in found}
        more = [(original, made) for original, made, _ in self._held.values() if id(original) in also - known]
        return found + [(original, made) for original, made in more if differs(original, made)]


copies = Copies


# ---------------------------------------------------------------- calls
def needs_gradient(tensor: paddle.Tensor) -> bool:
    return not tensor.stop_gradient


def gradients_on() -> bool:
    return bool(paddle.is_grad_enabled())


def autocast(tensors: Iterable[paddle.Tensor] = ()) -> tuple[str, ...]:  # noqa: ARG001 - it is on for all devices or none
    setting = amp()
    return () if setting is None else (str(setting[0]), setting[1])


def promoted(dtypes: Sequence[str]) -> str:
    if any(name.startswith("complex") for name in dtypes):
        return "complex128" if {"complex128", "float64"} & set(dtypes) else "complex64"
    floats = {name for name in dtypes if name in FLOATS}
    return "float32" if floats == {"float16", "bfloat16"} else max(floats, key=FLOATS.index, default=dtypes[0])


def complex_of(dtype: str) -> str:
    return "complex128" if dtype == "float64" else "complex64"


def names(value: Any) -> str:
    return "dtype" if is_dtype(value) else ""


def dtypes_follow(name: str) -> bool:  # noqa: ARG001
    return True


def written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Return the tensors that an operator may write without counting it: of batch norms and optimizers those without gradient."""
    if not (has(name, "rewrites") or has(name, "in-place")):
        return frozenset()
    return frozenset(id(tensor) for tensor in tensors_in((args, kwargs)) if tensor.stop_gradient or not gradients_on())


@contextmanager
def alone_on_copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    with unseen(), paddle.no_grad(), drawing_from(None):
        yield mapped((args, kwargs), lambda tensor: tensor.clone() if is_plain(tensor) else tensor)


def unseen() -> AbstractContextManager[None]:
    return policies.quietly("paddle")


@contextmanager
def without_autocast(tensors: Iterable[paddle.Tensor], device: str | None) -> Iterator[None]:  # noqa: ARG001
    """Run a block without auto_cast and, where the rule says so, with new tensors made on the CPU."""
    setting = auto_cast()
    on_host = framework._dygraph_place_guard(paddle.CPUPlace()) if device is not None else nullcontext()
    with casting(None if setting is None else (core.AmpLevel.O0, *setting[1:])), on_host:
        yield


def mark() -> int:
    """Return nothing of use: nodes of Paddle have no numbers."""
    return 0


def draws(tensors: Iterable[paddle.Tensor], arguments: Arguments) -> Callable[[], bool]:  # noqa: ARG001 - there is one state
    before = state()
    return lambda: drew(before)


# ---------------------------------------------------------------- Layers
def held(layer: paddle.nn.Layer) -> tuple[list[Place], list[paddle.Tensor]]:
    """Return the parameters, buffers and other tensors that a Layer and those inside hold, and where; an RNN has lists of them."""
    found: list[tuple[Any, Any, paddle.Tensor]] = []
    for inner in layer.sublayers(include_self=True):
        attributes = vars(inner)
        lists = [value for value in attributes.values() if isinstance(value, list)]
        for where in (inner._parameters, inner._buffers, attributes):
            found += [(where, key, value) for key, value in where.items() if holds(value)]
        for items in lists:
            found += [(items, k, value) for k, value in enumerate(items) if holds(value)]
    return [(where, key) for where, key, _ in found], [tensor for _, _, tensor in found]


def rewritten(layer: paddle.nn.Layer) -> frozenset[int]:
    found: set[int] = set()
    for inner in layer.sublayers(include_self=True):
        own = [*inner._buffers.values(), *(inner._parameters.get(name) for name in RUNNING)]
        found.update(id(value) for value in own if holds(value))
    return frozenset(found)


def refuse(rule: PolicyRule, name: str, layer: paddle.nn.Layer) -> None:
    """Refuse no Layer: what is sharded is distributed, and given as it is."""


# ---------------------------------------------------------------- deterministic algorithms
FLAGS = ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic", "FLAGS_cpu_deterministic")
"""What a build for GPUs has (Paddle 2.4 to 3.3); one for the CPU has none of them."""


def setting() -> dict[str, Any]:
    """Return the flags that this build has, as they are."""
    return flags(FLAGS)


def _on() -> dict[str, Any]:
    return {name: type(value)(1) for name, value in setting().items()}


def deterministic() -> AbstractContextManager[None]:
    return ruled.set_to(_on(), setting, paddle.set_flags)


class Backward:
    """Makes the backward of calls deterministic, by hooks on their results. Nothing of Paddle's tells when the last node of a
    call has run, so the flags stay until the pass has ended, which costs time and no accuracy."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None

    def hook(self, results: Iterable[paddle.Tensor], mark: int, call: str) -> bool:  # noqa: ARG002 - Paddle raises nothing for it
        """Hook the results of a call; tell whether any takes a gradient."""
        hooked = [tensor._register_grad_hook(self._enter) for tensor in results if not tensor.stop_gradient]
        return bool(hooked)

    def leave(self) -> None:
        """Put the flags back to what they were."""
        if self._before is not None:
            before, self._before = self._before, None
            paddle.set_flags(before)

    def _enter(self, _: Any) -> None:
        if self._before is None:
            self._before = setting()
            paddle.set_flags(_on())


# ---------------------------------------------------------------- forward in one way, backward in another
def split(
    forward: Way, backward: Way, arguments: Arguments, buffers: frozenset[int], refuse: Callable[[str], Exception]  # noqa: ARG001
) -> Any:
    call = _Call(forward, backward, arguments, buffers)
    with unseen():  # a capture sees the gradient that the call makes on the node of the assign
        given = [t if t.stop_gradient or t.is_leaf else _C_ops.assign(t) for t in call.tensors]
    # As `PyLayer.apply` does; a capture that stands in its place would take this for a call.
    found = super(paddle.autograd.PyLayer, _Split).apply(call, *given)
    return call.result([found] if isinstance(found, paddle.Tensor) else list(found))


class _Call(SplitCall):
    """A call of Paddle's, with the random numbers and the auto_cast of its forward."""

    def __init__(self, forward: Way, backward: Way, arguments: Arguments, buffers: frozenset[int]) -> None:
        super().__init__(tensors_in, mapped, forward, backward, arguments, buffers)
        self.buffers = [buffer and tensor.stop_gradient for buffer, tensor in zip(self.buffers, self.tensors, strict=True)]
        self.leaves = [tensor.is_leaf for tensor in self.tensors]
        self.random = state()
        self.autocast = auto_cast()

    def keep_own(self, result: Any, tensors: Sequence[paddle.Tensor]) -> tuple[paddle.Tensor, ...]:
        """Take the result apart, except for buffers among the tensors that it was given."""
        written = {base_of(t) for t, buffer in zip(tensors, self.buffers, strict=True) if buffer and _has_memory(t)}
        return self.keep(result, lambda tensor: _has_memory(tensor) and base_of(tensor) in written)


class _Split(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        ctx.call, ctx.needs = call, [not tensor.stop_gradient for tensor in call.tensors]
        with unseen():
            kept = [tensor.clone() if buffer else tensor for tensor, buffer in zip(tensors, call.buffers, strict=True)]
        versions = [tensor._inplace_version() for tensor in tensors]
        outputs = call.keep_own(call.forward(call.arguments(tensors)), tensors)
        if any(t._inplace_version() != v and not b for t, v, b in zip(tensors, versions, call.buffers, strict=True)):
            raise CannotSplit("it writes an argument")
        memory = {base_of(tensor) for tensor in tensors if _has_memory(tensor)}
        if any(base_of(output) in memory for output in outputs if _has_memory(output)):
            raise ReturnsArgument("it returns an argument, or a view of it")
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: paddle.Tensor | None) -> Any:
        call: _Call = ctx.call
        with unseen(), paddle.enable_grad(), drawing_from(call.random), casting(call.autocast):
            leaves = [_leaf(tensor, needs) for tensor, needs in zip(ctx.saved_tensor(), ctx.needs, strict=True)]
            outputs = call.keep_own(call.backward(call.arguments(leaves)), leaves)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and not o.stop_gradient]
            wanted = [leaf for leaf in leaves if not leaf.stop_gradient]
            found: Any = [None] * len(wanted)
            if pairs:
                found = paddle.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        following = iter(found)
        made = [next(following) if needs else None for needs in ctx.needs]
        # The node of an assign needs a gradient: where there is none it gets zeros, of which the sum is the same.
        lacking = [needs and not leaf for needs, leaf in zip(ctx.needs, call.leaves, strict=True)]
        made = [paddle.zeros_like(t) if m is None and lacks else m for m, lacks, t in zip(made, lacking, leaves, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)


def _has_memory(tensor: paddle.Tensor) -> bool:
    return is_plain(tensor) and tensor._is_initialized() and holds(tensor)


def _leaf(tensor: paddle.Tensor, needs: bool) -> paddle.Tensor:
    leaf: paddle.Tensor = tensor.detach()
    leaf.stop_gradient = not needs
    return leaf
