"""`open_checkpoint`: what a checkpoint holds, tensor by tensor: none is read before it is asked for, one at a time.

    .pt .pth .pth.tar .bin .ckpt     torch.save, of today and before PyTorch 1.6      .safetensors, and folders with an index
    .pdparams .pdopt                 paddle.save                                      .npz
    .keras .h5                       Keras (extra hdf5)                               folders of DCP, Megatron, FSDP's ranks

Parts are what stands at the top: ``state_dict``, ``model``, ``optimizer``. A file whose top is tensors has one part without a name.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trueup.foundation.checkpoint.inert import OF_STORAGE, Foreign, Inert, Named, Sharded, Storage, Stored
from trueup.foundation.model import TrueupError
from trueup.foundation.store.segment import numpy_dtype

Array = np.ndarray[Any, Any]
BytesOf = Callable[[Storage, int, int], bytes]
"""Reads bytes of a storage: from which on, and how many."""
PLAUSIBLE = 64 << 20  # bytes up to which a tensor may be any number of times larger than its file
GROWTH = 16  # how many times larger it may be beyond that: expanded views, packed zeros
LARGEST_PICKLE = 1 << 28  # bytes of the pickle that says what a file holds, tensors apart
DEEPEST = 12  # containers within containers
MOST_VALUES = 2_000_000  # that are looked at, so that a list of lists of itself does not take forever
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the head of files of PyTorch before 1.6
MODELS = ("state_dict", "model_state_dict", "model", "module", "net", "weights", "params", "network", "ema", "")
BROKEN = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, MemoryError, RecursionError, OverflowError, struct.error,
    pickle.UnpicklingError, zipfile.BadZipFile, NotImplementedError, AssertionError, UnicodeDecodeError,
)  # fmt: skip
"""What damaged files raise."""


@dataclass(frozen=True)
class Held:
    """A tensor of a checkpoint: shape, dtype by PyTorch's name, and how to read it. ``pieces`` is what files of ranks hold of it:
    where each begins (None: after those before it, along ``dim``), and how to read it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]
    pieces: tuple[tuple[tuple[int, ...] | None, Held], ...] = ()
    dim: int = 0

    @property
    def nbytes(self) -> int:
        """Return how many bytes its elements take."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass
class Checkpoint:
    """What a checkpoint holds. ``parts`` are tensors by part and name, ``values`` what else is said (``epoch``), ``foreign`` the
    classes of objects that were not made, ``notes`` what should be known."""

    path: str
    kind: str
    parts: dict[str, dict[str, Held]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """What the training was called with (``args``); never printed, for it may hold secrets."""

    @property
    def model(self) -> str:
        """Return the name of the part that holds the weights; raises TrueupError if none does."""
        weights = [name for name in self.parts if not name.lower().startswith(("optim", "lr_", "scaler", "amp", "sched", "rng"))]
        found = next((name for name in MODELS if name in weights), None)
        if found is None and len(weights) == 1:
            found = weights[0]
        if found is None:
            raise TrueupError(
                f"Which part of the checkpoint is the model is not known.\n  where:    {self.path}\n"
                f"  expected: one of {', '.join(filter(None, MODELS))}\n"
                f"  got:      {', '.join(self.parts) or 'no tensor'}\n  next:     --part NAME"
            )
        return found

    def part(self, name: str | None) -> dict[str, Held]:
        """Return the tensors of a part, None: of the model. Raises TrueupError if there is no such part."""
        if name is not None and name not in self.parts:
            named = ", ".join(filter(None, self.parts)) or "no --part, for this file's tensors stand by themselves"
            raise TrueupError(
                f"The checkpoint has no such part.\n  where:    {self.path}\n  expected: {named}\n"
                f"  got:      {name!r}\n"
                "  next:     trueup checkpoint inspect shows them"
            )
        return self.parts[self.model if name is None else name]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Look into a checkpoint: a file or a folder. Raises TrueupError if it is missing, damaged, of an unknown kind, or would run
    something when PyTorch loads it."""
    file = Path(path)
    try:
        reader, kind = _reader(file)
        return reader(file, kind)
    except (OSError, *BROKEN) as error:
        raise refused(file, error) from None


