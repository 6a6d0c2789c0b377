"""Tensors in files: .npy, .npz and .pt, read without believing what they claim, and without running anything in them.

A .npy file is mapped; its header must fit the bytes that follow. A member of a .npz file is unpacked only up to what its header
says, and only where that is not absurd for its packed size. A .pt file is read as a checkpoint is, without PyTorch
(`foundation.checkpoint`).
"""

from __future__ import annotations

import math
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

import numpy as np

from trueup.exchange.readers.dump import Array, Tree, UnreadableError, plain
from trueup.foundation.checkpoint.inert import Stored
from trueup.foundation.checkpoint.reading import gathered, leaves, overblown, torch_archive

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
    if said := overblown(claimed, held):
        raise UnreadableError(said)


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


def read_pt(tree: Tree, path: str) -> Array:
    """Return the first tensor of a .pt file; raises UnreadableError if it has none, or is damaged."""
    for _, array in pt_tensors(tree, path):
        return array
    raise UnreadableError("it holds no tensor")


def pt_tensors(tree: Tree, path: str) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a .pt file, named by their keys; one alone has no name. Raises UnreadableError if the file is damaged,
    or holds what is no plain tensor."""
    try:
        content, bytes_of, foreign = torch_archive(partial(tree.open, path), tree.files.get(path, 0))
        if foreign:
            raise UnreadableError(f"it holds {', '.join(foreign[:3])}, and plain tensors alone are read")
        for name, value in leaves(content):
            if isinstance(value, Stored):
                yield name, gathered(value, bytes_of)
    except BROKEN as error:
        raise UnreadableError(reason(error)) from None
