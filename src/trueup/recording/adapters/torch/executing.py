"""What `trueup.analysis.rerun` asks of this adapter (`trueup.analysis.rerun.executing.Executing`)."""

from __future__ import annotations

import torch

from trueup.recording.adapters.torch.case_errors import CASES as CASES
from trueup.recording.adapters.torch.replaying import Replayer as Replayer
from trueup.recording.adapters.torch.replaying import provide as provide
from trueup.recording.adapters.torch.verifying import Verifier as Verifier


def limit_threads(number: int) -> None:
    """Let each operator use so many threads."""
    torch.set_num_threads(number)
