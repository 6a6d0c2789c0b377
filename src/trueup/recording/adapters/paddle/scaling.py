"""What a `paddle.amp.GradScaler` did, as two api calls of phase optimizer: its scale, what overflowed, what it skipped.

Kept whatever the filters say, like the loss. Paddle itself reads on the host, in each step, whether something overflowed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import paddle

from trueup.recording.recorder import Call

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

STEP = "paddle.amp.GradScaler.step"
UPDATE = "paddle.amp.GradScaler.update"


def scale_of(scaler: Any) -> paddle.Tensor | None:
    """Return the scale that a scaler has now."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, paddle.Tensor) else None


def skipped(scaler: Any) -> bool:
    """Tell whether the step that a scaler has just made was skipped."""
    return bool(getattr(scaler, "_cache_found_inf", None))


def record_step(session: Session, scaler: Any, scale: paddle.Tensor | None, optimizer: Any) -> None:
    """Record a step of a scaler after it was made; ``scale`` is the one that it was made with."""
    call = _begin(session, STEP)
    found = getattr(scaler, "_found_inf", None)
    slots = [] if scale is None else [("input.scale", scale)]
    session.slots.inputs(call, slots + ([("input.found_inf.0", found)] if isinstance(found, paddle.Tensor) else []))
    arguments = {"optimizer": type(optimizer).__name__, "skipped": skipped(scaler)}
    if scale is not None and scale.place.is_cpu_place():
        arguments["scale"] = scale.item()
    session.recorder.value(call, json.dumps(arguments, sort_keys=True))


def record_update(session: Session, before: paddle.Tensor | None, scaler: Any) -> None:
    """Record the scale with which the iteration ran, and that of the next."""
    call = _begin(session, UPDATE)
    session.slots.inputs(call, [] if before is None else [("input.scale", before)])
    after = scale_of(scaler)
    session.slots.outputs(call, [] if after is None else [("output.scale", after)])


def _begin(session: Session, op: str) -> Call:
    return session.recorder.begin("api", "optimizer", "", op, site=session.site(session.threads.state))
