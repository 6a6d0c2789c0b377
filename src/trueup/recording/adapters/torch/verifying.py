"""One recorded call, executed by PyTorch where it was recorded: does it give the recorded bits (`execution.bitwise`)?"""

from __future__ import annotations

from trueup.recording.adapters.torch.recorded_call import Place
from trueup.recording.adapters.torch.replaying import Replayer
from trueup.recording.execution.bitwise import Bitwise


class Verifier(Bitwise[Place], Replayer):
    """Executes calls of a capture where they were recorded; see `Bitwise`."""
