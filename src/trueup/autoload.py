"""What PyTorch calls at the end of ``import torch`` (entry point ``torch.backends``), and a Python that Trueup starts at its
beginning: what the environment asks for."""

from __future__ import annotations

import functools
import os
import sys

VARIABLE = "TRUEUP_SIMULATED"
"""Environment variable that lets any script find the simulated device, without a line in it: anything but empty or 0; ``shapes``
for a device that computes shapes and no numbers."""
REDIRECT = "TRUEUP_REDIRECT"
"""Environment variable that sends calls for CUDA to another device: a file that says how."""
PROFILE = "TRUEUP_PROFILE"
"""Environment variable that profiles a few steps: a folder, then ``:`` and how many."""


@functools.cache  # a second installation has the entry point, too
def autoload() -> None:
    """Install the simulated device ``npu``, send CUDA's calls elsewhere, profile, if the environment asks for it; else do nothing,
    at no cost."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0"):
        from trueup.foundation.model import TrueupError
        from trueup.simdev import device

        try:
            device.install()
        except TrueupError as error:  # a fault that is none; PyTorch would say that an extension failed
            sys.exit(f"trueup: {error}")
        device.stand_in()
        if wanted == "shapes":
            from trueup.simdev import shapes

            shapes.begin()
    if os.environ.get(REDIRECT):
        from trueup.recording.adapters.torch import redirecting

        redirecting.begin(os.environ[REDIRECT])
    if os.environ.get(PROFILE):
        from trueup.recording.adapters.torch import profiling

        profiling.begin(os.environ[PROFILE])


def stand_in_elsewhere() -> None:
    """Let ``import npu_device`` and ``import npu_bridge`` find the simulated device, and Paddle its own, if the environment asks
    for it."""
    if os.environ.get(VARIABLE, "") not in ("", "0", "shapes"):
        from trueup.simdev import paddle, tensorflow

        tensorflow.install()
        paddle.install()
