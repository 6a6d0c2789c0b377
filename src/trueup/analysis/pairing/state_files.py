"""Weights in files: safetensors, npz, PyTorch's by its own restricted reader, Paddle's by one that makes arrays alone."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trueup.foundation.model import TrueupError

Array = np.ndarray[Any, Any]

BROKEN = (ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, TypeError, AttributeError, MemoryError)
"""What reading a file raises that is not what it seems."""

LARGEST = 1 << 38
"""Bytes that a file of weights may have: 256 GB."""


def read(path: str | Path) -> dict[str, Array]:
    """Return the tensors of a file by name.

    Raises:
        TrueupError: there is no such file, it is of no known kind, damaged, or holds something other than tensors.
    """
    file = Path(path)
    reader = READERS.get(file.suffix)
    if reader is None:
        raise TrueupError(f"{file}: weights are read from {', '.join(READERS)}, not {file.suffix or 'a file without ending'!r}")
    try:
        if not 0 < file.stat().st_size <= LARGEST:
            raise TrueupError(f"{file} has {file.stat().st_size} bytes: expected 1 to {LARGEST}")
        found = reader(file)
    except OSError as error:
        raise TrueupError(f"{file} cannot be read: {error.strerror or error}") from None
    except BROKEN as error:
        raise TrueupError(f"{file} is no file of weights: {str(error).splitlines()[0] if str(error) else error!r}") from None
    odd = next((name for name, value in found.items() if not isinstance(value, np.ndarray) or value.dtype == object), None)
    if odd is not None:
        raise TrueupError(f"{file}: {odd!r} is no tensor; save the model's state_dict and nothing else")
    return found


def write(state: Mapping[str, Array], path: str | Path) -> Path:
    """Write tensors as safetensors or npz.

    Raises:
        TrueupError: it is to be of another kind, exists, or cannot be written.
    """
    file = Path(path)
    if file.suffix not in (".safetensors", ".npz"):
        raise TrueupError(f"{file}: weights are written as .safetensors or .npz, which every framework reads")
    if file.exists():
        raise TrueupError(f"{file} exists; choose another name or delete it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".npz":
            held: dict[str, Any] = {name: np.asarray(one) for name, one in state.items()}
            np.savez(file, **held)
        else:
            from safetensors.numpy import save_file

            save_file({name: np.ascontiguousarray(one) for name, one in state.items()}, file)
    except OSError as error:
        raise TrueupError(f"{file} cannot be written: {error.strerror or error}") from None
    return file


def _safetensors(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def _npz(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _torch(file: Path) -> dict[str, Array]:
    """Read what torch.save wrote of a state_dict; ``weights_only`` makes tensors and plain containers, and runs nothing."""
    try:
        import torch
    except ImportError:
        raise TrueupError(f"{file} is PyTorch's own format, and PyTorch is not installed; save it as .safetensors") from None
    from trueup.recording.adapters.torch.host import to_numpy

    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(held, Mapping):
        raise ValueError("it holds no state_dict")
    return {str(name): np.array(to_numpy(one.detach())) if isinstance(one, torch.Tensor) else one for name, one in held.items()}


class _Arrays(pickle.Unpickler):
    """Makes NumPy arrays of numbers and plain containers; anything else that a pickle asks for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        found = ALLOWED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only arrays of numbers are read")
        return found


def _reconstructed(kind: Any, shape: Any, code: Any) -> Array:
    """Make the empty array that an array's pickle begins with; of plain arrays only."""
    del kind, shape, code
    return np.ndarray.__new__(np.ndarray, (0,), np.uint8)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C") -> Array:
    """Make an array of bytes, as NumPy pickles one by protocol 5."""
    return np.frombuffer(buffer, dtype=_plain(dtype)).reshape(shape, order=order if order in ("C", "F") else "C")


def _dtype(text: Any, align: Any = False, copy: Any = False) -> np.dtype[Any]:
    del align, copy
    return _plain(np.dtype(text)) if isinstance(text, str) and len(text) < 16 else _plain(None)


def _plain(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc" or dtype.hasobject:
        raise pickle.UnpicklingError("it holds an array that is not of numbers")
    return dtype


KIND = object()
"""What an array's pickle names as its class: only handed to `_reconstructed`, and nothing that could be called."""

ALLOWED: Mapping[tuple[str, str], Any] = {
    (f"{package}.{module}", name): made
    for package in ("numpy.core", "numpy._core")
    for module, name, made in (("multiarray", "_reconstruct", _reconstructed), ("numeric", "_frombuffer", _from_buffer))
} | {("numpy", "ndarray"): KIND, ("numpy", "dtype"): _dtype}
"""What a pickle of arrays asks for (NumPy 1 and 2), each with what is made of it."""


def _paddle(file: Path) -> dict[str, Array]:
    """Read what ``paddle.save`` wrote of a state_dict: a pickle of arrays, with a table of names that is left out."""
    with file.open("rb") as stream:
        held = _Arrays(stream).load()
    if not isinstance(held, dict):
        raise ValueError("it holds no state_dict")
    return {str(name): value for name, value in held.items() if name != "StructuredToParameterName@@"}


READERS: Mapping[str, Callable[[Path], dict[str, Array]]] = {
    ".safetensors": _safetensors, ".npz": _npz, ".pt": _torch, ".pth": _torch, ".bin": _torch, ".pdparams": _paddle,
}  # fmt: skip
"""By the ending of a file."""
