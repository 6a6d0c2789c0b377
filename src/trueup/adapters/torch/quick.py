"""The compiled short way from a tensor to a row (native/), for plain tensors in host memory.

It does what `Slots` and `Buffers` do, on the same objects, and hands to them whatever is not plain; where it was not built they do
everything. It was measured to save two thirds of what a row costs the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueup import kernels
from trueup.adapters.torch.compiled import quick_module
from trueup.adapters.torch.tensors import LAYOUTS
from trueup.recorder import Statistics

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Session


def quick(session: Session, devices: dict[str, None], slot: Callable[..., None]) -> Any | None:
    """Return the short way into a session's recorder, or None where the compiled parts are missing.

    Args:
        session: `Session.observing` and `Buffers.storage` of its buffers become the short ones.
        devices: names of devices that tensors were seen on.
        slot: the long way of a row: ``(call, name, tensor, storage, producer, step)``.
    """
    compiled, buffers = quick_module(), session.buffers
    if compiled is None:
        return None
    short = compiled.Quick(
        session=session, threads=session.threads, recorder=session.recorder, buffers=buffers, slot_at_length=slot,
        storage_at_length=buffers.storage, in_flight=buffers.in_flight.pending, storages=buffers.storages, devices=devices,
        layouts=LAYOUTS, tensor=torch.Tensor, parameter=torch.nn.Parameter, statistics=Statistics,
        transforms=torch._C._functorch.maybe_current_level, count_threads=torch.get_num_threads,
        graph_task=torch._C._current_graph_task_id, no_overrides=torch._C.DisableTorchFunction, entrance=kernels.native().entrance,
        detail=session.options.detail, sees_writes=buffers.sees_writes,
    )  # fmt: skip
    buffers.storage = short.storage  # type: ignore[method-assign]
    session.observing = short.observing  # type: ignore[method-assign]
    return short