def refused(file: Path, error: Exception) -> TrueupError:
    """Say that a checkpoint cannot be read, and why."""
    strerror = getattr(error, "strerror", None)
    got = strerror or (str(error).splitlines()[0][:200] if str(error) else type(error).__name__)
    return TrueupError(
        f"A checkpoint cannot be read.\n  where:    {file}\n"
        "  expected: a whole file of torch.save, safetensors, npz, Paddle or Keras, or a folder of DCP, Megatron or FSDP\n"
        f"  got:      {got}\n  next:     fetch or save it again; a file that would run something is not to be loaded at all"
    )


def _reader(file: Path) -> tuple[Callable[[Path, str], Checkpoint], str]:
    if file.is_dir():
        return _folder(file)
    with file.open("rb") as stream:
        head = stream.read(64)
    if file.suffix in (".pdparams", ".pdopt"):
        return _pickled, "paddle.save"
    if head[:8] == b"\x89HDF\r\n\x1a\n":
        return _keras, "Keras, HDF5"
    if head[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return _torch_zip, "torch.save"
        if any(name.endswith(".h5") for name in names):
            return _keras, "Keras"
        if names and all(name.endswith(".npy") for name in names):
            return _npz, "npz"
        raise ValueError("an archive that holds no checkpoint")
    if head[8:9] == b"{":
        return _safetensors, "safetensors"
    if head[:1] == b"\x80":
        return _torch_legacy, "torch.save before PyTorch 1.6"
    if head.startswith(b"version https://git-lfs"):
        raise ValueError("a pointer of Git LFS, and not the file: git lfs pull")
    raise ValueError("no head of a kind that is known" if head else "an empty file")


def _folder(folder: Path) -> tuple[Callable[[Path, str], Checkpoint], str]:
    from trueup.foundation.checkpoint import folders

    if (folder / ".metadata").is_file():
        return folders.distributed, "DCP"
    if any(folder.glob("*.safetensors.index.json")) or any(folder.glob("*.bin.index.json")):
        return folders.indexed, "a folder with an index"
    if any(folder.glob("mp_rank_*")):
        return folders.megatron, "Megatron"
    if any(folders.RANK.search(one.name) for one in folder.iterdir()):
        return folders.ranks, "files of ranks"
    raise ValueError("a folder without .metadata (DCP), an index, mp_rank_* (Megatron), or files of ranks (*rank0*.pt)")


def _torch_zip(file: Path, kind: str) -> Checkpoint:
    return from_stream(file, kind, file.stat().st_size)


def from_stream(file: Path, kind: str, length: int, start: int = 0) -> Checkpoint:
    """Read what torch.save wrote at a place in a file; raises one of `BROKEN` where it is damaged."""
    content, bytes_of, foreign = torch_archive(lambda: file.open("rb"), length, start)
    return _parted(Checkpoint(str(file), kind, foreign=foreign), content, bytes_of)


def torch_archive(opened: Callable[[], BinaryIO], length: int, start: int = 0) -> tuple[Any, BytesOf, tuple[str, ...]]:
    """Read an archive of torch.save (since PyTorch 1.6): containers with `Stored` tensors and `Foreign` objects, what reads bytes
    of a storage, and the classes of those objects. ``opened`` opens the file, in which the archive has ``length`` bytes from
    ``start`` on. Raises one of `BROKEN` where it is damaged, or names what would run."""
    with opened() as raw, zipfile.ZipFile(_Window(raw, start, length)) as archive:
        members = archive.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in members) or sum(one.file_size for one in members) > length:
            raise ValueError("its members are packed, which torch.save never does")
        names = archive.namelist()
        top = next(name for name in names if name.endswith("data.pkl")).removesuffix("data.pkl")
        info = archive.getinfo(f"{top}data.pkl")
        if info.file_size > LARGEST_PICKLE:
            raise ValueError(f"its data.pkl claims {info.file_size:,} bytes")
        if f"{top}byteorder" in names and archive.read(f"{top}byteorder") != b"little":
            raise ValueError("its bytes are in the other order")
        places = {one.filename: (_begin(archive, one), one) for one in archive.infolist() if one.filename.startswith(f"{top}data/")}
        unpickler = Inert(archive.open(info), _storage)
        content = unpickler.load()

    def bytes_of(storage: Storage, at: int, count: int) -> bytes:
        begin, one = places[f"{top}data/{storage.key}"]
        if at + count > one.file_size:
            raise ValueError(f"storage {storage.key} is too short")
        return _bytes(opened, start + begin + at, count)

    for storage in _storages(content):  # a missing or short storage is said now, and not in the middle of a load
        needed, held = storage.numel * numpy_dtype(storage.dtype).itemsize, places[f"{top}data/{storage.key}"][1].file_size
        if needed > held:
            raise ValueError(f"storage {storage.key} should have {needed:,} bytes and has {held:,}")
    return content, bytes_of, tuple(sorted(unpickler.foreign))


