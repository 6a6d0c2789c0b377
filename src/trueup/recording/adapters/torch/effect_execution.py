"""Executes recorded calls in float64 for `trueup.analysis.anomalies.effects`, with the inputs that it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray

from trueup.foundation.model import TrueupError
from trueup.foundation.store import Capture
from trueup.recording.adapters.torch.recorded_call import NotReplayable
from trueup.recording.adapters.torch.replaying import Replayer
from trueup.recording.execution.effect_tensors import Untold
from trueup.recording.execution.recorded import RecordedCall, RecordedCalls
from trueup.recording.execution.results import parallel


class WideExecutor(Replayer):
    """Executes calls of a capture in float64 on the CPU.

    Args:
        capture: whose calls these are.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__(RecordedCalls(capture), "cpu", draws=False)
        self._around: RecordedCall | None = None

    def execute_wide(self, call: RecordedCall, forward: RecordedCall | None) -> Mapping[str, NDArray[Any]]:
        """Return what a call gives, by slot; see `trueup.analysis.anomalies.effects.Executor`.

        Raises:
            Untold: it cannot be executed again, or draws random numbers in float64 that are not the recorded ones.
        """
        self._around = forward
        try:
            result = super().execute(call, self.truth)
        except (NotReplayable, TrueupError) as reason:
            raise Untold(" ".join(str(reason).split())) from None
        finally:
            self._around = None
        if result.unwritten:
            raise Untold(f"it reads {', '.join(result.unwritten)}, which the capture does not hold")
        if result.random and not all(
            parallel(array, call.outputs[slot].array()) for slot, array in result.arrays.items() if call.outputs[slot].kept
        ):
            raise Untold("float64 draws other random numbers")
        return result.arrays

    def _forward(self, call: RecordedCall) -> RecordedCall:
        return self._around if self._around is not None else super()._forward(call)


class _Wide:
    def __init__(self, replayer: WideExecutor) -> None:
        self.execute = replayer.execute_wide


@contextmanager
def executing(capture: Capture) -> Iterator[_Wide]:
    """Give what executes the calls of a capture; generators and the number of threads are left as they were."""
    replayer = WideExecutor(capture)
    with replayer.undisturbed(), torch.no_grad():
        yield _Wide(replayer)
