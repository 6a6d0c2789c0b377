"""How wrong a device is in one call of Paddle's (`trueup.recording.execution.case_errors`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trueup.recording.adapters.paddle import random_states
from trueup.recording.adapters.paddle.environment import switches
from trueup.recording.adapters.paddle.replaying import Replayer
from trueup.recording.adapters.paddle.source import Source
from trueup.recording.execution.case_errors import CaseErrors, OneCall
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain
from trueup.recording.execution.places import NotReplayable


class CaseReplayer(Replayer):
    """Executes and judges a call that is in memory.

    Raises:
        NotReplayable: there are calls before it.
    """

    def __init__(self, chain: Chain, device: str) -> None:
        if len(chain.cases) > 1:
            raise NotReplayable("calls of PaddlePaddle are executed one by one, without those before them")
        super().__init__(OneCall(chain.target), device)  # type: ignore[arg-type]
        self._stand(chain.target.home, draws=False)


class PaddleCases(CaseErrors):
    """Executes calls with Paddle; see `CaseErrors`."""

    title, needs, template, plugin = "PaddlePaddle", "paddle, numpy, safetensors and pytest", "test_paddle.py.j2", ""

    def chained(self, chain: Chain, device: str) -> CaseReplayer:
        """Return what executes and judges the call."""
        return CaseReplayer(chain, device)

    def seeded(self) -> bytes:
        """Return the state of the CPU's generator at seed 0."""
        generator = random_states.generator_of("cpu")
        before = generator.get_state()
        generator.manual_seed(0)
        found = random_states.state_of(generator)
        generator.set_state(before)
        return found or b""

    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        """Write the call as source."""
        return Source.of(chain.target, against, random=bool(random), seeded=self.seeded())

    def names(self, case: Case) -> tuple[str, str]:
        """Return a short name for files, and the function as Paddle has it."""
        op = case.call.key.op
        name = re.sub(r"[^a-z0-9_]", "", op.rpartition(".")[2].lower())[:60].strip("_") or "call"
        return f"{name}_backward" if case.call.key.phase == "backward" else name, case.made.key.op

    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        """Write arrays to a file; what safetensors has no name for as its bits."""
        save_file({k: _plain(a) for k, a in tensors.items()}, path)
        return [(k, a.dtype.name, list(a.shape)) for k, a in tensors.items()]

    def switches(self) -> dict[str, str]:
        """Return the values of Paddle's numeric switches."""
        return switches()


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16)
    return array.view(np.uint8) if array.dtype.name.startswith("float8") else array


CASES = PaddleCases()
