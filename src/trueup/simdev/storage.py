"""The storage of npu tensors as Python sees it: host memory under the device's name."""

from __future__ import annotations

import torch

NPU = torch.device("privateuseone", 0)  # named npu once the device is installed
CPU = torch.device("cpu")


class NPUStorage(torch.UntypedStorage):
    """Host memory that says it is on the device.

    PyTorch keeps one Python object per storage; it is re-labelled in place, because a second one cannot be made.
    """

    @property
    def device(self) -> torch.device:
        """Where the bytes are said to be."""
        return NPU

    def cpu(self) -> torch.UntypedStorage:
        """Return the bytes themselves: they are in host memory already."""
        return self