def _begin(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    stream: Any = archive.fp
    stream.seek(info.header_offset)
    head = stream.read(30)
    if head[:4] != b"PK\x03\x04":
        raise ValueError("a member without a head")
    name, extra = struct.unpack("<HH", head[26:30])
    return int(info.header_offset + 30 + name + extra)


def _storage(pid: Any) -> Storage:
    kind, key, numel = pid[1], str(pid[2]), int(pid[4])
    if pid[0] != "storage" or not isinstance(kind, Named) or "/" in key or ".." in key or numel < 0:
        raise pickle.UnpicklingError("a reference that is no storage")
    if kind not in OF_STORAGE:
        raise pickle.UnpicklingError(f"a tensor in a {kind}, which is not read")
    return Storage(key, OF_STORAGE[str(kind)], numel)


def _torch_legacy(file: Path, kind: str) -> Checkpoint:
    views: dict[str, tuple[str, int]] = {}

    def storage(pid: Any) -> Storage:
        if len(pid) > 5 and pid[5] is not None:  # a view of another storage: key, offset, size
            views[str(pid[5][0])] = (str(pid[2]), int(pid[5][1]))
        return _storage(pid)

    with file.open("rb") as stream:
        if Inert(stream).load() != MAGIC:
            stream.seek(0)
            return _pickled(file, "a pickle")
        if Inert(stream).load() != PROTOCOL:
            raise ValueError("a protocol of torch.save that is not known")
        Inert(stream).load()
        unpickler = Inert(stream, storage)
        content = unpickler.load()
        keys = Inert(stream).load()
        sizes = {one.key: one for one in _storages(content)}
        places = {}
        for key in keys:
            (numel,) = struct.unpack("<q", stream.read(8))
            size = numel * numpy_dtype(sizes[key].dtype).itemsize if key in sizes else 0
            places[key] = stream.tell()
            stream.seek(size, 1)
            if stream.tell() > file.stat().st_size:
                raise ValueError(f"storage {key} is cut short")
    if views:
        raise ValueError("it holds views of storages, which PyTorch stopped writing in 2018")

    def bytes_of(one: Storage, at: int, count: int) -> bytes:
        return _bytes(lambda: file.open("rb"), places[one.key] + at, count)

    return _parted(Checkpoint(str(file), kind, foreign=tuple(sorted(unpickler.foreign))), content, bytes_of)


def _pickled(file: Path, kind: str) -> Checkpoint:
    if file.stat().st_size > 1 << 34:
        raise ValueError("a pickle of more than 16 GB")
    with file.open("rb") as stream:
        unpickler = Inert(stream)
        content = unpickler.load()
    if isinstance(content, dict):
        content.pop("StructuredToParameterName@@", None)
    return _parted(Checkpoint(str(file), kind, foreign=tuple(sorted(unpickler.foreign))), content, None)


def _storages(content: Any) -> Iterator[Storage]:
    """Yield the storage of each tensor. Raises ValueError where one reaches beyond it, or claims far more than it holds."""
    for value in _stored(content):
        itemsize, numel = numpy_dtype(value.storage.dtype).itemsize, math.prod(value.shape)
        ends = min((value.offset, *value.strides)) >= 0 and value.offset + _last(value) < value.storage.numel
        if numel and not ends:
            raise ValueError("a tensor that reaches beyond its storage")
        if said := overblown(numel * itemsize, value.storage.numel * itemsize):
            raise ValueError(said)
        yield value.storage


def _stored(content: Any) -> Iterator[Stored]:
    for _, value in leaves(content):
        yield from (one for _, one in value.pieces) if isinstance(value, Sharded) else (value,) if isinstance(value, Stored) else ()


def _last(tensor: Stored) -> int:
    """Return where in its storage the last element lies, from the first on."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))


def _parted(checkpoint: Checkpoint, content: Any, bytes_of: BytesOf | None) -> Checkpoint:
    """Sort what a pickle holds into parts; a `Stored` tensor is read when it is asked for."""
    content = {"tensor": content} if isinstance(content, Stored) else content
    if not isinstance(content, Mapping):
        raise ValueError("it holds no state_dict")
    tensors = Stored, Sharded, np.ndarray
    flat = any(isinstance(one, tensors) for one in content.values()) and not any(  # a training's file may hold a tensor beside: rng
        name in MODELS and isinstance(one, Mapping) and any(isinstance(value, tensors) for _, value in leaves(one))
        for name, one in content.items()
    )
    for name, inner in content.items():
        part = checkpoint.parts.setdefault("" if flat else str(name), {})
        for path, value in leaves(inner, str(name) if flat else ""):
            _take(checkpoint, part, path or str(name), "" if flat else str(name), value, bytes_of)
        if not part:
            checkpoint.parts.pop("" if flat else str(name), None)
    if checkpoint.foreign:
        checkpoint.notes.append(f"objects of {', '.join(checkpoint.foreign[:5])} were not made, and are left out")
    return checkpoint


def _take(checkpoint: Checkpoint, part: dict[str, Held], path: str, top: str, value: Any, bytes_of: Any) -> None:
    if isinstance(value, Stored):
        part[path] = Held(value.shape, value.storage.dtype, lambda: gathered(value, bytes_of))
    elif isinstance(value, Sharded):
        pieces = tuple(
            (at, Held(one.shape, one.storage.dtype, lambda one=one: gathered(one, bytes_of)))  # type: ignore[misc]
            for at, one in value.pieces
        )
        part[path] = whole(value.shape, value.dtype, pieces, value.dim)
    elif isinstance(value, np.ndarray):
        part[path] = Held(value.shape, str(value.dtype), lambda: value)
    elif isinstance(value, Foreign) and top == "args" and isinstance(value.state, dict):
        checkpoint.arguments = value.state
    elif not isinstance(value, Foreign) and len(checkpoint.values) < 200:
        checkpoint.values[f"{top}.{path}" if top and path != top else path] = repr(value)[:80]


def whole(shape: tuple[int, ...], dtype: str, pieces: tuple[tuple[tuple[int, ...] | None, Held], ...], dim: int = 0) -> Held:
    """Return a tensor of which files hold pieces; reading it raises ValueError if one is missing."""

    def read() -> Array:
        there, begin = sum(math.prod(one.shape) for _, one in pieces), 0
        if there != math.prod(shape):
            raise ValueError(f"{there:,} of {math.prod(shape):,} elements are there: the files of all ranks belong in one folder")
        array, filled = np.empty(shape, numpy_dtype(dtype)), np.zeros(shape, bool)
        for at, one in pieces:
            place = at if at is not None else (0,) * dim + (begin,) + (0,) * (len(shape) - dim - 1)
            begin += one.shape[dim] if at is None else 0
            inside = tuple(slice(start, start + size) for start, size in zip(place or (0,) * len(shape), one.shape, strict=True))
            part = one.read()
            if part.shape != one.shape:
                raise ValueError(f"a piece of {list(one.shape)} has the shape {list(part.shape)}")
            array[inside], filled[inside] = part, True
        if not filled.all():
            raise ValueError("two of its pieces lie in one place")
        return array

    return Held(shape, dtype, read, pieces, dim)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is no container, with its path (``layers.0.weight``). Raises ValueError where there is too much of it."""
    waiting, seen = [(value, path, 0)], 0
    while waiting:
        one, place, level = waiting.pop()
        seen += 1
        if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], np.ndarray):
            one = one[1]  # a tensor of paddle.save within a container: its name in the program, and the array
        if seen + len(waiting) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        if level < DEEPEST and isinstance(one, (Mapping, list, tuple)):
            pairs = list(one.items() if isinstance(one, Mapping) else enumerate(one))[:MOST_VALUES]
            waiting += [(inner, f"{place}.{key}" if place else str(key), level + 1) for key, inner in reversed(pairs)]
        else:
            yield place, one


