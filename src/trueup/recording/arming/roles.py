"""What kind of process this is, from how Python was started.

Only a process that trains is captured at once. A launcher computes nothing. A child of multiprocessing may be a data
worker or a training worker, and its environment does not tell: it inherits RANK from its parent. It is captured when it
joins a process group, which no data worker does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

Role = Literal["run", "launcher", "child"]

LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "horovodrun", "mpirun", "colossalai", "fleetrun")
"""Console scripts that start the training in other processes (torch 2.13, accelerate 1.x, deepspeed 0.17, paddle 3.3)."""

LAUNCHER_MODULES = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands", "deepspeed.launcher", "paddle.distributed.launch",
    "paddle.distributed.fleet.launch",
)  # fmt: skip
"""The same, started with ``python -m``."""

CHILDREN = ("--multiprocessing-fork", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""In the command line of what multiprocessing starts by spawn and forkserver (CPython 3.10 to 3.14)."""


def role(command: Sequence[str] | None = None) -> Role:
    """Tell the role of the process with this command line (its interpreter first), by default this one."""
    words = list(sys.orig_argv if command is None else command)
    if any(mark in word for word in words[1:] for mark in CHILDREN) or (command is None and _forked_child()):
        return "child"
    module, script = _program(words)
    if module is not None:
        launches = any(module == name or module.startswith(f"{name}.") for name in LAUNCHER_MODULES)
    else:
        launches = script is not None and PurePath(script).name in LAUNCHERS
    return "launcher" if launches else "run"


def _program(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the module after ``-m``, or the script, of a Python command line."""
    skip = False
    for position, word in enumerate(words[1:], 1):
        if skip:
            skip = False
        elif word == "-m":
            return (words[position + 1] if position + 1 < len(words) else None), None
        elif word in ("-W", "-X"):
            skip = True
        elif word == "-c":
            return None, None
        elif not word.startswith("-"):
            return None, word
    return None, None


def _forked_child() -> bool:
    """Tell whether multiprocessing forked this process (before it imported the framework)."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and (
        process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)
    )


def data_worker() -> bool:
    """Tell whether this process served a DataLoader."""
    torch = sys.modules.get("torch.utils.data._utils.worker")
    paddle = sys.modules.get("paddle.io.dataloader.worker")
    return any(getattr(worker, "_worker_info", None) is not None for worker in (torch, paddle))
