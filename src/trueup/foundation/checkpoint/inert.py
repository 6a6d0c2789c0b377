"""Pickles read without running anything in them: every class and function that one names becomes an inert stand-in that keeps
what it was given.

Tensors are known by the few names with which ``torch.save``, NumPy and ``paddle.save`` rebuild them. A file that names what could
only do harm (``os.system``, ``builtins.eval``) is refused: no checkpoint has a reason to.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from trueup.foundation.store.segment import numpy_dtype

HARMFUL = frozenset(
    "os posix nt sys subprocess socket shutil runpy importlib pty ctypes webbrowser code codeop pdb timeit signal multiprocessing"
    " asyncio builtins __builtin__ pickle _pickle marshal types operator functools pip site bdb cProfile platform commands"
    " requests urllib".split()
)
"""Modules of which no checkpoint needs anything, but the few names below."""
PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): lambda data=b"", *_: bytes(data) if isinstance(data, bytes) else b"",
    ("__builtin__", "set"): set,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "tuple"): tuple,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "str"): str,
    ("builtins", "bool"): bool,
    ("_codecs", "encode"): lambda text, *_: str(text).encode("latin1"),
}


class HarmfulError(pickle.UnpicklingError):
    """A pickle names something that runs."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file: which storage, where in it, shape and strides in elements; whether it has the conjugates, or
    the negatives, of the elements that lie there (PyTorch's lazy ``conj`` and ``neg``)."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False


@dataclass(frozen=True, slots=True)
class Sharded:
    """What one rank holds of a tensor (ShardedTensor, DTensor): shape and dtype of the whole, and the pieces, each with the place
    of its first element. None is a place that follows from those of the ranks before, along ``dim``."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[tuple[int, ...] | None, Stored], ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """Elements of one dtype under a key."""

    key: str
    dtype: str
    numel: int


class Foreign:
    """Stands for an object of a class that is not made: its name, what it was given, its state."""

    name = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments, self.named, self.state = arguments, named, None
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def append(self, item: Any) -> None:
        """Keep an item of what is a list there."""
        self.items.append(item)

    def extend(self, items: Any) -> None:
        """Keep items of what is a list there."""
        self.items.extend(items)

    def __setitem__(self, key: Any, item: Any) -> None:
        """Keep an item of what is a mapping there."""
        self.items.append((key, item))

    def field(self, name: str, default: Any = None) -> Any:
        """Return what it holds by a name, as a dataclass or a plain object."""
        return attributes(self.state).get(name, default)


def attributes(state: Any) -> dict[Any, Any]:
    """Return what an object holds by name, from its state: a dictionary, or one for its dictionary and one for its slots."""
    pair = state if isinstance(state, tuple) else (state,)
    return {name: value for one in pair if isinstance(one, dict) for name, value in one.items()}


class Inert(pickle.Unpickler):
    """Reads a pickle into plain containers, arrays of numbers, `Stored` tensors and `Foreign` objects."""

    def __init__(self, stream: IO[bytes], storages: Callable[[Any], Storage] | None = None) -> None:
        super().__init__(stream, encoding="latin1")
        self._storages = storages
        self._made: dict[tuple[str, str], Any] = {}
        self.foreign: set[str] = set()

    def persistent_load(self, pid: Any) -> Any:
        """Return the storage that a pickle of torch.save refers to."""
        if self._storages is None:
            raise pickle.UnpicklingError("it refers to something outside")
        return self._storages(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a class or function; raises HarmfulError where it could only do harm."""
        known = PLAIN.get((module, name)) or REBUILT.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage") and (name.endswith("Storage") or name in DTYPES):
            return Named(name)
        if module.partition(".")[0] in HARMFUL:
            raise HarmfulError(f"it asks for {module}.{name}, which would run when the file is loaded")
        if (module, name) not in self._made:
            whole = f"{module}.{name}"
            self._made[module, name] = type(name, (Foreign,), {"name": whole})
            self.foreign.add(whole)
        return self._made[module, name]


class Named(str):
    """The name of a dtype or kind of storage, which may be called without effect."""

    def __call__(self, *_: Any) -> Named:
        """Return itself."""
        return self


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, marks: Any = None) -> Any:
    """Stand for ``torch._utils._rebuild_tensor_v2``."""
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    held = marks if isinstance(marks, dict) else {}
    lazy = held.get("conj") is True, held.get("neg") is True
    return Stored(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)), *lazy)


