"""What files hold, read without believing what they claim, and without running anything in them: tensors, protocol buffers, JSON.

A .npy file is mapped; its header must fit the bytes that follow. A member of a .npz file is unpacked only up to what its header
says, and only where that is not absurd for its packed size. A .pt file is read as a checkpoint is, without PyTorch
(`foundation.checkpoint`).

Protocol buffers of TensorFlow's debuggers and CANN's dumps are read without either: a table of their fields, made into classes by
``protobuf``. A message takes memory in proportion to its file, for fields that the table lacks stay bytes; beyond `MOST` it is
refused. A TensorProto becomes an array without believing a size: bytes as they are, or a list of values whose last one fills the
rest.

JSON as training tools write it is too large to hold, cut off where the process was killed, with bare NaN and Infinity. The
standard library's decoder takes members of an object one at a time, so a file that ends early yields all its whole members. (The
streaming parsers at hand refuse NaN, or the whole of a broken file.)
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import math
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache, partial
from typing import IO, Any, BinaryIO

import ml_dtypes
import numpy as np

from trueup.exchange.readers.dump import Array, Tree, UnreadableError, plain
from trueup.foundation import toml
from trueup.foundation.checkpoint.inert import Stored
from trueup.foundation.checkpoint.reading import gathered, leaves, overblown, torch_archive
from trueup.foundation.model import TrueupError

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

CHUNK = 1 << 20
MEMBER_LIMIT = 8 << 20  # characters of one member; a call with ten thousand tensors has four million

LONGEST_NUMBER = 4096  # characters that may follow a number that is decoded in part: of ``-0.5`` a chunk may hold ``-0.``

_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_ENDS = _SPACE + ",}"  # what may follow a member

MOST = 1 << 30  # bytes of a message; protobuf itself ends at 2 GiB
PACKAGE = "trueup.messages"


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


class Members:
    """Yields ``(group, key, value)`` of a JSON object: ``group`` is a member of its own that is entered, or None.

    >>> list(Members(io.BytesIO(b'{"task": "x", "data": {"a": 1, "b": NaN'), enter="data"))
    [(None, 'task', 'x'), ('data', '', None), ('data', 'a', 1)]
    """

    def __init__(self, file: BinaryIO, enter: str | None = None) -> None:
        self.problem: str | None = None  # why reading ended before the object did
        self._file, self._enter = file, enter
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._text, self._at, self._ended = "", 0, False

    def __iter__(self) -> Iterator[tuple[str | None, str, Any]]:
        if self._next() != "{":
            self.problem = "it does not begin with an object"
            return
        self._at += 1
        yield from self._members(None)

    def _members(self, group: str | None) -> Iterator[tuple[str | None, str, Any]]:
        while self.problem is None:
            sign = self._next()
            if sign == ",":
                self._at += 1
                continue
            if sign == "}":
                self._at += 1
                return
            known, key = self._value() if sign == '"' else self._broken()
            if not known or not isinstance(key, str):
                return
            if self._next() != ":":
                self._broken()
                return
            self._at += 1
            if group is None and key == self._enter and self._next() == "{":
                self._at += 1
                yield key, "", None  # tells that the group was found, though it be empty
                yield from self._members(key)
                continue
            known, value = self._value()
            if known:
                yield group, key, value

    def _broken(self) -> tuple[bool, None]:
        if self.problem is None:
            self.problem = "it ends too early" if self._ended and self._at >= len(self._text) else "it is no JSON"
        return False, None

    def _next(self) -> str:
        """Return the next character that is no space, empty at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._more(CHUNK):
                return ""

    def _more(self, size: int) -> bool:
        if self._ended:
            return False
        raw = self._file.read(size)
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode(raw, self._ended)
        self._at = 0
        return not self._ended

    def _value(self) -> tuple[bool, Any]:
        """Decode the value that begins here, reading on until it is whole."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                following = self._text[end : end + 1]
                if isinstance(value, (dict, list, str)) or (following and following in _ENDS):  # else a number may go on
                    self._at = end
                    return True, value
                if self._ended:
                    self._at = end
                    return self._broken()
                if len(self._text) - end > LONGEST_NUMBER:
                    return self._broken()
            except RecursionError:
                self.problem = "it is nested too deeply"
                return False, None
            except ValueError:
                if self._ended:
                    self._at = len(self._text)
                    return self._broken()
            held = len(self._text) - self._at
            if held > MEMBER_LIMIT:
                self.problem = f"it holds a member of more than {MEMBER_LIMIT:,} characters, or is no JSON"
                return False, None
            self._more(max(CHUNK, held))


def whole(file: BinaryIO, size: int, limit: int) -> Any:
    """Decode a file at once; raises ValueError if it is larger than the limit, or no JSON."""
    if size > limit:
        raise ValueError(f"it has {size:,} bytes, and at most {limit:,} are read")
    try:
        return json.loads(file.read(limit + 1).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse(message: str, data: bytes) -> Any:
    """Read a message of ``messages.toml``; raises UnreadableError if it is none or too large."""
    if len(data) > MOST:
        raise UnreadableError(f"a message of {len(data):,} bytes is larger than {MOST:,}")
    found = _classes()[message]()
    try:
        found.ParseFromString(data)
    except Exception as error:  # noqa: BLE001 - DecodeError is another class in each implementation of protobuf
        raise UnreadableError(f"it is no {message}: {str(error)[:80]}") from None
    return found


def text(value: bytes) -> str:
    """Return text as protobuf holds it."""
    return value.decode("utf-8", "replace")


def require(extra: str, what: str, *modules: str) -> None:
    """Say what is to be installed, where it is not; raises TrueupError."""
    if any(importlib.util.find_spec(name) is None for name in ("google", "google.protobuf", *modules)):
        raise TrueupError(f"{what} cannot be read without protobuf.\n  next:     pip install '{extra}'")


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="trueup_messages.proto", package=PACKAGE, syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    table = toml.packaged(__package__, "messages.toml")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("[]")
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if kind.endswith("[]") else kinds.LABEL_OPTIONAL
            if plain[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{plain}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    # before 4.22 a factory makes the classes: CANN's own compiler keeps protobuf 3.20
    make = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory(pool).GetPrototype
    return {name: make(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in table}


DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool", 11: "int8",
    12: "uint8", 13: "int32", 14: "bfloat16", 15: "int16", 16: "uint16", 17: "uint16", 18: "complex128", 19: "float16",
    22: "uint32", 23: "uint64", 24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
"""DataType of tensorflow/core/framework/types.proto; quantised ones by the integers that they hold. A reference adds 100."""
NO_NUMBERS = {7: "text", 20: "a handle", 21: "a variant"}
_VALUES = {
    "float32": "float_val", "float64": "double_val", "int32": "int_val", "uint8": "int_val", "int16": "int_val", "int8": "int_val",
    "uint16": "int_val", "int64": "int64_val", "bool": "bool_val", "bfloat16": "half_val", "float16": "half_val",
    "uint32": "uint32_val", "uint64": "uint64_val", "complex64": "scomplex_val", "complex128": "dcomplex_val",
}  # fmt: skip
_HALVES = ("bfloat16", "float16")
MAX_DIMENSIONS = 64


def dtype_of(number: int) -> str | None:
    """Return the name of a DataType, None of one that holds no numbers."""
    return DTYPES.get(number % 100)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape; raises UnreadableError if it is none."""
    sizes = tuple(int(dim.size) for dim in tensor.tensor_shape.dim[: MAX_DIMENSIONS + 1])
    if tensor.tensor_shape.unknown_rank or len(sizes) > MAX_DIMENSIONS or any(size < 0 for size in sizes):
        raise UnreadableError("its shape is unknown or impossible")
    return sizes


