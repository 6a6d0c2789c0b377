"""A process learns its rank from whichever launcher started it."""

from __future__ import annotations

import pytest

from trueup.recording.adapters.torch import environment
from trueup.recording.engine import environment as shared

CASES = {
    "RANK=3 WORLD_SIZE=8": (3, 8),
    "RANK=3": (3, 1),
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2": (1, 2),
    "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2": (1, 2),
    "PMI_RANK=5 PMI_SIZE=6": (5, 6),
    "SLURM_PROCID=2 SLURM_NTASKS=4": (2, 4),
    "SLURM_PROCID=0 SLURM_NTASKS=1": (None, 1),
    "SLURM_PROCID=0": (None, 1),
    "RANK=1 WORLD_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=4 PMI_RANK=0": (1, 2),
    "RANK=x OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2": (1, 2),
    "PADDLE_TRAINER_ID=1 PADDLE_TRAINERS_NUM=2": (1, 2),
    "": (None, 1),
}


@pytest.mark.parametrize("variables", CASES)
def test_rank_and_world(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    monkeypatch.setattr(environment, "_joined", None)
    for names in shared.RANKS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for pair in variables.split():
        name, _, value = pair.partition("=")
        monkeypatch.setenv(name, value)
    assert environment.rank_and_world() == CASES[variables]
