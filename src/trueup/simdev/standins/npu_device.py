"""``npu_device``, the vendor's adapter for TensorFlow 2: its options are checked, and what it does with one worker is done."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from trueup.simdev import tensorflow as simulated

DEVICE = "/job:localhost/replica:0/task:0/device:NPU"
WHERE = "npu_device.global_options()"
simulated.begin()


class Options:
    """A group of options: those that it has are checked as they are set, an unknown one raises ValueError with all names."""

    _where: str

    def __init__(self, where: str, known: Any) -> None:
        groups = known if isinstance(known, dict) else dict.fromkeys(known)
        made = {name: None if inner is None else Options(f"{where}.{name}", inner) for name, inner in groups.items()}
        self.__dict__.update(made, _where=where)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__dict__.get('_where')} has no option {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        known = [one for one in vars(self) if one != "_where"]
        if name not in known:
            raise ValueError(f"{self._where} has no option {name}; it has {', '.join(known)}")
        if isinstance(vars(self)[name], Options):
            inside = ", ".join(one for one in vars(vars(self)[name]) if one != "_where")
            raise ValueError(f"{self._where}.{name} is a group of options: set one of {inside}")
        simulated.check(name, value, self._where)
        self.__dict__[name] = value


_options = Options(WHERE, {**dict.fromkeys(simulated.GLOBAL), **simulated.GROUPS})
_opened: dict[int, Handle] = {}


def global_options() -> Options:
    """Return the options of the device, which hold from `open` on."""
    return _options


class Handle:
    """The device that was opened."""

    workers_num, worker_id = 1, 0

    def __init__(self, device_id: int) -> None:
        self._id = device_id

    def name(self) -> str:
        """Return the name that the vendor's device has; TensorFlow knows no such device here."""
        return f"{DEVICE}:{self._id}"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Do nothing: the CPU computes, inside it and outside."""
        yield

    def is_cluster_worker(self) -> bool:
        """Return False: there is one worker."""
        return False

    def as_default(self) -> Handle:
        """Return the device; from now on no function is compiled by XLA, which the vendor's adapter switches off."""
        _without_xla()
        return self


@functools.cache
def _without_xla() -> None:
    from trueup.recording.adapters.tensorflow import switching

    switching.xla_functions(True)


def open(device_id: int | None = None) -> Handle:
    """Open the device with the global options.

    Raises:
        RuntimeError: there is no device of that number, or another one is open.
        NotImplementedError: several workers train together.
    """
    asked = os.environ.get("ASCEND_DEVICE_ID", "0") if device_id is None else device_id
    count = os.environ.get("TRUEUP_SIMULATED_DEVICES", "1")
    if not str(asked).isdecimal() or int(asked) >= int(count):
        raise RuntimeError(f"npu_device.open: there is no device {asked}; there are {count} (TRUEUP_SIMULATED_DEVICES), from 0")
    index = int(asked)
    if index in _opened:
        return _opened[index]
    if _opened:
        raise RuntimeError(f"npu_device.open: device {next(iter(_opened))} is open, and a process has one; asked for {index}")
    simulated.one_worker("npu_device.open")
    _carry_out()
    return _opened.setdefault(index, Handle(index))


def _carry_out() -> None:
    """Do what the options say about numbers."""
    policy = simulated.MIXED.get(_options.precision_mode)
    if policy is not None:
        tf.keras.mixed_precision.set_global_policy(policy)
        said = f"{WHERE}: precision_mode={_options.precision_mode!r} is Keras' {policy} here, for layers built from now on"
        warnings.warn(f"{said}; the vendor's own lists of operators are not simulated", stacklevel=3)
    if str(_options.deterministic) == "1":
        tf.config.experimental.enable_op_determinism()


def close() -> None:
    """Close the device."""
    _opened.clear()


def enable_v1() -> None:
    """Let sessions of TensorFlow 1 check what ``NpuOptimizer`` is given."""
    from trueup.simdev.standins import npu_bridge  # noqa: F401 - it does so when it is imported


def set_npu_loop_size(loop_size: int) -> None:
    """Accept one turn; raises NotImplementedError for more."""
    simulated.check("iterations_per_loop", loop_size, "npu_device.set_npu_loop_size")


def set_device_sat_mode(mode: int) -> None:
    """Accept 1, Inf and NaN as they are; raises NotImplementedError for 0, saturation."""
    simulated.check("overflow_flag", mode, "npu_device.set_device_sat_mode")


@contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """Keep dtypes, as they are anyway; raises NotImplementedError in mixed precision."""
    if _options.precision_mode in simulated.MIXED:
        raise NotImplementedError("npu_device.keep_dtype_scope is not simulated in mixed precision: give the layer dtype='float32'")
    yield


@contextmanager
def npu_recompute_scope() -> Iterator[None]:
    """Compute once: numbers are the same."""
    yield


npu_compat_function = tf.function


# ---------------------------------------------------------------- distribute, with one worker, and train
def all_reduce(values: Any, *_: Any, **__: Any) -> Any:
    """Return the values: there is one worker."""
    return values


def broadcast(*_: Any, **__: Any) -> None:
    """Do nothing: there is one worker."""


grouping_broadcast = broadcast


def shard_and_rebatch_dataset(dataset: Any, global_bs: int) -> tuple[Any, int]:
    """Return the data set and the size of a batch as they are: there is one worker."""
    return dataset, global_bs


def npu_distributed_keras_optimizer_wrapper(optimizer: Any, *_: Any, **__: Any) -> Any:
    """Return the optimizer of Keras, found by its name if need be: there is one worker."""
    return tf.keras.optimizers.get(optimizer)


class NPUBroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):
    """A callback that does nothing: there is one worker."""

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self.root_rank = root_rank


def npu_callbacks_append(callbacks_list: Any = ()) -> list[Any]:
    """Return the callbacks with one more that broadcasts."""
    return [*callbacks_list, NPUBroadcastGlobalVariablesCallback(0)]


def NpuLossScaleOptimizer(
    inner_optimizer: Any, dynamic: bool = True, initial_scale: float | None = None, dynamic_growth_steps: int | None = None
) -> Any:
    """Return Keras' own; raises NotImplementedError for a fixed scale, which Keras 3 has not."""
    if not dynamic:
        raise NotImplementedError("NpuLossScaleOptimizer(dynamic=False) is not simulated: Keras 3 scales losses dynamically alone")
    asked = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
    return tf.keras.mixed_precision.LossScaleOptimizer(inner_optimizer, **{k: v for k, v in asked.items() if v is not None})