def array_of(tensor: Any) -> Array:
    """Return the elements of a TensorProto; raises UnreadableError if it holds no numbers, or others than it claims."""
    name = dtype_of(tensor.dtype)
    if name is None:
        raise UnreadableError(f"it holds {NO_NUMBERS.get(tensor.dtype % 100, f'dtype {tensor.dtype}')}, no numbers")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = shape_of(tensor)
    count = math.prod(shape)
    raw = tensor.tensor_content or (tensor.float8_val if name.startswith("float8") else b"")
    if raw:
        if len(raw) != count * dtype.itemsize:
            raise UnreadableError(f"its shape claims {count * dtype.itemsize:,} bytes, {len(raw):,} are there")
        return np.frombuffer(raw, dtype.newbyteorder("<") if dtype.isbuiltin else dtype).reshape(shape)
    values = _values(tensor, name, dtype)
    if not count:
        return np.empty(shape, dtype)
    if not len(values) or len(values) > count:
        raise UnreadableError(f"its shape claims {count:,} elements, {len(values):,} are there")
    believable(count * dtype.itemsize, len(values) * dtype.itemsize)
    found = np.empty(count, dtype)
    found[: len(values)], found[len(values) :] = values, values[-1]
    return found.reshape(shape)


def _values(tensor: Any, name: str, dtype: np.dtype[Any]) -> Array:
    held = getattr(tensor, _VALUES.get(name, ""), ())
    if name.startswith("complex"):
        pairs = np.array(held, np.float32 if name == "complex64" else np.float64)
        return pairs[: len(pairs) // 2 * 2].view(dtype)
    if name in _HALVES:
        return np.array(held, np.int64).astype(np.uint16).view(dtype)
    return np.array(held, np.int64 if name.startswith("int") else None).astype(dtype)
