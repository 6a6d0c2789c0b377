"""A device that computes shapes and no numbers: what a training asks of an accelerator, in seconds and without its memory.

Its tensors hold meta tensors. An operator that has no meta kernel, or whose shapes depend on numbers, runs on the CPU with ones
in the place of what is not there, so a training that reads a number (``loss.item()``) reads 1. What ran is written as JSON
when the process ends, or after as many steps of an optimizer as were asked for:

    {"steps": 2, "rows": [{"operator": "aten::mm", "kind": "kernel", "dtypes": ["float32"], "calls": 12, "flops": 402653184, ...}]}
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from trueup.simdev import tensor
from trueup.simdev.tensor import KERNELS, Plan

INTO, STEPS, MOVED = "TRUEUP_SHAPES_INTO", "TRUEUP_SHAPES_STEPS", "TRUEUP_SHAPES_MOVED"
"""Environment variables: the folder that each process writes its operators to; after how many steps it ends; and, where a script
names no device, that its modules are moved to one."""
META = torch.device("meta")
MOST_SHAPES = 8
"""Different shapes of one operator at one line that are kept."""
_QUIET = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
FILLED = ("aten::fill_", "aten::full", "aten::full_like", "aten::zero_", "aten::zeros", "aten::zeros_like", "aten::new_zeros")
MASKED = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")
"""Operators that write where a mask is true: a device that compiles for shapes counts the places first."""
Key = tuple[str, str, str, tuple[str, ...], tuple[str, int, str] | None, str]


class Shapes:
    """What ran, by operator, phase, dtypes and the user's line."""

    def __init__(self, folder: Path, steps: int | None) -> None:
        self._rows: dict[Key, dict[str, Any]] = {}
        self._folder, self._steps, self._step = folder, steps, 0
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._flops: dict[Any, Callable[..., int]] = {}
        self._views: set[str] = set()
        self._numbers: MutableMapping[torch.Tensor, float] = WeakIdKeyDictionary()
        self._known: tuple[tuple[str, int, str] | None, str, str, int] | None = None

    def begin(self) -> None:
        """Let the device compute shapes from now on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.flop_counter import flop_registry

        self._flops = flop_registry
        tensor.home, tensor.runner = META, self.run
        # What ranks send each other is not computed, so they cannot agree on parameters or an order of buckets.
        torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_, **__: True
        if torch.distributed.is_available():
            torch.distributed.Reducer._rebuild_buckets = lambda _: False
        register_optimizer_step_post_hook(self._stepped)
        if os.environ.get(MOVED):
            tensor.mixed = True
            torch.nn.modules.module.register_module_forward_pre_hook(self._move)
        atexit.register(self.write)

    def at(self, step: int) -> None:
        """Say which step is run."""
        self._step = step

    @contextmanager
    def noting(self, site: tuple[str, int, str] | None, function: str, phase: str, times: int) -> Iterator[None]:
        """Note what runs inside under a line, function and phase that are known, as often as it ran there."""
        self._known, before = (site, function, phase, times), self._known
        try:
            yield
        finally:
            self._known = before

    def untold(self, function: str, site: tuple[str, int, str] | None, phase: str, times: int, why: str) -> None:
        """Note a function of which nobody knows the operators."""
        row = self._rows.setdefault(
            (function, phase, function, (), site, ""), {"calls": 0, "flops": 0, "shapes": [], "why": None, "groups": []}
        )
        row["calls"] += times
        row["untold"] = why

    def run(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on shapes; ``args`` hold meta tensors, and CPU tensors where the host's take part."""
        hosted = [one for one in _written(plan, args, kwargs) if isinstance(one, torch.Tensor) and not one.is_meta]
        device = kwargs.get("device")
        to_host = (device is not None and tensor.DEVICE(device).type == "cpu") or func is torch.ops.aten._local_scalar_dense.default
        there = kwargs if not to_host else {**kwargs, **({"device": META} if device is not None else {})}
        why = None
        try:
            if plan.on_host or plan.name.startswith("c10d::"):
                raise NotImplementedError  # lengths are the host's, and so is what is made of them; ranks have to meet
            if func is torch.ops.aten._local_scalar_dense.default:
                result: Any = torch.full((), self._numbers.get(args[0], 1), dtype=args[0].dtype).item()
            else:
                result = func(*_to_meta(args), **_to_meta(there))
        except (NotImplementedError, RuntimeError):
            why = "shape" if torch.Tag.dynamic_output_shape in func.tags else "meta"
            made = KERNELS.get(func, func)(*_to_ones(args), **_to_ones(there))
            result = _to_meta(made)
            if plan.on_host:
                why, result = None, tuple(one if at in plan.on_host else result[at] for at, one in enumerate(made))
        if why is None and plan.name.partition(".")[0] in MASKED and _by_mask(args[1]):
            why = "mask"
        self._note(func, plan, args, kwargs, result, why)
        self._know(plan, args, kwargs, result)
        for one in hosted:
            one.fill_(1)
        if to_host or hosted:
            return hosted[0] if hosted else _to_ones(result)
        return result

    def _know(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Remember a tensor that holds one number: what was filled with it, and that nothing is infinite (a loss scaler asks)."""
        for one in _written(plan, args, kwargs):
            if isinstance(one, torch.Tensor):
                self._numbers.pop(one, None)
        name = plan.name.partition(".")[0]
        if name in FILLED and isinstance(result, torch.Tensor):
            given = [one for one in args[1:] if isinstance(one, (int, float))]
            number = [0] if "zero" in name else given
            if number:
                self._numbers[result] = number[0]
        elif name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self._numbers[args[1]] = 0

    def _note(self, func: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, why: str | None) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        dtypes = tuple(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in given or made))
        node = torch._C._current_autograd_node()
        phase = "forward" if node is None else "backward"
        if self._known is not None:
            (site, function, phase, times), package = self._known, ""
            if not times:
                return
        else:
            site, package = _site(sys._getframe(1)) if node is None else (("", 0, node.name()), "")
            function, times = _function(), 1
        key = plan.name, phase, function, dtypes, site, package
        shapes = " ".join(str(tuple(one.shape)) for one in given[:4]) or "-"
        count = self._flops.get(func._overloadpacket)
        try:
            flops = 0 if count is None else int(count(*args, **kwargs, out_val=result))
        except Exception:  # noqa: BLE001 - a formula of PyTorch's for other arguments than these
            flops = 0
        with self._lock:
            row = self._rows.setdefault(key, {"calls": 0, "flops": 0, "shapes": [], "why": None, "groups": []})
            if plan.name.startswith("c10d::") and (size := _group(args)) not in row["groups"]:
                row["groups"].append(size)
            row["calls"] += times
            row["flops"] += flops * times
            row["why"] = row["why"] or why
            if plan.view_of is not None:
                self._views.add(plan.name)
            if [self._step, shapes] not in row["shapes"] and len(row["shapes"]) < MOST_SHAPES:
                row["shapes"].append([self._step, shapes])

    def _kind(self, operator: str) -> str:
        return "view" if operator in self._views else _kind(operator)

    def _move(self, module: torch.nn.Module, args: Any) -> Any:
        """Move a module that is called to the device, with what is inside it and what it is given."""
        with self.noting(None, "", "", 0):
            if any(one.device.type == "cpu" for one in module.parameters()):
                module.to("npu")
            return tree_map_only(torch.Tensor, lambda one: one.to("npu"), args)

    def _stepped(self, *_: Any) -> None:
        self._step += 1
        if self._steps is not None and (self._step >= self._steps or not self._rows):  # a step that used no device: none will
            raise SystemExit(0)

    def write(self) -> None:
        """Write what ran."""
        if os.getpid() != self._process:
            return  # a data worker that was forked
        from torch._decomp import decomposition_table

        made = {overload.name() for overload in decomposition_table if hasattr(overload, "name")}
        rows = [
            {**dict(zip(("operator", "phase", "function", "dtypes", "site", "package"), key, strict=True)), **row,
             "kind": "untold" if "untold" in row else self._kind(key[0]), "decomposes": key[0] in made, "forms": _forms(key[0])}
            for key, row in self._rows.items()
        ]  # fmt: skip
        whole = {
            "steps": self._step, "torch": str(torch.__version__), "rows": rows, "memory": tensor.peak, "packages": _packages(),
            "script": str(Path(sys.argv[0]).absolute()) if sys.argv[:1] not in ([], [""], ["-c"]) else "",
        }  # fmt: skip
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(whole), errors="backslashreplace")


def begin() -> None:
    """Begin with what the environment asks for."""
    steps = os.environ.get(STEPS)
    Shapes(Path(os.environ[INTO]), int(steps) if steps else None).begin()


def _by_mask(indices: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _written(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    places = [place for place in plan.written if isinstance(place, str) or place < len(args)]
    return [kwargs.get(place) if isinstance(place, str) else args[place] for place in places]


def _meta(one: torch.Tensor) -> torch.Tensor:
    return one if one.is_meta else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=META)


def _ones(one: torch.Tensor) -> torch.Tensor:
    return torch.ones(one.shape, dtype=one.dtype) if one.is_meta else one


_to_meta = partial(tree_map_only, torch.Tensor, _meta)


def _to_ones(value: Any) -> Any:
    devices = tree_map_only(tensor.DEVICE, lambda one: tensor.CPU if one.type == "meta" else one, value)
    return tree_map_only(torch.Tensor, _ones, devices)


def _site(frame: FrameType | None) -> tuple[tuple[str, int, str] | None, str]:
    """Return file, line and function of the innermost frame of the user's own, else of a library's, not PyTorch's, not ours; and
    the package of the innermost library between."""
    library = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_QUIET):
            if not name.startswith(_LIBRARIES):
                return (name, frame.f_lineno, frame.f_code.co_name), _package(library[0] if library else "")
            library = library or (name, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return library, _package(library[0] if library else "")


def _package(file: str) -> str:
    """Return the top package of a library's file, nothing of any other."""
    root = next((one for one in _LIBRARIES if file.startswith(one)), None)
    return "" if root is None else Path(file).relative_to(root).parts[0].removesuffix(".py")


def _packages() -> dict[str, str]:
    """Return the packages beside PyTorch that are imported, with their folder."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if "." not in name else None
        if isinstance(file, str) and file.startswith(_LIBRARIES) and not file.startswith(_QUIET):
            found[name] = str(Path(file).parent) if Path(file).name.startswith("__init__") else file
    return found


def _group(args: tuple[Any, ...]) -> int:
    """Return how many ranks a collective is of."""
    from torch.distributed.distributed_c10d import ProcessGroup

    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return int(ProcessGroup.unbox(one).size())
    return 0


def _function() -> str:
    from trueup.recording.adapters.torch import redirecting

    return redirecting.calling()


def _kind(operator: str) -> str:
    """Return how PyTorch itself runs an operator on a device without a kernel for it: by others, or not at all."""
    if not operator.startswith("aten::"):
        return "custom"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has(operator, kind) for kind in ("CompositeExplicitAutograd", "CompositeImplicitAutograd")):
        return "composite"
    others = has(operator, "CompositeExplicitAutogradNonFunctional")
    return "composite" if others and not _is_structured(operator) else "kernel"


def _is_structured(operator: str) -> bool:
    """Return whether an operator is made of its own form with ``out=`` alone, for which each device has a kernel (``digamma``)."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{form}", "CPU") for form in _forms(operator, alike=False))


def _forms(operator: str, *, alike: bool = True) -> list[str]:
    """Return an operator's forms that write into what they are given: of ``softplus_backward`` ``softplus_backward.grad_input``;
    ``alike``: those alone that take the same arguments besides."""
    package, _, name = operator.partition("::")
    root, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, root.removesuffix("_"), None) if package == "aten" else None
    own = getattr(getattr(torch.ops.aten, root, None), overload or "default", None)
    if packet is None or own is None:
        return []
    wanted = [argument.name for argument in own._schema.arguments if not argument.is_out]
    found = []
    for form in (getattr(packet, name) for name in packet.overloads()):
        taken = [argument.name for argument in form._schema.arguments if not argument.is_out]
        if len(taken) < len(form._schema.arguments) and (not alike or taken == wanted):
            found.append(form.name().removeprefix("aten::"))
    return found