def _typed(storage: Any, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, marks: Any = None) -> Any:
    """Stand for ``_rebuild_tensor_v3``, which says the dtype: there is no kind of storage for float8 and unsigned integers."""
    if not isinstance(storage, Storage) or dtype not in DTYPES:
        raise pickle.UnpicklingError("a tensor of a dtype that is not known")
    size = numpy_dtype(storage.dtype).itemsize * storage.numel
    storage = Storage(storage.key, str(dtype), size // numpy_dtype(str(dtype)).itemsize)
    return _tensor(storage, offset, shape, strides, grad, hooks, marks)


def _of_class(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Stand for ``torch._tensor._rebuild_from_type_v2``: a plain tensor of any class, or what one rank holds of one."""
    if not (isinstance(rebuild, type) and issubclass(rebuild, Foreign)):
        return rebuild(*arguments)
    name = getattr(kind, "name", "")
    shape, dtype = (tuple(map(int, arguments[2])), str(arguments[1])) if len(arguments) > 2 else ((), "")
    if dtype in DTYPES and name.endswith(".ShardedTensor"):
        pieces = [(tuple(one.field("metadata").field("shard_offsets")), one.field("tensor")) for one in state[0]]
        return Sharded(shape, dtype, tuple(pieces))
    if dtype in DTYPES and name.endswith(".DTensor"):
        held = attributes(state)
        places = held["_spec"].field("placements")
        dims = [one.field("dim") for one in places if one.name.endswith(".Shard")]
        if len(places) > 1:
            raise pickle.UnpicklingError("a tensor cut over a mesh of more than one dimension, which is not joined")
        whole = (0,) * len(shape)
        return Sharded(shape, dtype, ((None if dims else whole, held["_local_tensor"]),), int(dims[0]) if dims else 0)
    return kind(state) if isinstance(kind, type) and issubclass(kind, Foreign) else None


def _attribute(owner: Any, name: Any) -> Any:
    """Stand for ``getattr``, with which a pickle names a class within a class."""
    if not (isinstance(owner, type) and issubclass(owner, Foreign) and isinstance(name, str)):
        raise HarmfulError("it asks for builtins.getattr, which would run when the file is loaded")
    return type(name, (Foreign,), {"name": f"{owner.name}.{name}"})


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _array(_kind: Any, _shape: Any, _code: Any) -> Any:
    return np.ndarray.__new__(np.ndarray, (0,), np.uint8)


def _dtype(text: Any, *_: Any) -> Any:
    return plain(np.dtype(text)) if isinstance(text, str) and len(text) < 16 else plain(None)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return np.frombuffer(data if isinstance(data, bytes) else str(data).encode("latin1"), plain(dtype))[0]


def _buffer(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Any:
    return np.frombuffer(data, plain(dtype)).reshape(shape, order=order if order in ("C", "F") else "C")


def plain(dtype: Any) -> np.dtype[Any]:
    """Return a dtype of numbers; raises UnpicklingError at any other."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufc" or dtype.hasobject:
        raise pickle.UnpicklingError("an array that is not of numbers")
    return dtype


DTYPES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "float8_e4m3fn": "",
    "float8_e5m2": "",
    "uint16": "",
    "uint32": "",
    "uint64": "",
}
"""PyTorch's dtypes, and the storages of each."""
OF_STORAGE = {storage: dtype for dtype, storage in DTYPES.items() if storage} | {"UntypedStorage": "uint8"}
_KIND = object()
REBUILT: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_class,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("torch", "device"): lambda *parts: ":".join(map(str, parts)),
    ("numpy", "ndarray"): _KIND,
    ("numpy", "dtype"): _dtype,
} | {
    (f"{package}.{module}", name): made
    for package in ("numpy.core", "numpy._core")
    for module, name, made in (
        ("multiarray", "_reconstruct", _array),
        ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _buffer),
    )
}
"""What rebuilds tensors and arrays."""
