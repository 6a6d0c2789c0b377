"""What the rules of a policy ask of PyTorch: tensors elsewhere and back, and calls in another way.

`engine.ruled.Framework` says what each function does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trueup.recording.adapters.torch.functions import BUFFERS_WRITTEN, UNVERSIONED
from trueup.recording.adapters.torch.gradients import ACCUMULATE, MAX_NODES, next_node
from trueup.recording.adapters.torch.random_states import Generators, drawing_from
from trueup.recording.adapters.torch.tensors import mapped as mapped
from trueup.recording.adapters.torch.tensors import tensors_in as tensors_in
from trueup.recording.engine import policies
from trueup.recording.engine.ruled import Arguments, CannotSplit, Copies, Form, ReturnsArgument, SplitCall, Way, failed, set_to
from trueup.recording.policy_file import PolicyRule
from trueup.recording.recorder.arguments import Place

PLAIN_NAMES = ("torch.nn.functional.", "torch.Tensor.", "torch.")
NOT_PLAIN = ("torch.ops.",)
"""Operators of libraries: the dtypes of their results need not follow from their inputs."""

SHARDING = ("FSDPModule", "FullyShardedDataParallel")
"""Classes of modules whose parameters are complete only while they run themselves (FSDP 2 and 1)."""


# ---------------------------------------------------------------- tensors
def is_plain(tensor: torch.Tensor) -> bool:  # noqa: ARG001
    """Tell that any tensor may be copied."""
    return True


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def in_form(tensor: torch.Tensor, form: Form | None) -> torch.Tensor:
    return tensor.to(device="cpu") if form is None else tensor.to(dtype=getattr(torch, form[0]), device=form[1])


def version(tensor: torch.Tensor) -> int | None:
    """Return the version counter; an inference tensor has none."""
    return None if tensor.is_inference() else tensor._version


def memory(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def lies_alike(original: torch.Tensor, made: torch.Tensor) -> bool:
    return original.layout is not torch.strided or original.stride() == made.stride()


def differs(original: torch.Tensor, made: torch.Tensor) -> bool:
    return original.shape != made.shape or not torch.equal(original.to(dtype=made.dtype, device=made.device), made)


def write_back(original: torch.Tensor, made: torch.Tensor) -> None:
    if original.is_leaf and original.requires_grad and torch.is_grad_enabled():
        with torch.no_grad():  # as the module that changed it had to; cuDNN's RNNs lay their weights out anew
            if not torch.equal(original.to(dtype=made.dtype, device=made.device), made):
                original.copy_(made)
        return
    if original.shape != made.shape:  # an ``out=`` that was resized
        original.resize_(made.shape)
    original.copy_(made)


copies = Copies


# ---------------------------------------------------------------- calls
def needs_gradient(tensor: torch.Tensor) -> bool:
    return bool(tensor.requires_grad)


def gradients_on() -> bool:
    return bool(torch.is_grad_enabled())


def autocast(tensors: Iterable[torch.Tensor]) -> tuple[torch.dtype | None, ...]:
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in sorted(_kinds(tensors)))


def _kinds(tensors: Iterable[torch.Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors} - {"meta"}


def promoted(dtypes: Sequence[str]) -> str:
    return str(reduce(torch.promote_types, (getattr(torch, name) for name in dtypes))).removeprefix("torch.")


def complex_of(dtype: str) -> str:
    return str(getattr(torch, dtype).to_complex()).removeprefix("torch.")


def names(value: Any) -> str:
    return "dtype" if isinstance(value, torch.dtype) else "device" if isinstance(value, torch.device) else ""


def dtypes_follow(name: str) -> bool:
    return name.startswith(PLAIN_NAMES) and not name.startswith(NOT_PLAIN)


def written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int] | None:
    """Return the running statistics that a function writes; extensions' kernels may write anything without counting it."""
    if name.startswith(UNVERSIONED):
        return None
    places = BUFFERS_WRITTEN.get(name, {}).values()
    buffers = [kwargs.get(keyword, args[place] if len(args) > place else None) for place, keyword in places]
    return frozenset(id(b) for b in buffers if isinstance(b, torch.Tensor))


@contextmanager
def alone_on_copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    generators = Generators((tensor.device for tensor in tensors_in((args, kwargs))), (*args, *kwargs.values()))
    with policies.quietly("torch"), torch.no_grad(), drawing_from(generators):
        yield mapped((args, kwargs), lambda tensor: tensor.detach().clone())


def unseen() -> AbstractContextManager[Any]:
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def without_autocast(tensors: Iterable[torch.Tensor], device: str | None) -> ExitStack:
    stack = ExitStack()
    for kind in _kinds(tensors) | ({device} if device else set()):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def mark() -> int:
    return next_node()


def draws(tensors: Iterable[torch.Tensor], arguments: Arguments) -> Callable[[], bool]:
    args, kwargs = arguments[:2]
    generators = Generators((tensor.device for tensor in tensors), (*args, *kwargs.values()))
    before = generators.state()
    return lambda: generators.drew(before)


