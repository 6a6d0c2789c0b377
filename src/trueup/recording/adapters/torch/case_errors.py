"""How wrong a device is in one call of PyTorch's (`trueup.recording.execution.case_errors`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trueup.recording.adapters.torch.chain_running import ChainReplayer
from trueup.recording.adapters.torch.environment import switches
from trueup.recording.adapters.torch.recorded_call import Place
from trueup.recording.adapters.torch.replay_memory import NotReplayable
from trueup.recording.adapters.torch.source import Source
from trueup.recording.adapters.torch.source_names import function_name, plain_name
from trueup.recording.adapters.torch.source_paths import paths_of
from trueup.recording.execution.case_errors import CaseErrors
from trueup.recording.execution.cases import Case
from trueup.recording.execution.chains import Chain


class TorchCases(CaseErrors):
    """Executes calls with PyTorch; see `CaseErrors`."""

    title, needs, template, plugin = "PyTorch", "torch, safetensors and pytest", "test_torch.py.j2", "torch_npu"

    def chained(self, chain: Chain, device: str) -> ChainReplayer:
        """Return what executes and judges the last call of a chain."""
        return ChainReplayer(chain, device)

    def seeded(self) -> bytes:
        """Return the state of the CPU's generator at seed 0."""
        return bytes(torch.Generator().manual_seed(0).get_state().numpy().tobytes())

    def source(self, chain: Chain, against: str, random: frozenset[int]) -> Source:
        """Write a chain as source."""
        try:
            found_at = [paths_of(each, Place(against, each.home), results=_read_of(chain, k)) for k, each in enumerate(chain.cases)]
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            raise NotReplayable(f"{against} does not execute it: {error}") from None
        return Source.of(chain, found_at, random=random)

    def names(self, case: Case) -> tuple[str, str]:
        """Return a short name for files, and the function as PyTorch has it."""
        return plain_name(case.call), function_name(case.made)

    def save(self, tensors: dict[str, Any], path: Path) -> list[tuple[str, str, list[int]]]:
        """Write tensors to a file."""
        save_file({k: t.contiguous() for k, t in tensors.items()}, path)
        return [(k, str(t.dtype).removeprefix("torch."), list(t.shape)) for k, t in tensors.items()]

    def switches(self) -> dict[str, str]:
        """Return the values of PyTorch's numeric switches."""
        return switches()


def _read_of(chain: Chain, k: int) -> tuple[str, ...]:
    """Return the results of a call that later ones read."""
    return tuple({link.slot: 0 for links in chain.links for link in links.values() if link.maker == k})


CASES = TorchCases()
settled, judged, written = CASES.settled, CASES.judged, CASES.written
