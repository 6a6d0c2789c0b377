"""Kernel dumps to NumPy files, as msaccucmp's ``convert`` does: ``{dump}.{input or output}.{i}.npy`` in the shape that the device
has; with a format ``{dump}.{input or output}.{i}.{shape}.npy`` in its order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from trueup.exchange.readers.dump import Array, UnreadableError
from trueup.exchange.readers.kernel_dump import Tensor, read
from trueup.exchange.readers.kernel_dump import convert as laid_out
from trueup.foundation.model import TrueupError


@dataclass(frozen=True)
class Wish:
    """What ``convert`` was asked for: a format, the shape without padding, one slot (``input.0``) or all, bare bytes."""

    format: str | None = None
    shape: tuple[int, ...] = ()
    slot: str | None = None
    bare: bool = False


def convert(source: Path | Sequence[Path], out: Path, *, version: int = 2, wish: Wish = Wish()) -> tuple[int, list[str]]:
    """Convert dumps, or all of a folder; what is NumPy already (a simulated device's) is copied. Return the number of files, and
    what to know of some. Raises TrueupError where there is no dump, or one cannot be read or written."""
    sources = [source] if isinstance(source, Path) else list(source)
    written, said = 0, []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in _files(sources):
            if file.suffix == ".npy":
                if file.resolve() != (out / file.name).resolve():
                    shutil.copyfile(file, out / file.name)
                written += 1
                continue
            try:
                tensors = [one for one in read(file, whole=version == 1) if wish.slot in (None, one.slot)]
            except UnreadableError as error:
                said.append(f"{file.name} is no dump: {error}")
                continue
            if not tensors:
                said.append(f"{file.name} has no {wish.slot}")
            for one in tensors:
                try:
                    said += _written(one, f"{file.name}.{one.slot}", out, wish)
                    written += 1
                except UnreadableError as error:
                    said.append(f"{file.name}.{one.slot} stays as it is: {error}")
    except OSError as error:
        raise TrueupError(
            f"Dumps cannot be converted.\n  where:    {error.filename or out}\n  expected: a folder to write into\n"
            f"  got:      {error.strerror or error}\n  next:     name another -out"
        ) from None
    if not written:
        raise TrueupError(
            f"There is nothing to convert.\n  where:    {', '.join(map(str, sources))}\n"
            f"  expected: dumps of kernels (torch.npu.set_dump, acl.json)\n"
            f"  got:      {said[0] if said else 'no file'}\n  next:     name the folder of a dump with -d, or its version with -v"
        )
    return written, said


def _files(sources: Sequence[Path]) -> Iterator[Path]:
    for source in sources:
        yield from sorted(one for one in source.iterdir() if one.is_file()) if source.is_dir() else [source]


def _written(one: Tensor, name: str, out: Path, wish: Wish) -> list[str]:
    values: Array = one.values
    if wish.format:
        values = laid_out(values, one.format, wish.format, wish.shape or one.original, one.groups)
        name += "." + ("_" if wish.bare else "x").join(map(str, values.shape))
    if wish.bare:
        np.ascontiguousarray(values).tofile(out / f"{name}.{values.dtype.name}.{wish.format or one.format}.bin")
    else:  # NumPy's files have no bfloat16
        values = values.astype(np.float32) if values.dtype == ml_dtypes.bfloat16 else values
        np.save(out / f"{name}.npy", values, allow_pickle=False)
    return [] if wish.format or not one.private else [f"{name} is in the private format {one.format}: its shape is the device's"]
