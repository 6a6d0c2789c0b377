"""The PyTorch adapter: what executes on any device becomes calls at the levels `module`, `api` and `aten`.

`capture` is the context manager behind `trueup.capture`; `armed` is what an unedited script gets when PyTorch is imported under
`trueup capture -- COMMAND`. The parts: `functions` (api calls), `dispatch` (aten calls), `modules`, `gradients` (the backward of
api and module calls), `buffers` (each buffer is read once), `statistics` (the kernels per device), `scopes`, `environment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.adapters.torch.session import Capture as Capture
    from trueup.adapters.torch.session import capture as capture

__all__ = ["Capture", "capture"]


def __getattr__(name: str) -> Any:
    """Load the session when it is asked for: an armed data worker never does."""
    if name not in __all__:
        raise AttributeError(f"module 'trueup.adapters.torch' has no attribute {name!r}")
    from trueup.adapters.torch import session

    return getattr(session, name)
