"""What `trueup.analysis.rerun` asks of this adapter (`trueup.analysis.rerun.executing.Executing`)."""

from __future__ import annotations

from paddle.base import core

from trueup.recording.adapters.paddle.case_errors import CASES as CASES
from trueup.recording.adapters.paddle.replaying import Replayer as Replayer
from trueup.recording.adapters.paddle.replaying import Verifier as Verifier
from trueup.recording.adapters.paddle.replaying import provide as provide


def limit_threads(number: int) -> None:
    """Let each operator use so many threads."""
    core.set_num_threads(number)