def overblown(claimed: int, held: int) -> str:
    """Say that a tensor of ``claimed`` bytes is far larger than the ``held`` ones that it lies in; empty where it is not."""
    large = claimed > PLAUSIBLE and claimed > GROWTH * held
    return f"it claims {claimed:,} bytes in a file of {held:,}" if large else ""


def gathered(tensor: Stored, bytes_of: BytesOf) -> Array:
    """Read a tensor, its elements in C order; raises ValueError where the file is cut short, OSError where it is gone."""
    dtype = numpy_dtype(tensor.storage.dtype)
    if not math.prod(tensor.shape):
        return np.empty(tensor.shape, dtype)
    flat = np.frombuffer(bytes_of(tensor.storage, tensor.offset * dtype.itemsize, (_last(tensor) + 1) * dtype.itemsize), dtype)
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    found = np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, tensor.shape, strides)).reshape(tensor.shape)
    found = found.conj() if tensor.conj else found
    return -found if tensor.neg else found


def _bytes(opened: Callable[[], BinaryIO], at: int, count: int) -> bytes:
    with opened() as stream:
        stream.seek(at)
        read = stream.read(count)
    if len(read) != count:
        raise ValueError(f"{count:,} bytes should follow at {at:,}, {len(read):,} do")
    return read


