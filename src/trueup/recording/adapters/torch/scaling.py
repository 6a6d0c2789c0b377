"""What a `torch.amp.GradScaler` did, as two api calls of phase optimizer: its scale, what overflowed, what it skipped.

Kept whatever the filters say, like the loss. The scale is a tensor on the device and enters as a slot, so nothing waits for it;
the arguments repeat it, and say whether the step was skipped, where the host knows: on the CPU, and where PyTorch has just waited
for the device itself (it does unless the optimizer is fused).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from trueup.recording.recorder import Call

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

STEP = "torch.amp.GradScaler.step"
UPDATE = "torch.amp.GradScaler.update"


def record_step(session: Session, scaler: Any, optimizer: torch.optim.Optimizer, *, called: bool) -> None:
    """Record a step of a scaler after it was made; ``called`` tells whether it reached the optimizer."""
    call = _begin(session, STEP)
    scale = getattr(scaler, "_scale", None)
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    slots = [(f"input.found_inf.{k}", tensor) for k, tensor in enumerate(found)]
    session.slots.inputs(call, ([] if scale is None else [("input.scale", scale)]) + slots)
    session.recorder.value(call, json.dumps(_arguments(scale, found, optimizer, called), sort_keys=True))


def begin_update(session: Session, scaler: Any) -> Call:
    """Record the scale with which the iteration ran."""
    call = _begin(session, UPDATE)
    session.slots.inputs(call, _scale(scaler, "input"))
    return call


def end_update(session: Session, call: Call, scaler: Any) -> None:
    """Record the scale of the next iteration."""
    session.slots.outputs(call, _scale(scaler, "output"))


def _begin(session: Session, op: str) -> Call:
    return session.recorder.begin("api", "optimizer", "", op, site=session.site(session.threads.state))


def _scale(scaler: Any, prefix: str) -> list[tuple[str, torch.Tensor]]:
    scale = getattr(scaler, "_scale", None)
    return [] if scale is None else [(f"{prefix}.scale", scale)]


def _arguments(
    scale: torch.Tensor | None, found: list[torch.Tensor], optimizer: torch.optim.Optimizer, called: bool
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if scale is not None and (scale.device.type == "cpu" or not fused):
        arguments["scale"] = float(scale)
        arguments["skipped"] = any(bool(one) for one in found) if fused else not called
    return arguments
