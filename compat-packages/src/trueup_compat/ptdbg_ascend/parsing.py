"""`parse`: the rows of a ``dump.pkl`` whose names begin as asked for, with their stacks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trueup.foundation.words.wording import clean
from trueup_compat.ptdbg_ascend.errors import CompareException

LINE_LIMIT = 16 << 20
NUMBERS = ("max", "min", "mean", "l2norm")


def parse(pkl_file: str | os.PathLike[str], module_name_prefix: str) -> None:
    """Print what a dump says of the calls whose names begin with a prefix, such as ``Functional_linear_145_backward``.

    Raises:
        CompareException: the file cannot be read, or holds no row.
    """
    found = 0
    for row in rows_of(Path(pkl_file)):
        if not row[0].startswith(module_name_prefix):
            continue
        found += 1
        for line in _lines(row):
            print(clean(line))
    if not found:
        print(f"no row of {pkl_file} begins with {clean(module_name_prefix)!r}")


def rows_of(path: Path) -> Iterator[list[Any]]:
    """Yield the rows of a file.

    Raises:
        CompareException: it cannot be read, or a line of it is none.
    """
    try:
        with path.open("rb") as file:
            while line := file.readline(LINE_LIMIT):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, list) or len(row) < 2 or not isinstance(row[0], str):
                    said = f"{path} has a line that is no row: the dump was interrupted, or this is no dump of ptdbg_ascend"
                    raise CompareException(CompareException.PARSE_FILE_ERROR, said)
                yield row
    except OSError as error:
        raise CompareException(CompareException.OPEN_FILE_ERROR, f"{path} cannot be read: {error.strerror}") from None


def _lines(row: list[Any]) -> Iterator[str]:
    if len(row) == 2:
        yield f"Trace back ({row[0]}):"
        for frame in row[1] if isinstance(row[1], list) else ():
            if isinstance(frame, list) and len(frame) >= 3:
                yield f'  File "{frame[0]}", line {frame[1]}, in {frame[2]}'
                if len(frame) > 3 and frame[3]:
                    yield f"    {frame[3]}"
        return
    dtype, shape = (row[3], row[4]) if len(row) > 4 else ("?", "?")
    numbers = row[5] if len(row) > 5 and isinstance(row[5], list) else []
    told = "".join(f"[{name}: {value}]" for name, value in zip(NUMBERS, numbers, strict=False))
    yield f"[{row[0]}][dtype: {dtype}][shape: {shape}]{told}"
