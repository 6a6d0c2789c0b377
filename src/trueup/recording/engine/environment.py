"""What a run is made of beside its framework: rank and switches by environment variables, versions of libraries, the process, and
the code that it runs: the commit of the script's repository, and a digest of each of its modules.

Git itself is not asked: the commit stands in ``.git/HEAD`` and what that names. Whether files were changed since shows in their
digests, which are of what was really imported."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from trueup.foundation.redaction import recorded
from trueup.foundation.version import VERSION

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
    """Return the environment variables that matter to numerics (``facts/variables.toml``)."""
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


MOST_FILES = 200
LARGEST = 1 << 20
"""Bytes of a file of code that is read."""
FOREIGN = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages", "node_modules"))
"""Folders whose code is a package's, of which versions tell."""


def code() -> dict[str, str]:
    """Return ``{"commit": hash, path below the repository: digest}`` of the script and of the modules beside it."""
    found: dict[str, str] = {}
    script = Path(_file(sys.modules.get("__main__")) or (sys.argv[0] if sys.argv else ""))
    with contextlib.suppress(OSError, ValueError):  # a folder that nobody may read tells nothing
        if script.is_file():
            script = script.resolve()
            root = next((one for one in script.parents if (one / ".git").exists()), None)
            if root is not None and (commit := _commit(root / ".git")):
                found["commit"] = commit
            found |= _digests(script, root or script.parent)
    return found


def _digests(script: Path, root: Path) -> dict[str, str]:
    """Return a digest of the script and of each loaded file below ``root`` that is no package's. Paths are compared as texts: a
    process has thousands of modules, and each capture looks at all of them."""
    below, ours = (os.path.normcase(folder / "_")[:-1] for folder in (root, Path(__file__).resolve().parents[2]))
    loaded = {path: os.path.normcase(path) for one in list(sys.modules.values()) if (path := _file(one))}
    here = [path for path, text in loaded.items() if text.startswith(below) and not text.startswith(ours)]
    files = sorted(Path(path) for path in here if not any(folder in loaded[path] for folder in FOREIGN))
    found = {}
    for one in [script, *files][:MOST_FILES]:
        state = one.stat()
        if state.st_size <= LARGEST:
            found[one.relative_to(root).as_posix()] = _digest(one, state.st_mtime_ns, state.st_size)
    return found


@lru_cache(maxsize=4 * MOST_FILES)
def _digest(path: Path, _changed: int, _size: int) -> str:
    """Return the digest of a file, read once until its time or size changes."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def _file(module: object) -> str:
    held = getattr(module, "__dict__", {}).get("__file__")
    return held if isinstance(held, str) and held.endswith(".py") else ""


def _commit(git: Path) -> str:
    """Return the commit that is checked out or nothing; in a worktree ``.git`` is a file that names the folder."""
    if git.is_file():
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head[:40]
    ref = head.removeprefix("ref:").strip()
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    for folder in (git, common):
        if ".." not in ref and (folder / ref).is_file():
            return (folder / ref).read_text().strip()[:40]
    packed = (common / "packed-refs").read_text().splitlines() if (common / "packed-refs").is_file() else []
    return next((line.split(" ")[0][:40] for line in packed if line.endswith(f" {ref}")), "")
