"""The PyTorch adapter: what executes on any device becomes calls at the levels `module`, `api` and `aten`.

`capture` is the context manager behind `trueup.capture`; `armed` is what an unedited script gets when PyTorch is imported under
`trueup capture -- COMMAND`. The parts: `session` holds them together; `functions` (api calls), `dispatch` (aten calls), `modules`
and `replacing` (entrances without hooks) see the calls; `context` knows where execution stands; `gradients` follows api and module
calls into the backward; `slots`, `tensors` and `buffers` (each buffer is read once) turn tensors into rows, `statistics` measures
them per device; `observing` keeps our exceptions out of the training; `scopes` and `environment` name modules and switches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.capturing import capture as capture

__all__ = ["capture"]


def __getattr__(name: str) -> Any:
    """Load the session when it is asked for: an armed data worker never does."""
    if name not in __all__:
        raise AttributeError(f"module 'trueup.recording.adapters.torch' has no attribute {name!r}")
    from trueup.recording.adapters.torch import capturing

    return getattr(capturing, name)
