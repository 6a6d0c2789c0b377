"""Switches of the vendor's compiler and tools: checked as the vendor's pages say, though nothing is compiled here.

``set_dump`` writes what each operator takes and gives, as NumPy files named as the vendor's converter names them:
``add_.add__3.3.0.1730000000000000.output.0.npy`` (operator, call, task, stream, time in us). `trueup import` reads such a folder.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trueup.simdev import tensor
from trueup.simdev.tensor import Plan

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
