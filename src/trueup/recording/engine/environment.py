"""What a run is made of beside its framework: rank and switches by environment variables, versions of libraries, the process."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trueup.foundation.redaction.variables import recorded
from trueup.foundation.version import VERSION
from trueup.recording.engine.code import code

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


def variables() -> dict[str, str]:
    """Return the environment variables that matter to numerics (``redaction/variables.toml``)."""
    return recorded(os.environ)


def described(
    framework: str, version: str, devices: list[str], rank_and_world: tuple[int | None, int], *, seeds: Mapping[str, int],
    libraries: Sequence[str], switches: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Describe this process for its rank's manifest: framework and version, devices that tensors were seen on, rank (None when
    nothing says so) and world size, seeds by the name of the generator, versions of ``libraries`` that are loaded, effective
    values of the framework's numeric ``switches``."""
    found = {name: getattr(sys.modules[name], "__version__", "?") for name in libraries if name in sys.modules}
    found |= {"python": platform.python_version(), framework: version, "trueup": VERSION}
    rank, world = rank_and_world
    return {
        "framework": framework, "devices": devices, "versions": {name: str(found[name]) for name in sorted(found)},
        "seeds": dict(seeds), "world_size": world, "rank": rank or 0, "pid": os.getpid(), "argv": sys.argv[:64],
        "environment": {**switches, **variables()}, "code": code(),
    }  # fmt: skip
