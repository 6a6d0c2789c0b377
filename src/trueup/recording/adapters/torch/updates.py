"""What an optimizer is given, in a run of several processes: the gradient of each parameter after synchronisation.

Hooks on parameters see what this rank computed, before DDP's all-reduce, or never fire (FSDP2 swaps the parameters). The
optimizer's own pre-hook comes after all of it, and after unscaling and clipping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session


class Updates:
    """Records a call ``torch.optim.adamw.AdamW.step`` with slots ``input.<parameter>.grad``, at levels module and api."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that an optimizer is about to apply, where there are ranks to have synchronised them."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        session = self._session
        recorder = session.recorder
        levels = [level for level in ("module", "api") if session.records(level)]
        if not levels:
            return
        found = _gradients(optimizer, session.scopes.parameters())
        parent = None
        kind, site = type(optimizer), session.site(session.threads.state)
        for level in levels:
            call = recorder.begin(
                level, "optimizer", "", f"{kind.__module__}.{kind.__qualname__}.step", parent=parent, site=site
            )
            parent = call.seq
            if call.recorded:
                session.slots.outputs(call, found)  # without producers: DDP copies them out of its buckets unseen


def _gradients(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[tuple[str, torch.Tensor]]:
    """Name each gradient by its parameter: its path in the model, else its place in the optimizer."""
    return [
        (f"input.{names.get(id(parameter)) or f'group{g}.{k}'}.grad", parameter.grad)
        for g, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
        if isinstance(parameter, torch.Tensor) and parameter.grad is not None
    ]
