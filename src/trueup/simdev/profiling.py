"""The profilers of torch_npu, on PyTorch's own: NPU time is the time in which the simulated device computed, on the host.

    with torch.autograd.profiler.profile(use_npu=True) as prof: ...     # a table with the columns "Self NPU", "NPU total" ...
    with torch.npu.profile(folder): ...                                 # trace.json in the folder, for chrome://tracing
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd import profiler as autograd_profiler
from torch.utils._pytree import tree_leaves

from trueup.simdev import tensor
from trueup.simdev.tensor import Plan

MARK = "npu kernel"
GREW = "npu kernel's bytes: "
_PROFILE = autograd_profiler.profile


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
