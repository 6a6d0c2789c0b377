"""The compiled short way from a tensor to a row (native/), for plain tensors in host memory.

It does what `Slots` and `Buffers` do, on the same objects, and hands to them whatever is not plain; where it was not built they do
everything. It was measured to save two thirds of what a row costs the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from trueup.foundation import kernels
from trueup.recording.adapters.torch.compiled import quick_module
from trueup.recording.adapters.torch.context import Context, phase_of, running_owner
from trueup.recording.adapters.torch.gradients import hook_sums, next_node
from trueup.recording.adapters.torch.invocations import autocast
from trueup.recording.adapters.torch.tensors import LAYOUTS, encode_values
from trueup.recording.recorder.arguments import MAX_VALUES
from trueup.recording.recorder.recorder import ARGUMENTS
from trueup.recording.recorder.repeats import link

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


def quick(session: Session, devices: dict[str, None], producing: str, slot: Callable[..., None]) -> Any | None:
    """Return the short way into a session's recorder, or None where the compiled parts are missing.

    Args:
        session: `Session.observing` and `Buffers.storage` of its buffers become the short ones.
        devices: names of devices that tensors were seen on.
        producing: level whose calls are the producers of what functions and modules are given.
        slot: the long way of a row: ``(call, name, tensor, storage, producer, step)``.
    """
    compiled, buffers, recorder = quick_module(), session.buffers, session.recorder
    if compiled is None:
        return None
    sites = recorder.sites
    short = compiled.Quick(
        session=session, threads=session.threads, recorder=recorder, buffers=buffers, slot_at_length=slot,
        storage_at_length=buffers.storage, in_flight=buffers.in_flight.pending, storages=buffers.storages, devices=devices,
        layouts=LAYOUTS, tensor=torch.Tensor, parameter=torch.nn.Parameter,
        transforms=torch._C._functorch.maybe_current_level, count_threads=torch.get_num_threads,
        graph_task=torch._C._current_graph_task_id, no_overrides=torch._C.DisableTorchFunction, entrance=kernels.native().entrance,
        detail=session.options.detail, sees_writes=buffers.sees_writes, levels=tuple(session.options.levels), producing=producing,
        kinds=recorder._kinds, seqs=recorder._seqs, context_type=Context, no_task=-1, link=link,
        sites=sites, codes=sites._codes, known_sites=sites._known, scopes=session.scopes,
        values={}, most_values=MAX_VALUES, describe_values=encode_values, arguments=ARGUMENTS, size_type=torch.Size,
        simple_types=frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format}),
        tracing=torch._C._get_tracing_state, compiler=torch.compiler,
        phase_of=phase_of, running_owner=running_owner, grad_enabled=torch.is_grad_enabled, next_node=next_node,
        function_modes=torch._C._len_torch_function_stack, output_buffer="output.buffer", own_names={}, usual={},
        is_usual=_is_usual,
        invocation=session.invocations, invocations={}, autocast=autocast, generator_state=torch.default_generator.get_state,
        hook_sums=lambda context, boundary: hook_sums(context, boundary, session.slots),
    )  # fmt: skip
    buffers.storage = short.storage  # type: ignore[method-assign]
    session.observing = short.observing  # type: ignore[method-assign]
    return short


def _is_usual(kind: type) -> bool:
    """Tell whether a class of modules names what it holds as `torch.nn.Module` does."""
    module = torch.nn.Module
    return all(getattr(kind, name) is getattr(module, name) for name in ("named_parameters", "named_buffers"))
