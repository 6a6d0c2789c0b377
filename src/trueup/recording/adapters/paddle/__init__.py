"""The PaddlePaddle adapter: what executes in dynamic mode becomes calls at the levels `module` (Layers) and `api` (operators).

`capture` is the context manager behind `trueup.capture`; `armed` is what an unedited script gets when Paddle is imported under
`trueup capture -- COMMAND`. The parts: `session` holds them together; `entrances` stands in the places from which Python reaches
Paddle's kernels (``paddle._C_ops`` and the operators of `paddle.Tensor`), `calls` records what goes through them, `layers` the
Layers, `gradients` the backward by hooks on tensors and GradNodes, `passes` tells which backward pass runs, `replays` follows
recomputation, `optimizers` ends steps; `slots`, `tensors`, `host` and `buffers` (each buffer is read once) turn tensors into rows;
`observing` keeps our exceptions out of the training; `selftest` asks the installed Paddle, before anything is recorded, whether
the private parts that all this stands on behave as they did; `scopes` and `environment` name Layers and switches.

Nothing here imports PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.capturing import capture as capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    """Load the session when it is asked for: an armed data worker never does."""
    if name not in __all__:
        raise AttributeError(f"module 'trueup.recording.adapters.paddle' has no attribute {name!r}")
    from trueup.recording.adapters.paddle import capturing

    return getattr(capturing, name)