# ---------------------------------------------------------------- modules
def held(module: torch.nn.Module) -> tuple[list[Place], list[torch.Tensor]]:
    """Return the parameters, buffers and other tensors that a module and those inside hold, and where they stand. FSDP 1 puts
    views of its flat parameter into plain attributes while the module runs."""
    found = [
        (where, key, tensor)
        for inner in module.modules()
        for where in (inner._parameters, inner._buffers, vars(inner))
        for key, tensor in where.items()
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor)
    ]
    return [(where, key) for where, key, _ in found], [tensor for _, _, tensor in found]


def rewritten(module: torch.nn.Module) -> frozenset[int]:
    return frozenset(map(id, module.buffers()))


def refuse(rule: PolicyRule, name: str, module: torch.nn.Module) -> None:
    """Refuse a module around others whose parameters FSDP gathers in hooks of theirs."""
    inside = next((inner for inner in module.modules() if inner is not module and _shards(inner)), None)
    if inside is not None:
        got = f"modules inside whose parameters FSDP gathers one by one (the first: {type(inside).__name__})"
        raise failed(rule, name, got, "name those modules, or functions (level = \"api\")")


def _shards(module: torch.nn.Module) -> bool:
    return any(kind.__name__ in SHARDING for kind in type(module).__mro__)


# ---------------------------------------------------------------- deterministic algorithms
Setting = tuple[bool, bool]


def setting() -> Setting:
    """Return whether deterministic algorithms are on, and whether only to warn."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def put(to: Setting) -> None:
    """Switch; `torch.use_deterministic_algorithms` would import the compiler to tell it."""
    torch._C._set_deterministic_algorithms(to[0], warn_only=to[1])


def deterministic() -> AbstractContextManager[None]:
    return set_to((True, False), setting, put)


class Backward:
    """Makes the backward of calls deterministic, by hooks on their nodes, and says which call it was where PyTorch cannot. A hook
    runs on whichever thread executes the node. After an error no hook runs: `leave` puts the setting back then."""

    def __init__(self) -> None:
        self._before: Setting | None = None
        self._call = ""

    @property
    def under_way(self) -> str:
        """Name of the call whose node is executing, or nothing."""
        return self._call if self._before is not None else ""

    def hook(self, results: Iterable[torch.Tensor], first: int, call: str) -> bool:
        """Hook the nodes that a call made, from sequence number ``first`` on; tell whether there are any."""
        nodes = _nodes(results, first)
        for node in nodes:
            node.register_prehook(self._enter(call))
            node.register_hook(lambda *_: self.leave())
        return bool(nodes)

    def leave(self) -> None:
        """Put the setting back to what it was."""
        if self._before is not None:
            before, self._before = self._before, None
            put(before)

    def _enter(self, call: str) -> Callable[[Any], None]:
        def enter(_: Any) -> None:
            self.leave()
            self._before, self._call = setting(), call
            put((True, False))

        return enter


def _nodes(results: Iterable[torch.Tensor], first: int) -> list[Any]:
    pending = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    found: dict[Any, None] = {}
    while pending and len(found) < MAX_NODES:
        node = pending.pop()
        if node is None or node in found or not first <= node._sequence_nr() < ACCUMULATE:
            continue
        found[node] = None
        pending += [following for following, _ in node.next_functions]
    return list(found)


# ---------------------------------------------------------------- forward in one way, backward in another
def split(forward: Way, backward: Way, arguments: Arguments, buffers: frozenset[int], refuse: Callable[[str], Exception]) -> Any:
    call = _Call(forward, backward, arguments, buffers, refuse)
    # As `Function.apply` does outside of torch.func; a capture that stands in its place would take this for a call.
    return call.result(super(torch.autograd.function._SingleLevelFunction, _Split).apply(call, *call.tensors))


class _Call(SplitCall):
    """A call of PyTorch, with the random numbers and the autocast of its forward."""

    def __init__(
        self, forward: Way, backward: Way, arguments: Arguments, buffers: frozenset[int], refuse: Callable[[str], Exception]
    ) -> None:
        super().__init__(tensors_in, mapped, forward, backward, arguments, buffers)
        self.refuse = refuse
        self.generators = Generators([tensor.device for tensor in self.tensors], arguments)
        self.random = self.generators.state()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu"} | _kinds(self.tensors)
        ]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.needs = call, [tensor.requires_grad for tensor in tensors]
        with torch._C.DisableTorchFunction():
            kept = [tensor.clone() if buffer else tensor for tensor, buffer in zip(tensors, call.buffers, strict=True)]
        versions = [tensor._version for tensor in tensors]
        outputs = call.keep(call.forward(call.arguments(tensors)))
        changed = [v != t._version and not b for t, v, b in zip(tensors, versions, call.buffers, strict=True)]
        if any(changed):
            raise CannotSplit("it writes an argument")
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if any(output.untyped_storage()._cdata in storages for output in outputs):
            raise ReturnsArgument("it returns an argument, or a view of one")
        ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise call.refuse("its backward is differentiated itself (create_graph=True)")
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(drawing_from(call.generators, call.random))
            for kind, enabled, dtype in call.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            with torch._C.DisableTorchFunction():
                leaves = [t.detach().requires_grad_(needs) for t, needs in zip(ctx.saved_tensors, ctx.needs, strict=True)]
            outputs = call.keep(call.backward(call.arguments(leaves)))
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found: Any = (
                torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
                if pairs else [None] * len(wanted)
            )
        following = iter(found)
        return (None, *(next(following) if needs else None for needs in ctx.needs))
