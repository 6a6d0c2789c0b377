"""Putting a mode on this thread's stacks and taking it off again, whatever other modes the user has entered since.

Who leaves a ``with`` block of a mode takes the topmost one off, so ours goes below those of the user. Only a ``DeviceContext``
(``torch.device`` as a context, ``torch.set_default_device``) insists on the lowest place of all (PyTorch 2.13). A mode that says
that it is ``lowest`` comes next: a policy, whose doing ours are not to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.overrides as functions
import torch.utils._python_dispatch as dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

Mode: TypeAlias = "TorchFunctionMode | TorchDispatchMode"


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