class _Window:
    """A part of a file as a file, for zipfile."""

    def __init__(self, raw: Any, start: int, length: int) -> None:
        self.raw, self.start, self.length, self.at = raw, start, length, 0

    def seekable(self) -> bool:
        """Return whether it can go back."""
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        """Go to a place."""
        self.at = max(0, at + (0, self.at, self.length)[whence])
        return self.at

    def tell(self) -> int:
        """Return the place."""
        return self.at

    def read(self, count: int = -1) -> bytes:
        """Read some bytes."""
        left = max(0, self.length - self.at)
        count = left if count is None or count < 0 else min(count, left)
        self.raw.seek(self.start + self.at)
        read: bytes = self.raw.read(count)
        self.at += len(read)
        return read


SAFE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Names of dtypes in safetensors."""


def _safetensors(file: Path, kind: str) -> Checkpoint:
    size = file.stat().st_size
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size - 8, 100_000_000):
            raise ValueError(f"its head claims {length:,} bytes of {size:,}")
        head = json.loads(stream.read(length))
    found = Checkpoint(str(file), kind)
    found.values = {str(k): str(v)[:80] for k, v in (head.pop("__metadata__", None) or {}).items()}
    part = found.parts.setdefault("", {})
    for name, one in head.items():
        dtype, shape = SAFE[one["dtype"]], tuple(map(int, one["shape"]))
        begin, end = map(int, one["data_offsets"])
        if end - begin != math.prod(shape) * numpy_dtype(dtype).itemsize or not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} lies outside the file, or has another size than its shape")
        part[str(name)] = Held(shape, dtype, lambda at=8 + length + begin, d=dtype, s=shape: _mapped(file, at, d, s))  # type: ignore[misc]
    return found


def _mapped(file: Path, at: int, dtype: str, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    if not count:
        return np.empty(shape, numpy_dtype(dtype))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        raw = view[at : at + count * numpy_dtype(dtype).itemsize]
    return np.frombuffer(raw, numpy_dtype(dtype)).reshape(shape)


def _npz(file: Path, kind: str) -> Checkpoint:
    def read(name: str) -> Array:
        with np.load(file, allow_pickle=False) as held:
            array: Array = held[name]
            return array

    found = Checkpoint(str(file), kind)
    with np.load(file, allow_pickle=False) as held:
        shapes = {name: (held[name].shape, str(held[name].dtype)) for name in held.files}
    found.parts[""] = {name: Held(shape, dtype, lambda n=name: read(n)) for name, (shape, dtype) in shapes.items()}  # type: ignore[misc]
    return found


def _keras(file: Path, kind: str) -> Checkpoint:
    try:
        import h5py
    except ImportError:
        raise ValueError("HDF5, and h5py is not installed: pip install 'trueup[hdf5]'") from None
    raw: Any = file
    if kind == "Keras":
        import io

        with zipfile.ZipFile(file) as archive:
            raw = io.BytesIO(archive.read(next(name for name in archive.namelist() if name.endswith(".h5"))))
    found = Checkpoint(str(file), kind)
    opened = h5py.File(raw, "r")

    def visit(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset) and one.dtype.kind in "biufc":
            path = name.split("/")  # a compiled model within a model has its optimizer, too
            at = next((place for place, step in enumerate(path) if step.startswith("optimizer")), None)
            held = Held(tuple(one.shape), str(one.dtype), lambda: np.asarray(one[()]))
            kept = path if at is None else path[:at] + path[at + 1 :]
            found.parts.setdefault("" if at is None else "optimizer", {})[".".join(kept)] = held

    opened.visititems(visit)
    return found
