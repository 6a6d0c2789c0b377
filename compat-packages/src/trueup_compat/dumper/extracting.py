"""Operators taken out of one file into another, as ``h5copy -p -s /op/seqid/ -d /op/seqid/`` does."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trueup.foundation.model import TrueupError
from trueup_compat.dumper.hdf5 import NATIVE, TAKEN, h5py


def extract(source: str | os.PathLike[str], target: str | os.PathLike[str], groups: str | Sequence[str]) -> int:
    """Copy operators, each ``/op/seqid/``, into a file that is made or added to; return how many.

    Raises:
        TrueupError: the source cannot be read or has no such operator, or the target has it already.
    """
    wanted = [groups] if isinstance(groups, str) else list(groups)
    if Path(source).resolve() == Path(target).resolve():
        raise TrueupError(f"{source} cannot be copied into itself: name another file")
    library, native = h5py(), Path(f"{os.fspath(source)}{NATIVE}")
    try:
        with library.File(source, "r") as there, library.File(target, "a") as here:
            for group in wanted:
                match = re.fullmatch(r"/?([^/]+)/(\d+)/?", group)
                if match is None:
                    raise TrueupError(f"{group!r} names no operator: expected /op/seqid/, such as /numpy_T/1/")
                op, seqid = match.groups()
                held = there.get(op, getlink=True) is not None and isinstance(there.get(op, getlink=True), library.HardLink)
                if not held or not isinstance(there[op].get(seqid, getlink=True), library.HardLink):
                    raise TrueupError(f"{source} has no /{op}/{seqid}/: trueup import and trueup show list what it has")
                if f"{op}/{seqid}" in here:
                    raise TrueupError(f"{target} has /{op}/{seqid}/ already")
                if native.is_dir():
                    here.attrs[TAKEN] = os.path.relpath(native, Path(target).parent)
                there.copy(there[op][seqid], here.require_group(op), seqid)  # links are copied as links: nothing is followed
    except (OSError, KeyError) as error:
        raise TrueupError(f"{source} cannot be copied into {target}: {error}") from None
    return len(wanted)
