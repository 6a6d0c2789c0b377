"""One recorded call, executed by Paddle on the target and once more in float64 on the CPU, and judged (`execution.judging`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import paddle

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle import random_states
from trueup.recording.adapters.paddle.environment import switches
from trueup.recording.adapters.paddle.recorded_call import Rebuilt, rebuild
from trueup.recording.adapters.paddle.replay_arguments import Builder, Place, first_line
from trueup.recording.adapters.paddle.replay_memory import to_numpy
from trueup.recording.execution.bitwise import Bitwise
from trueup.recording.execution.judging import Judging, Result
from trueup.recording.execution.places import NotReplayable
from trueup.recording.execution.recorded import RecordedCall


class Replayer(Judging[Place]):
    """Executes and judges calls of a capture; see `Judging`."""

    place = Place

    def switches(self) -> dict[str, str]:
        """Return the values of Paddle's numeric switches."""
        return switches()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave the generators of this process, which calls set, and its device as they were."""
        device = paddle.get_device()
        kept = [(g, g.get_state()) for kind in dict.fromkeys(("cpu", self.device.partition(":")[0]))
                if (g := random_states.generator_of(kind)) is not None]  # fmt: skip
        try:
            yield
        finally:
            for generator, state in kept:
                generator.set_state(state)
            paddle.set_device(device)

    def execute(self, call: RecordedCall, place: Place) -> Result:
        """Execute a call, forward or backward, and return its results by slot.

        Raises:
            NotReplayable: it cannot be, or raises.
        """
        backward, wanted = call.delivers, list(call.outputs)
        if not wanted:
            raise NotReplayable("nothing that it computes was recorded")
        paddle.set_device(place.here)
        made = rebuild(self._forward(call) if backward else call, place, grad=backward)
        try:
            outputs = _run(call, made) if backward else made.execute()
            arrays = {slot: to_numpy(outputs[slot]) for slot in wanted if slot in outputs}
        except (NotReplayable, TrueupError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is an answer
            where = "the float64 CPU" if place.wide else place.device
            raise NotReplayable(f"{where} does not execute it: {type(error).__name__}: {first_line(error)}") from None
        return Result(arrays, made.random, bool(made.drawn), tuple(made.unwritten))


def _run(call: RecordedCall, made: Rebuilt) -> dict[str, paddle.Tensor]:
    """Execute a forward call and send the gradients that its backward received through it."""
    made.execute()
    builder = Builder(call, made.place, grad=False)
    received = {s: builder.tensor({"tensor": s}) for s in call.tensors if s.startswith("grad_output.")}
    made.drawn += builder.drawn
    made.unwritten += builder.unwritten
    return made.gradients(received, list(call.outputs))


class Verifier(Bitwise[Place], Replayer):
    """Executes calls of a capture where they were recorded; see `Bitwise`."""


def provide(device: str, *, simulated: bool) -> None:
    """Make sure that Paddle knows a device.

    Raises:
        TrueupError: it does not, or there is none of this number.
    """
    if simulated:
        raise TrueupError(
            "There is no simulated device for PaddlePaddle.\n  expected: a device that Paddle knows\n"
            "  got:      --simulated\n  next:     leave it out"
        )
    before = paddle.get_device()
    try:
        paddle.set_device(device)
        paddle.ones([1]).numpy()
    except Exception as error:  # noqa: BLE001 - every build has words of its own for a device that it lacks
        raise TrueupError(
            f"Nothing can be computed on {device}: {first_line(error)}\n"
            "  next:     name a device that this Paddle has (paddle.device.get_all_device_type lists them)"
        ) from None
    finally:
        with suppress(Exception):
            paddle.set_device(before)
