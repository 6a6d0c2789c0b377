"""What holds around a call of PyTorch: modes on this thread's stacks, `torch.func` transforms.

A mode is put on and taken off again, whatever other modes the user has entered since. Who leaves a ``with`` block of a mode takes
the topmost one off, so ours goes below those of the user. Only a ``DeviceContext`` (``torch.device`` as a context,
``torch.set_default_device``) insists on the lowest place of all (PyTorch 2.13). A mode that says that it is ``lowest`` comes next:
a policy, whose doing ours are not to see.

Inside ``vmap`` a function is given tensors of one sample; what exists is one tensor with all samples. That one is recorded, with
the dimension along which they lie, so that the function can be called inside such a ``vmap`` again: once for all samples, by
the kernels that the capture saw. ``grad``, ``jvp`` and ``vjp`` wrap the tensors whose values they follow; the values are those of
plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.overrides as functions
import torch.utils._python_dispatch as dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

Mode: TypeAlias = "TorchFunctionMode | TorchDispatchMode"

MOST_TRANSFORMS = 16
RANDOMNESS = ("error", "same", "different")
LARGEST_BATCH = 1 << 24

Transform = Mapping[str, Any]
"""``{"vmap": samples, "randomness": "error"}``, or ``{"other": "Grad"}``."""


def put_on(mode: Mode) -> None:
    """Enter a mode below those that are on already, unless it is on."""
    if mode in _stack(mode):
        return
    length, pop, push = _operations(mode)
    above = [pop() for _ in range(length())]
    while above and (isinstance(above[-1], DeviceContext) or getattr(above[-1], "lowest", False)):
        push(above.pop())
    mode.__enter__()
    for one in reversed(above):
        push(one)


def take_off(mode: Mode, *, left: bool = False) -> None:
    """Leave a mode, wherever it is; one that belongs to another thread is not on this one's stack, and stays. ``left``: it was
    left before and came back: what was at work at that moment put it on the stack again."""
    if mode not in _stack(mode):
        return
    _, pop, push = _operations(mode)
    above = []
    while (top := pop()) is not mode:
        above.append(top)
    if not left:
        push(mode)
        mode.__exit__(None, None, None)
    for one in reversed(above):
        push(one)


@contextmanager
def without(mode: Mode) -> Iterator[None]:
    """Remove a mode from this thread's stack for a block, and put it back in its place."""
    stack = _stack(mode)
    if mode not in stack:
        yield
        return
    place = stack.index(mode)
    length, pop, push = _operations(mode)

    def above() -> list[Any]:
        return [pop() for _ in range(length() - place)][::-1]

    for other in above()[1:]:
        push(other)
    try:
        yield
    finally:
        for other in (mode, *above()):
            push(other)


def _stack(mode: Mode) -> list[Any]:
    if isinstance(mode, TorchFunctionMode):
        return functions._get_current_function_mode_stack()  # type: ignore[no-any-return]
    return dispatch._get_current_dispatch_mode_stack()  # type: ignore[no-any-return]


def _operations(mode: Mode) -> tuple[Callable[[], int], Callable[[], Any], Callable[[Any], None]]:
    if isinstance(mode, TorchFunctionMode):
        return torch._C._len_torch_function_stack, functions._pop_mode, functions._push_mode
    return torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode


def inside() -> bool:
    """Tell whether a transform runs."""
    return torch._C._functorch.maybe_current_level() is not None


def outside() -> AbstractContextManager[Any]:
    """Leave the transforms that are running: inside them whatever we compute would be transformed too."""
    if not inside():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()  # type: ignore[no-any-return]


def below(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the bytes of one inside transforms: all samples of a vmap at once."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def batched(tensor: torch.Tensor) -> list[list[int]]:
    """Return ``[level, dimension]`` of the samples of each vmap that a tensor is inside of, innermost vmap first. A dimension is
    one of the tensor without those of the vmaps before it in the list; levels count from 1, the outermost."""
    found, functorch = [], torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            found.append([functorch.maybe_get_level(tensor), functorch.maybe_get_bdim(tensor)])
        tensor = functorch.get_unwrapped(tensor)
    return found


def running() -> list[dict[str, Any]]:
    """Return the transforms that are running, outermost first."""
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    return [
        {"vmap": int(one.batch_size()), "randomness": one.randomness()} if isinstance(one, VmapInterpreter)
        else {"other": one.key().name}
        for one in retrieve_all_functorch_interpreters()
    ]  # fmt: skip


def is_known(transforms: Any) -> bool:
    """Tell whether a description from a file is one that `running` may have made."""
    if not isinstance(transforms, list) or len(transforms) > MOST_TRANSFORMS:
        return False
    return all(isinstance(one, dict) and (_is_vmap(one) or isinstance(one.get("other"), str)) for one in transforms)


def _is_vmap(one: Mapping[str, Any]) -> bool:
    size = one.get("vmap")
    return type(size) is int and 0 < size <= LARGEST_BATCH and one.get("randomness") in RANDOMNESS


def execute(
    transforms: Sequence[Transform], tensors: Sequence[torch.Tensor], levels: Sequence[Mapping[int, int]],
    call: Callable[[list[torch.Tensor]], None],
) -> None:  # fmt: skip
    """Call a function inside the same vmaps, as `running` gave them, on tensors with all samples; ``levels`` are their dimensions
    of samples by the level of the vmap (`batched`). ``call`` is given the tensors of one sample, and what it computes it has to
    keep, by `below`."""
    sizes = [(level, one) for level, one in enumerate(transforms, start=1) if "vmap" in one]

    def enter(depth: int, given: Sequence[torch.Tensor]) -> None:
        if depth == len(sizes):
            call(list(given))
            return
        level, one = sizes[depth]

        def sample(index: torch.Tensor, *inner: torch.Tensor) -> torch.Tensor:
            enter(depth + 1, inner)
            return index

        dims = (0, *(places.get(level) for places in levels))
        torch.vmap(sample, in_dims=dims, randomness=one["randomness"])(torch.arange(one["vmap"]), *given)

    enter(0, tensors)
