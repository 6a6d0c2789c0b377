"""The simulated accelerator of Paddle: a custom device ``npu``, built once from `paddle_device.cc` for the installed Paddle.

Paddle looks for devices in the folder ``CUSTOM_DEVICE_ROOT`` when it is imported, so that is set right before (`install`). The
device has memory of its own kind and no kernels: Paddle runs those of the CPU on copies, so numbers are the CPU's. Of half
precision the CPU has few, so mixed precision has no effect on the device, as Paddle has it on the CPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.engine.replacing import WhenLoaded

SOURCE = Path(__file__).with_name("paddle_device.cc")
ROOT, DEVICES = "CUSTOM_DEVICE_ROOT", "TRUEUP_SIMULATED_DEVICES"
"""Environment variables: where Paddle looks for devices, and how many the simulated one has."""
NO_HALF = (
    "trueup: mixed precision has no effect on the simulated device: Paddle's CPU computes for it and has no kernels of float16 and"
    " bfloat16 for most operators, so that all stays in float32"
)
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300


def installed() -> Path | None:
    """Return the folder of the Paddle that this Python would import, if there is one; nothing is imported."""
    spec = importlib.util.find_spec("paddle")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def build(into: Path, *, name: str = "npu", devices: int = 1) -> Path:
    """Compile the device into a folder and return the library; raises TrueupError without Paddle or a C++ compiler, or where the
    compiler fails."""
    paddle = installed()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if paddle is None or compiler is None:
        raise TrueupError(
            "Paddle's simulated device cannot be built.\n  expected: Paddle in this Python, and a C++ compiler\n"
            f"  got:      {'no Paddle' if paddle is None else 'none of ' + ', '.join(COMPILERS)}\n"
            "  next:     install it, or run on the CPU: paddle.set_device('cpu')"
        )
    library = into / "libtrueup_device.so"
    into.mkdir(parents=True, exist_ok=True)
    names = [f'-DTYPE="{name}"', f"-DDEVICES={devices}"]
    fresh = library.with_name(f"{os.getpid()}.building")  # Paddle loads what ends in .so, and another process may build, too
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{paddle / 'include'}", *names]
    command = [compiler, *flags, str(SOURCE), "-o", str(fresh)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if ran.returncode:
        said = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1][:300]
        raise TrueupError(
            f"Paddle's simulated device cannot be built.\n  where:    {SOURCE}\n  expected: {compiler} to compile it\n"
            f"  got:      {said}\n  next:     run on the CPU, and report it"
        )
    fresh.replace(library)
    return library


def environment(devices: int = 1) -> dict[str, str]:
    """Return the variables with which Paddle finds the device; it is built the first time, into the user's cache. Raises
    TrueupError as `build` does."""
    paddle = installed()
    version = str(paddle / "version" / "__init__.py") if paddle is not None else ""
    mark = hashlib.sha256(SOURCE.read_bytes() + version.encode() + _read(version)).hexdigest()[:16]
    root = _cache(f"paddle-{mark}-{devices}")
    if not (root / "libtrueup_device.so").exists():
        build(root, devices=devices)
    return {ROOT: str(root), "FLAGS_use_stride_kernel": "0"}  # strided copies need kernels of the device


def install() -> None:
    """Let Paddle find the device when it is imported, if it has no other: built then, the first time."""
    if Path(os.environ.get(ROOT, _cache())).parent == _cache().parent and "paddle" not in sys.modules:
        sys.meta_path.insert(0, _BeforePaddle())


class _BeforePaddle:
    """Sets what Paddle's import reads, right before it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002 - the interface of a finder
        if name != "paddle":
            return
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]  # `remove` shifts what other threads walk along
        try:
            os.environ.update(environment(int(os.environ.get(DEVICES) or 1)))
            WhenLoaded("paddle.amp", _in_float32).install()
        except (TrueupError, OSError, ValueError) as error:
            print(f"trueup: Paddle has no simulated device here: {error}", file=sys.stderr)


def _cache(name: str = "paddle") -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trueup", name)


def _in_float32() -> None:
    """Let ``paddle.amp`` change nothing where the device is chosen, and say so once."""
    modules: list[Any] = [sys.modules["paddle.amp"], sys.modules["paddle.amp.auto_cast"]]
    scaler: Any = sys.modules["paddle.amp.grad_scaler"].AmpScaler
    guard, decorate, begin = modules[1].amp_guard, modules[1].amp_decorate, scaler.__init__
    say = functools.cache(warnings.warn)

    def is_simulated() -> bool:
        if not sys.modules["paddle"].get_device().startswith("npu"):
            return False
        say(NO_HALF)
        return True

    def amp_guard(enable: bool = True, *args: Any, **options: Any) -> Any:
        return guard(enable and not is_simulated(), *args, **options)

    def amp_decorate(models: Any, optimizers: Any = None, *args: Any, **options: Any) -> Any:
        if is_simulated():
            return models if optimizers is None else (models, optimizers)
        return decorate(models, optimizers, *args, **options)

    def scale(self: Any, enable: bool = True, *args: Any, **options: Any) -> None:
        begin(self, enable and not is_simulated(), *args, **options)

    scaler.__init__ = scale
    for module in modules:
        module.amp_guard, module.amp_decorate = amp_guard, amp_decorate


def _read(file: str) -> bytes:
    return Path(file).read_bytes() if file and Path(file).exists() else b""
