"""Makes PrivateUse1 the device ``npu``: its name, module, factories, autocast rules and file locations."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from trueup.foundation.model import TrueupError
from trueup.simdev import attention, autocast, dropout, npu, rnn, serialization
from trueup.simdev.plan import COMPOSITE_ELSEWHERE
from trueup.simdev.tensor import NPUTensor, dispatch

FAULT_VARIABLE = "TRUEUP_SIMDEV_FAULT"
NOISE_VARIABLE = "TRUEUP_SIMDEV_NOISE"

_libraries: list[Any] = []
"""Held for the life of the process: a `torch.library.Library` takes its kernels back when it is collected."""


def install() -> None:
    """Make the device type ``npu`` known to PyTorch; a second call does nothing.

    Honours ``TRUEUP_SIMDEV_FAULT`` and ``TRUEUP_SIMDEV_NOISE`` (names separated by commas).

    Raises:
        TrueupError: another backend has taken PyTorch's only private device type, or a name is unknown.
    """
    if _libraries:
        return
    _claim()
    aten_library, any_library = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend([aten_library, any_library])
    _factories(aten_library, any_library)
    autocast.register(aten_library, any_library)
    attention.register(aten_library)
    for part in (rnn, dropout, serialization):
        part.register()
    _from_environment()


def _unpinned(tensor: Any, device: Any = None) -> Any:  # noqa: ARG001 - the signature of Tensor.pin_memory
    return tensor


def _claim() -> None:
    from torch.utils import backend_registration

    taken = torch._C._get_privateuse1_backend_name()
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if taken != "privateuseone":
        raise TrueupError(
            f"The simulated device cannot be installed: PyTorch's private device type is {taken!r} already. "
            "Run the simulation in a process that does not import that backend."
        )
    if setup is None:
        raise TrueupError(
            f"The simulated device needs a PyTorch with Python backends; this is {torch.__version__}. "
            "Install torch 2.13 or newer."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the API is experimental; the tests watch it for us
        setup("npu", backend_module=npu)
    # Pinning asks a C++ hook that a Python backend cannot give; DataLoader(pin_memory=True) calls it for every batch.
    torch.Tensor.pin_memory = _unpinned


def _direct(operator: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, args, kwargs)

    return kernel


def _factories(aten_library: Any, any_library: Any) -> None:
    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> NPUTensor:
        return NPUTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> NPUTensor:
        return NPUTensor(torch.empty_strided(size, stride, dtype=dtype))

    def any_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
        # Factories that have a kernel per backend (tril_indices ...) arrive here, no npu tensor among their inputs.
        return dispatch(operator, args, kwargs)

    # torch.tensor(..., device="npu") converts with the Python key switched off, and a boxed Python fallback fails there
    # (func != nullptr, PyTorch 2.13); a kernel of its own does not.
    aten_library.impl("_to_copy", _direct(torch.ops.aten._to_copy.default), "PrivateUse1")
    for name in COMPOSITE_ELSEWHERE:
        aten_library.impl(name, _direct(getattr(torch.ops.aten, name).default), "PrivateUse1")
    aten_library.impl("empty.memory_format", empty, "PrivateUse1")
    aten_library.impl("empty_strided", empty_strided, "PrivateUse1")
    any_library.fallback(any_operator, "PrivateUse1")


def _from_environment() -> None:
    from trueup.simdev import injection

    names = [name.strip() for name in os.environ.get(FAULT_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        injection.inject(name)
    for name in os.environ.get(NOISE_VARIABLE, "").split(","):
        if name.strip():
            injection.noise(name.strip())
