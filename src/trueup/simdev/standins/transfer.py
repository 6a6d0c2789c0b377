"""``torch_npu.contrib.transfer_to_npu``: importing it sends CUDA's calls to the device, by the rules of `trueup port`."""

from __future__ import annotations

import os
from pathlib import Path

from trueup.migration.port.running import REDIRECT, table
from trueup.recording.adapters.torch.redirecting import Redirecting

if not os.environ.get(REDIRECT):  # else they are sent already
    Redirecting({**table("npu", Path()), "into": ""}).begin()
