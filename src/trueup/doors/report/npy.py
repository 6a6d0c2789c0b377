"""Tensors as plain ``.npy`` files, which every tool reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which ``.npy`` holds a tensor: its own, or the smallest of NumPy's that holds all its values."""
    if dtype.kind in "biufc" and dtype.isbuiltin == 1:
        return dtype
    return np.dtype(np.float32 if "float" in dtype.name else np.int8 if dtype.name.startswith("int") else np.uint8)


def write_npy(values: NDArray[Any], path: Path) -> str:
    """Write a tensor piece by piece, then give it its name; return a sentence that says what was written.

    Raises:
        TrueupError: the file cannot be written.
    """
    dtype = plain_dtype(values.dtype)
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": values.shape}
            )
            with np.nditer(values, ["external_loop", "buffered", "zerosize_ok"], order="C", buffersize=1 << 16) as pieces:
                for piece in pieces if values.size else ():
                    file.write(np.ascontiguousarray(piece).astype(dtype).tobytes())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrueupError(f"{path} cannot be written: {error.strerror}; name another file") from None
    widened = "" if dtype == values.dtype else f", widened from {values.dtype.name}, which .npy does not know"
    return one_line(f"wrote {path}: {dtype.name} {list(values.shape)}{widened}")


def read_npy(path: Path) -> NDArray[Any]:
    """Map a ``.npy`` file; nothing in it is executed.

    Raises:
        TrueupError: it cannot be read, or holds objects.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, OverflowError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise TrueupError(f"{path} cannot be read as .npy: {one_line(str(reason))[:200]}; write it again with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise TrueupError(f"{path} is no .npy file but an archive of several: unpack it and name one")
    return array
