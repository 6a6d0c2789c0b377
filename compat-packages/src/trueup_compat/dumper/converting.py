"""Kernel dumps to NumPy files, as msaccucmp's ``convert`` does: ``{dump}.{input or output}.{i}.npy``, in the shape that the device
has."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from trueup.exchange.readers.dump import UnreadableError
from trueup.exchange.readers.kernel_dump import read
from trueup.foundation.model import TrueupError


def convert(source: Path, out: Path, *, version: int = 2) -> tuple[int, list[str]]:
    """Convert a dump, or all of a folder; what is NumPy already (a simulated device's) is copied. Return the number of files, and
    what to know of some. Raises TrueupError where there is no dump, or one cannot be read or written."""
    files = sorted(one for one in source.iterdir() if one.is_file()) if source.is_dir() else [source]
    written, said = 0, []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.suffix == ".npy":
                if file.resolve() != (out / file.name).resolve():
                    shutil.copyfile(file, out / file.name)
                written += 1
                continue
            try:
                tensors = read(file, whole=version == 1)
            except UnreadableError as error:
                said.append(f"{file.name} is no dump: {error}")
                continue
            for one in tensors:
                values = one.values.astype(np.float32) if one.values.dtype == ml_dtypes.bfloat16 else one.values
                np.save(out / f"{file.name}.{one.slot}.npy", values, allow_pickle=False)
                written += 1
                if one.private:
                    said.append(f"{file.name}.{one.slot} is in a private format: its shape is the device's")
    except OSError as error:
        raise TrueupError(
            f"Dumps cannot be converted.\n  where:    {error.filename or out}\n  expected: a folder to write into\n"
            f"  got:      {error.strerror or error}\n  next:     name another -out"
        ) from None
    if not written:
        raise TrueupError(
            f"There is nothing to convert.\n  where:    {source}\n  expected: dumps of kernels (torch.npu.set_dump, acl.json)\n"
            f"  got:      {said[0] if said else 'no file'}\n  next:     name the folder of a dump with -d, or its version with -v"
        )
    return written, said
