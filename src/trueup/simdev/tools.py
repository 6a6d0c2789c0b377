"""What torch_npu has beside tensors: streams, events and graphs, profilers, and the switches of the vendor's compiler.

Kernels run when they are called, in the order of the host: a stream orders nothing, an event has happened when it is recorded, with
the time of the host. A graph keeps the operators that ran while it was captured, and runs them again into the same memory; as on a
device, capturing leaves weights, random state and all other memory from before as it was.

    with torch.autograd.profiler.profile(use_npu=True) as prof: ...     # a table with the columns "Self NPU", "NPU total" ...
    with torch.npu.profile(folder): ...                                 # trace.json in the folder, for chrome://tracing

The profilers are PyTorch's own: NPU time is the time in which the simulated device computed, on the host. Switches are checked as
the vendor's pages say, though nothing is compiled here. ``set_dump`` writes what each operator takes and gives, as NumPy files
named as the vendor's converter names them: ``add_.add__3.3.0.1730000000000000.output.0.npy`` (operator, call, task, stream, time in
us). `trueup import` reads such a folder.
"""

# ruff: noqa: ARG001, ARG002, ARG004 - the parameters are those of torch_npu

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd import profiler as autograd_profiler
from torch.utils._pytree import tree_leaves

from trueup.simdev import tensor
from trueup.simdev.tensor import Plan, index_of

_EVENT, _STREAM = torch.Event, torch.Stream

MARK = "npu kernel"
GREW = "npu kernel's bytes: "
_PROFILE = autograd_profiler.profile

OPTIONS: dict[str, tuple[str, ...]] = {
    "ACL_OP_SELECT_IMPL_MODE": ("high_precision", "high_performance"),
    "ACL_OPTYPELIST_FOR_IMPLMODE": ("Pooling", "SoftmaxV2", "LRN", "ROIAlign"),
    "ACL_OP_DEBUG_LEVEL": ("0", "1", "2", "3", "4"),
    "ACL_OP_COMPILER_CACHE_MODE": ("enable", "disable", "force"),
    "ACL_OP_COMPILER_CACHE_DIR": (), "ACL_DEBUG_DIR": (),
    "ACL_PRECISION_MODE": (), "ALLOW_INTERNAL_FORMAT": ("enable", "disable"), "jitCompile": ("enable", "disable"),
    "NPU_FUZZY_COMPILE_BLACKLIST": (), "MM_BMM_ND_ENABLE": ("enable", "disable"), "mdldumpswitch": ("enable", "disable"),
    "mdldumpconfigpath": (), "FORCE_ACLNN_OP_LIST": (),
}  # fmt: skip
"""Keys of `set_option` and their values, none where any text goes (the PyTorch porting guide 1.5.0; Ascend/pytorch 9e73e70)."""
DIRECTORIES = ("ACL_OP_COMPILER_CACHE_DIR", "ACL_DEBUG_DIR")


class Stream(torch.Stream):
    """A queue of work that is done at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        """Make a stream of a device, the current one if none is given."""
        made: Stream = _STREAM.__new__(cls, "npu")
        made.place = torch.device("npu", index_of(device))
        return made

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority, self.npu_stream = priority, id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @property
    def device(self) -> torch.device:
        """Return the device."""
        return self.place

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _entered.pop()

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: what was queued is done."""

    wait_event = wait_stream

    def query(self) -> bool:
        """Return True: nothing is under way."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if none is given."""
        event = event or Event()
        event.record()
        return event


class Event(torch.Event):
    """A point in time of a stream; ``torch.Event("npu", ...)`` and ``torch.npu.Event(...)`` alike."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Event:
        """Make an event of the device."""
        made: Event = _EVENT.__new__(cls, "npu")
        return made

    def __init__(self, *args: Any, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self._seconds = enable_timing or args[:1] == (True,), 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event; raises RuntimeError without ``enable_timing``."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        return (end._seconds - self._seconds) * 1000


_default: dict[int, Stream] = {}
_entered: list[Stream] = []
"""Streams that were entered or set, the current one last."""


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is current where none was entered."""
    index = index_of(device)
    if index not in _default:
        _default[index] = Stream(index)
    return _default[index]


