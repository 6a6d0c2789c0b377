"""What PyTorch calls at the end of ``import torch`` (entry point ``torch.backends``): the simulated device, if asked for."""

from __future__ import annotations

import os

VARIABLE = "TRUEUP_SIMULATED"
"""Environment variable that lets any script find the simulated device, without a line in it: anything but empty or 0."""


def autoload() -> None:
    """Install the simulated device ``npu`` if `VARIABLE` asks for it; else do nothing, at no cost."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        from trueup.simdev import device

        device.install()
        device.stand_in()
