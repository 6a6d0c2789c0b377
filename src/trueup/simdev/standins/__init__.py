"""What ``import torch_npu``, ``apex``, ``npu_device`` and ``npu_bridge`` find, where the vendor's packages are not installed.

Each name leads to a module of this folder, which is imported when a script asks for it. The functions are PyTorch's, or
TensorFlow's, own under the vendor's names; what these have no formula for raises NotImplementedError with the name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HERE = "trueup.simdev.standins"
NAMES = {
    "torch_npu": "torch_npu", "torch_npu.npu": "..npu", "torch_npu.contrib": "torch_npu",
    "torch_npu.contrib.transfer_to_npu": "transfer", "torch_npu.optim": "optimizers", "torch_npu.profiler": "profiler",
    "torch_npu.testing": "testing", "torch_npu.testing.testcase": "testing",
    "apex": "apex", "apex.amp": "amp", "apex.optimizers": "optimizers", "apex.normalization": "apex", "apex.parallel": "apex",
    "apex.fp16_utils": "fp16_utils", "apex.multi_tensor_apply": "fp16_utils",
    **{f"npu_device{name}": "npu_device" for name in (
        "", ".npu_device", ".compat", ".configs", ".ops", ".distribute", ".distribute.hccl", ".distribute.npu_callbacks", ".train",
        ".train.optimizer", ".train.optimizer.npu_loss_scale_optimizer", ".utils", ".utils.scope",
    )},
    "npu_convert_dropout": "npu_device",  # which lets Keras' layers use the device's own dropout
    **dict.fromkeys(("npu_device.compat.v1", "npu_device.compat.v1.npu_init"), "npu_bridge"),
    **dict.fromkeys(("hccl", "hccl.manage", "hccl.manage.api"), "npu_bridge"),
    **{f"npu_bridge{name}": "npu_bridge" for name in (
        "", ".npu_init", ".hccl", ".hccl.hccl_ops", ".estimator", ".estimator.npu_ops", ".estimator.npu",
    )},
    **{f"npu_bridge.estimator.npu.{name}": "npu_bridge" for name in (
        "npu_config", "npu_estimator", "npu_optimizer", "npu_hook", "npu_loss_scale_optimizer", "npu_loss_scale_manager",
        "npu_scope", "util",
    )},
}  # fmt: skip
"""Names of the vendor's, and the modules of ours that stand there."""
PYTORCH = ("torch_npu", "apex")
TESTING = "torch.testing._internal.common_utils"
"""PyTorch's own module for tests, which the porting guide uses and which needs a package that few have."""


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname not in self._names:
            return None
        package = any(name.startswith(f"{fullname}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module of that name with what ours holds."""
        place = self._names[spec.name]
        real = importlib.import_module(place if place.startswith("trueup") else f"{HERE}.{place}")
        if spec.name == "torch_npu.npu":
            return real
        made = _Module(spec.name, real.__doc__)
        made.real = real
        made.__all__ = getattr(real, "__all__", dir(made))  # for ``from apex.fp16_utils import *``
        return made

    def exec_module(self, module: Any) -> None:
        """Do nothing more: ours has run."""


class _Module(ModuleType):
    real: Any
    __all__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if f"{self.__name__}.{name}" in NAMES:
            return importlib.import_module(f"{self.__name__}.{name}")
        try:
            return getattr(self.real, name)
        except AttributeError:
            raise AttributeError(f"module {self.__name__!r} of the simulated device has no {name!r}") from None

    def __dir__(self) -> list[str]:
        return [name for name in dir(self.real) if not name.startswith("_")]


def install(*packages: str) -> None:
    """Let imports of the vendor's packages find the device, those of PyTorch if none is named, where they are not installed."""
    missing = {name for name in packages or PYTORCH if importlib.util.find_spec(name) is None}
    names = {
        name: place.replace("..npu", "trueup.simdev.npu") for name, place in NAMES.items() if name.partition(".")[0] in missing
    }
    if not packages and importlib.util.find_spec("expecttest") is None:
        names[TESTING] = "testing"
    sys.meta_path.insert(0, _Finder(names))
