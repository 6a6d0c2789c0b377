"""How a version of ptdbg_ascend lays out its files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trueup.foundation.model import TrueupError
from trueup_compat.ptdbg_ascend.errors import CompareException

VERSION = "TRUEUP_PTDBG_VERSION"
"""Environment variable: the layout to write, whatever the script uses."""
FUNCTIONS, DEBUGGER = "2.0", "6.0"
"""Written for scripts that call ``register_hook``, as in the guides of att 2.0, and for those with a `PrecisionDebugger`."""
Separator = Literal["_", "."]

_PATH = re.compile(r"[A-Za-z0-9_./-]+")
_VERSION = re.compile(r"[1-6]\.\d")


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a version."""

    version: str

    @staticmethod
    def of(default: str) -> Layout:
        """Return the layout of the environment's version, else of ``default``.

        Raises:
            TrueupError: there was no such version.
        """
        version = os.environ.get(VERSION) or default
        if not _VERSION.fullmatch(version):
            raise TrueupError(f"{VERSION}={version} is no version of ptdbg_ascend: expected 1.0 to 6.0, such as 2.3 or 6.0")
        return Layout(version)

    @property
    def major(self) -> int:
        """First number of the version."""
        return int(self.version[0])

    @property
    def has_steps(self) -> bool:
        """Whether each step has a folder."""
        return self.major >= 4

    @property
    def separator(self) -> Separator:
        """What stands between the parts of a name."""
        return "." if self.major >= 6 else "_"

    @property
    def has_norm(self) -> bool:
        """Whether rows have the l2 norm."""
        return self.major >= 5

    @property
    def has_module_dump(self) -> bool:
        """Whether ``module_dump`` was there."""
        return self.major >= 5

    @property
    def flag(self) -> int:
        """The second field of a row."""
        return 0 if self.major >= 6 else 1

    @property
    def filters(self) -> bool:
        """Whether ``filter_switch`` is ON unless the script says otherwise."""
        return self.major < 4

    def stem(self, mode: str) -> str:
        """Return what the names of records and folder of tensors begin with."""
        prefixed = ("api_stack",) if self.major < 6 else ("api_stack", "list", "range", "acl")
        return f"{mode}_" if mode in prefixed else ""

    def root(self, path: Path, tag: str) -> Path:
        """Return the folder of a dump."""
        return path / f"{tag}_v{self.version}"

    def native(self, path: Path, tag: str) -> Path:
        """Return the native capture of the same dump; beside the dump, for the tools allow nothing but ranks in it."""
        return path / f"{tag}_v{self.version}_trueup"

    def folder(self, root: Path, step: int, rank: int) -> Path:
        """Return the folder of a step and rank."""
        return root / f"step{step}" / f"rank{rank}" if self.has_steps else root / f"rank{rank}"


def checked_path(path: str | os.PathLike[str] | None) -> Path:
    """Return the folder that a script named, or that of ``ASCEND_WORK_PATH``; of the ``.pkl`` of version 2.3 its folder.

    Raises:
        CompareException: there is neither, or the name has characters that the tool refused.
    """
    if path is None:
        work = os.environ.get("ASCEND_WORK_PATH")
        if work is None:
            raise CompareException(CompareException.INVALID_PATH_ERROR, "give set_dump_path a folder, or set ASCEND_WORK_PATH")
        return Path(work) / "dump_data"
    text = os.fspath(path)
    if not _PATH.fullmatch(text):
        expected = "letters, digits, and _ . / -"
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"dump path {text!r}: expected {expected}")
    found = Path(text)
    return found.parent if found.suffix == ".pkl" else found


def checked_tag(tag: str) -> str:
    """Return a tag, which is part of a folder's name.

    Raises:
        CompareException: it has other characters than letters, digits, ``_`` and ``-``.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,200}", tag):
        raise CompareException(CompareException.INVALID_PATH_ERROR, f"dump_tag {tag!r}: expected letters, digits, _ and -")
    return tag