def current_stream(device: Any = None) -> Stream:
    """Return the stream that was entered last."""
    return _entered[-1] if _entered else default_stream(device)


def set_stream(stream: Any) -> None:
    """Make a stream the current one."""
    _entered[-1:] = [stream]


@contextmanager
def stream(stream: Any = None) -> Iterator[None]:
    """Enter a stream; None: none."""
    if stream is not None:
        _entered.append(stream)
    try:
        yield
    finally:
        if stream is not None:
            _entered.pop()


# ---------------------------------------------------------------- graphs
capturing: NPUGraph | None = None
Recorded = tuple[Callable[..., Any], Plan, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class NPUGraph:
    """Operators that ran once and can run again, on the same memory: ``torch.npu.NPUGraph`` and ``torch.accelerator.Graph``."""

    def __init__(self, keep_graph: bool = False, **_: Any) -> None:
        self._calls: list[Recorded] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self._random: torch.Tensor | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Keep what runs from now on; raises RuntimeError where a capture is under way."""
        global capturing
        if capturing is not None or tensor.runner is not None:
            raise RuntimeError("a graph is being captured already")
        self.reset()
        self._random = torch.default_generator.get_state()
        capturing, tensor.runner = self, self._keep

    def capture_end(self) -> None:
        """Stop, and set memory from before the capture back: a capture computes nothing."""
        global capturing
        capturing, tensor.runner = None, None
        for written, kept in self._before.values():
            written.copy_(kept)
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        self._before.clear()

    def replay(self) -> None:
        """Run the operators again; results go where those of the capture went."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for func, plan, args, kwargs, outputs in self._calls:
                made = [one for one in tree_leaves(tensor.run(func, plan, args, kwargs)) if isinstance(one, torch.Tensor)]
                for there, new in zip(outputs, made, strict=True):
                    if there.data_ptr() != new.data_ptr():
                        there.copy_(new)

    def reset(self) -> None:
        """Forget all operators."""
        self._calls, self._made = [], set()

    def pool(self) -> tuple[int, int]:
        """Return the name of the graph's memory pool; there is none on the simulated device, and any may be shared."""
        return (0, id(self))

    def __enter__(self) -> NPUGraph:
        self.capture_begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.capture_end()

    def _keep(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted while a graph is being captured: it reads a number back to the host")
        for place in plan.written:
            target = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for one in tree_leaves(target):
                if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in self._made:
                    self._before.setdefault(one.data_ptr(), (one, one.clone()))
        result = tensor.run(func, plan, args, kwargs)
        outputs = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if plan.view_of is None and not plan.written:
            self._made.update(one.untyped_storage()._cdata for one in outputs)
        self._calls.append((func, plan, args, kwargs, outputs))
        return result


@contextmanager
def graph(npu_graph: NPUGraph, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
    """Capture what runs inside into a graph."""
    with npu_graph:
        yield


def is_current_stream_capturing() -> bool:
    """Return whether a graph is being captured."""
    return capturing is not None


def _timed(func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with autograd_profiler.record_function(f"{MARK}: {plan.name}"):
        made = tensor.run(func, plan, args, kwargs)
        given = _storages((args, kwargs))
        grew = sum(size for storage, size in _storages(made).items() if storage not in given)
        with autograd_profiler.record_function(f"{GREW}{grew}"):
            return made


def _storages(tree: Any) -> dict[int, int]:
    """Return the bytes of the storages of all tensors in a tree, by address."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class profile(_PROFILE):  # type: ignore[misc, valid-type]
    """``torch.autograd.profiler.profile`` with ``use_npu``; ``use_npu_simple`` keeps what the device computed alone."""

    def __init__(self, enabled: bool = True, *, use_npu: bool = False, use_npu_simple: bool = False, **options: Any) -> None:
        super().__init__(enabled, **options)
        self._npu, self._simple = enabled and (use_npu or options.get("use_device") == "npu"), use_npu_simple
        if self._npu:
            self.use_device = "npu"

    def __enter__(self) -> Any:
        if self._npu and tensor.runner is None:
            tensor.runner = _timed
        return super().__enter__()

    def __exit__(self, *exc: Any) -> Any:
        if tensor.runner is _timed:
            tensor.runner = None
        return super().__exit__(*exc)

    def _ensure_function_events(self) -> None:
        if self._function_events is not None:
            return
        super()._ensure_function_events()
        if self._npu:
            _assign(self._function_events, self._simple)


def _assign(events: Any, simple: bool) -> None:
    """Give each operator the kernels that it ran, and make these events of the device; what the CPU ran inside one goes."""
    inside = set()
    for kernel in events:
        if not kernel.name.startswith(MARK) or id(kernel) in inside:
            continue
        below, grew = list(kernel.cpu_children), 0
        while below:
            child = below.pop()
            inside.add(id(child))
            if child.name.startswith(GREW):
                grew += int(child.name.removeprefix(GREW))
            below.extend(child.cpu_children)
        kernel.name, kernel.cpu_children = kernel.name.removeprefix(f"{MARK}: "), []
        owner, kernel.cpu_parent = kernel.cpu_parent, None
        if owner is not None and owner.name == "PythonSubclass" and owner.cpu_parent is not None:
            owner.cpu_children = [child for child in owner.cpu_children if child is not kernel]
            owner = owner.cpu_parent
        if owner is not None:
            _allocate(owner, grew)
            owner.append_kernel(kernel.name, 0, kernel.time_range.elapsed_us())
            owner.cpu_children = [child for child in owner.cpu_children if child is not kernel]
        kernel.device_type, kernel.is_user_annotation = DeviceType.PrivateUse1, False
    events[:] = [
        one for one in events if id(one) not in inside and (not simple or one.device_type is DeviceType.PrivateUse1)
    ]  # fmt: skip


def _allocate(owner: Any, size: int) -> None:
    """Count bytes of the device that an operator took; those around it hold them, too."""
    while owner is not None:
        owner.device_memory_usage += size
        owner = owner.cpu_parent


class profileConfig:
    """Accepts the switches of the vendor's profiler; what they choose is in its hardware."""

    def __init__(self, **switches: Any) -> None:
        self.switches = switches


_session: Any = None
_folder: Path | None = None
_step: Any = None


def prof_init(path: str) -> None:
    """Name the folder of the next profile; it is made if need be."""
    global _folder
    _folder = Path(path)
    _folder.mkdir(parents=True, exist_ok=True)


def prof_start(config: Any = None) -> None:
    """Profile from now on; raises RuntimeError without `prof_init`."""
    global _session
    if _folder is None:
        raise RuntimeError("torch.npu.prof_start: call torch.npu.prof_init(path) first")
    if config is not None:
        warnings.warn("torch.npu.prof_start: the simulated device has no counters; config is not used", stacklevel=2)
    _session = profile(use_npu=True, record_shapes=True)
    _session.__enter__()


def iteration_start() -> None:
    """Mark the begin of a step."""
    global _step
    _step = autograd_profiler.record_function("iteration")
    _step.__enter__()


def iteration_end() -> None:
    """Mark the end of a step."""
    global _step
    if _step is not None:
        _step.__exit__(None, None, None)
        _step = None


def prof_stop() -> None:
    """Stop, and write ``trace.json``."""
    global _session
    if _session is not None and _folder is not None:
        _session.__exit__(None, None, None)
        _session.export_chrome_trace(str(_folder / "trace.json"))
        _session = None


def prof_finalize() -> None:
    """Forget the folder."""
    global _folder
    prof_stop()
    _folder = None


class npu_profile:
    """``torch.npu.profile(path, config)``: profile a block into ``path/trace.json``."""

    def __init__(self, profiler_result_path: str = "./", config: Any = None, **_: Any) -> None:
        self._path, self._config = profiler_result_path, config

    def __enter__(self) -> None:
        prof_init(self._path)
        prof_start(self._config)

    def __exit__(self, *exc: object) -> None:
        prof_finalize()


def install() -> None:
    """Let ``torch.autograd.profiler.profile`` take ``use_npu``."""
    autograd_profiler.profile = torch.autograd.profiler.profile = profile


def set_option(option: dict[str, Any]) -> None:
    """Check options of the compiler; raises ValueError for a key or a value that the vendor does not list, or a directory
    that is not there."""
    for key, value in option.items():
        if key not in OPTIONS:
            raise ValueError(f"torch.npu.set_option knows no {key}; it knows {', '.join(OPTIONS)}")
        if OPTIONS[key] and str(value) not in OPTIONS[key]:
            raise ValueError(f"torch.npu.set_option: {key} is {value!r}; it may be {', '.join(OPTIONS[key])}")
        if key in DIRECTORIES and not Path(str(value)).is_dir():
            raise ValueError(f"torch.npu.set_option: {key} names {value!r}, which is no directory")


def set_compile_mode(jit_compile: bool = False) -> None:
    """Take a compile mode: nothing is compiled."""


def set_aoe(dump_path: str) -> None:
    """Make the directory for operator tuning; the simulated device has no operators to tune, and says so."""
    if not dump_path:
        raise ValueError("torch.npu.set_aoe needs a path")
    Path(dump_path).mkdir(parents=True, exist_ok=True)
    warnings.warn("torch.npu.set_aoe: the simulated device has no operators to tune; nothing is written", stacklevel=2)


# ---------------------------------------------------------------- dump
_dump: _Dump | None = None


class _Dump:
    def __init__(self, folder: Path, inputs: bool, outputs: bool) -> None:
        self._folder, self._inputs, self._outputs, self._task = folder, inputs, outputs, 0

    def run(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._task += 1
        name = plan.name.removeprefix("aten::").replace(".", "_")
        place = f"{name}.{name}_{self._task}.{self._task}.0.{time.time_ns() // 1000}"
        if self._inputs:
            self._write(place, "input", (args, kwargs))
        result = tensor.run(func, plan, args, kwargs)
        if self._outputs:
            self._write(place, "output", result)
        return result

    def _write(self, place: str, which: str, values: Any) -> None:
        import numpy as np

        tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
        for at, one in enumerate(tensors):
            plain = one.detach().float() if one.dtype is torch.bfloat16 else one.detach()
            np.save(self._folder / f"{place}.{which}.{at}.npy", plain.cpu().numpy(), allow_pickle=False)


def init_dump() -> None:
    """Make dumping ready."""


def set_dump(config: str) -> None:
    """Dump from now on, as a file ``dump.json`` says: ``dump_path``, ``dump_mode`` (output, input, all), ``dump_op_switch``. The
    porting guide prints it without commas, and with a remark behind ``#``: that is read, too.

    Raises:
        ValueError: the file cannot be read, or says none of that.
    """
    global _dump
    try:
        text = re.sub(r"""#[^"\n]*$""", "", Path(config).read_text(encoding="utf-8"), flags=re.MULTILINE)
        asked = json.loads(re.sub(r"""(["\]}])\s*\n(\s*")""", r"\1,\n\2", text))["dump"]
        folder, mode = Path(config).parent / asked["dump_path"], asked.get("dump_mode", "output")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'torch.npu.set_dump: {config} is no file like {{"dump": {{"dump_path": "output"}}}}: {error}') from None
    if mode not in ("output", "input", "all"):
        raise ValueError(f"torch.npu.set_dump: dump_mode is {mode!r}; it may be output, input, all")
    if asked.get("dump_op_switch", "on") == "off":
        return
    if tensor.runner is not None:
        raise RuntimeError("torch.npu.set_dump: another dump or graph is under way")
    folder.mkdir(parents=True, exist_ok=True)
    _dump = _Dump(folder, mode != "output", mode != "input")
    tensor.runner = _dump.run


def finalize_dump() -> None:
    """End a dump."""
    global _dump
    if _dump is not None:
        _dump, tensor.runner = None, None
