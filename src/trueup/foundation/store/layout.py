"""The names of a capture's files, and the checks that keep a hostile name inside the capture.

::

    run/manifest.json                                what was recorded, and how
        processes/<pid>.json                         a report of each process that was armed
        unranked-<pid>/                              recorded before the ranks started; not read
        rank-00000/lock                              whose folder this is
                   manifest.json                     framework, devices, versions, seeds, status, notes
                   sites-0000.parquet                call stacks
                   tensors-0000.safetensors          payload
                   shadow-0000.parquet               local errors, of a shadow run (`trueup.recording.execution.shadow_table`)
                   step-000000/records-0000.parquet  one row per slot of a call
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from trueup.foundation.model import TrueupError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
LOCK = "lock"
PROCESSES = "processes"
UNRANKED = "unranked-"
TEMPORARY = ".tmp"

RANK = re.compile(r"rank-([0-9]{5,9})")
STEP = re.compile(r"step-([0-9]{6,9})")
RECORDS = re.compile(r"records-([0-9]{4,9})\.parquet")
SITES = re.compile(r"sites-([0-9]{4,9})\.parquet")
SEGMENT = re.compile(r"tensors-([0-9]{4,9})\.safetensors")


def rank_name(rank: int) -> str:
    """Return ``rank-00000``."""
    return f"rank-{rank:05d}"


def step_name(step: int) -> str:
    """Return ``step-000000``."""
    return f"step-{step:06d}"


def records_name(part: int) -> str:
    """Return ``records-0000.parquet``."""
    return f"records-{part:04d}.parquet"


def number(pattern: re.Pattern[str], name: str) -> int | None:
    """Return the number in a file name of that kind, None if it is of another kind."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def real_file(root: Path, path: Path) -> Path:
    """Return ``path`` if it is a regular file inside ``root`` reached without leaving it.

    Raises:
        FileNotFoundError: there is no such file.
        TrueupError: it is a link, a pipe or a device, or a folder on the way leads out of the capture.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise TrueupError(f"{path} is not a regular file: captures hold no links, pipes or devices; remove it")
    if not path.resolve().is_relative_to(root.resolve()):
        raise TrueupError(f"{path} leads out of the capture {root}: remove the link")
    return path
