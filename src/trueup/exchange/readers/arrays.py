"""Tensors in files: .npy, .npz and .pt, read without believing what they claim, and without running anything in them.

A .npy file is mapped; its header must fit the bytes that follow. A member of a .npz file is unpacked only up to what its header
says, and only where that is not absurd for its packed size. A .pt file is read by ``torch.load(weights_only=True)``, which runs
no code, and only if its members are stored unpacked, so nothing can grow. Nothing else is ever unpickled.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

import numpy as np

from trueup.exchange.readers.dump import Array, Tree, UnreadableError, plain
from trueup.foundation.store.segment import numpy_dtype

PLAUSIBLE = 64 << 20  # bytes up to which a tensor may be any number of times larger than its file
GROWTH = 16  # how many times larger it may be beyond that: expanded views, packed zeros
UNPACKED_LIMIT = 1 << 30  # most bytes of one tensor that is unpacked into memory

BROKEN = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError, EOFError,
    RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError, AssertionError,
    tokenize.TokenError,
)  # fmt: skip
"""What libraries raise at files that are damaged or made to harm."""

NPY = b"\x93NUMPY"
ZIP = b"PK\x03\x04"
EMPTY_ZIP = b"PK\x05\x06"


def believable(claimed: int, held: int) -> None:
    """Refuse, by UnreadableError, a tensor that is far larger than what it lies in."""
    if claimed > PLAUSIBLE and claimed > GROWTH * held:
        raise UnreadableError(f"it claims {claimed:,} bytes in a file of {held:,}")


def reason(error: BaseException) -> str:
    """Say in short why a file could not be read."""
    text = str(error).strip().split("\n")[0][:120]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def read_npy(tree: Tree, path: str) -> Array:
    """Map a .npy file; raises UnreadableError if it is missing, damaged, no array of numbers."""
    try:
        with tree.open(path) as file:
            shape, fortran, dtype = _npy_header(file)
            start = file.tell()
            held = file.seek(0, 2) - start
            needed = math.prod(shape) * dtype.itemsize
            if needed > held:
                raise UnreadableError(f"its header claims {needed:,} bytes, {held:,} follow")
            if not needed:
                return np.empty(shape, dtype)
            return plain(np.memmap(file, dtype, "r", start, shape, "F" if fortran else "C"))
    except BROKEN as error:
        raise UnreadableError(reason(error)) from None


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise UnreadableError(f"version {version} of the .npy format holds no plain numbers")
    except BROKEN:
        raise UnreadableError("its header is damaged") from None
    if dtype.hasobject or dtype.names is not None or not dtype.itemsize:
        raise UnreadableError("it holds Python objects or fields, which are never loaded")
    if len(shape) > 64 or any(type(size) is not int or size < 0 for size in shape):
        raise UnreadableError("its header claims impossible sizes")
    return shape, bool(fortran), dtype


def npz_members(tree: Tree, path: str) -> list[str]:
    """Return the names of the arrays in a .npz file; raises UnreadableError if it is no archive, or damaged."""
    try:
        with tree.open(path) as file, zipfile.ZipFile(file) as archive:
            return [info.filename for info in archive.infolist() if info.filename.endswith(".npy")]
    except BROKEN as error:
        raise UnreadableError(reason(error)) from None


def read_npz(tree: Tree, path: str, member: str) -> Array:
    """Unpack one array of a .npz file; raises UnreadableError if it is missing, damaged, too large, or no array of numbers."""
    try:
        with tree.open(path) as file, zipfile.ZipFile(file) as archive:
            info = archive.getinfo(member)
            with archive.open(info) as packed:
                shape, fortran, dtype = _npy_header(packed)
                needed = math.prod(shape) * dtype.itemsize
                believable(needed, info.compress_size)
                if needed > UNPACKED_LIMIT:
                    raise UnreadableError(f"it would unpack to {needed:,} bytes; unpack the archive and import the folder")
                raw = packed.read(needed)
                if len(raw) < needed:
                    raise UnreadableError(f"its header claims {needed:,} bytes, {len(raw):,} follow")
                return plain(np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C"))
    except BROKEN as error:
        raise UnreadableError(reason(error)) from None


def has_torch() -> bool:
    """Tell whether PyTorch is installed, without importing it."""
    return importlib.util.find_spec("torch") is not None


def read_pt(tree: Tree, path: str) -> Array:
    """Return the first tensor of a .pt file; raises UnreadableError if it has none, is damaged, or PyTorch is not installed."""
    for _, array in pt_tensors(tree, path):
        return array
    raise UnreadableError("it holds no tensor")


def pt_tensors(tree: Tree, path: str) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a .pt file, named by their keys; one alone has no name. Raises UnreadableError as `read_pt` does."""
    size = tree.files.get(path, 0)
    try:
        with tree.open(path) as file:
            content = _load_pt(file, size)
        found = list(_named("", content, 0))
    except BROKEN as error:
        raise UnreadableError(reason(error)) from None
    for name, tensor in found:
        try:
            yield name, _array_of(tensor, size)
        except BROKEN as error:
            raise UnreadableError(reason(error)) from None


def _load_pt(file: BinaryIO, size: int) -> Any:
    if not has_torch():
        raise UnreadableError("PyTorch, which reads .pt files, is not installed: pip install 'trueup[torch]'")
    with zipfile.ZipFile(file) as archive:  # the format before PyTorch 1.6, a bare pickle, is none
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > size:
            raise UnreadableError("its members are packed, which torch.save never does")
    import torch

    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _named(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "untyped_storage"):
        yield name, value
    elif isinstance(value, (dict, list, tuple)) and depth < 8:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named(f"{name}.{key}" if name else str(key), inner, depth + 1)


def _array_of(tensor: Any, size: int) -> Array:
    """Show a tensor's elements as an array, without a copy where it is contiguous."""
    name = str(tensor.dtype).removeprefix("torch.")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.device.type != "cpu":
        raise UnreadableError(f"a tensor of layout {tensor.layout} on {tensor.device} is not a plain array")
    believable(tensor.numel() * tensor.element_size(), size)
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    array: Array = raw.view(numpy_dtype(name)).reshape(tuple(tensor.shape))
    return array
