"""What a process is told by its environment variables: its rank, and the switches of device libraries."""

from __future__ import annotations

import os

from trueup.foundation.redaction.variables import recorded

RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate, deepspeed
    ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),  # paddle.distributed.launch and spawn
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun; a job of one task sets them too, and so does an interactive shell
)
"""Variables in which launchers tell a process its rank and the world size, the surest first."""


def rank_and_world() -> tuple[int | None, int]:
    """Return the rank that the variables of a launcher tell (None: they tell none) and the world size."""
    for rank_name, world_name in RANKS:
        rank, world = (os.environ.get(name, "") for name in (rank_name, world_name))
        if rank.isdigit() and (rank_name != "SLURM_PROCID" or (world.isdigit() and int(world) > 1)):
            return int(rank), int(world) if world.isdigit() else 1
    return None, 1


def ranks_in_words(ranks: list[int]) -> str:
    """Write ranks in the group's order, runs as first and last: ``0-3,7``. A group of 512 stays readable."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def variables() -> dict[str, str]:
    """Return the environment variables that matter to numerics (``redaction/variables.toml``)."""
    return recorded(os.environ)
