"""The PyTorch adapter: what executes on any device becomes calls at the levels `module`, `api` and `aten`.

`capture` is the context manager behind `trueup.capture`; `arm` is what an unedited script gets when PyTorch is imported under
`trueup capture -- COMMAND`. The parts: `functions` (api calls), `dispatch` (aten calls), `modules`, `gradients` (the backward of
api and module calls), `buffers` (each buffer is read once), `statistics` (the kernels per device), `scopes`, `environment`.
"""

from trueup.adapters.torch.session import Capture, arm, capture

__all__ = ["Capture", "arm", "capture"]
