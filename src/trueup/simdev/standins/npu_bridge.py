"""``npu_bridge``, the vendor's adapter for graphs of TensorFlow 1, and ``npu_device.compat.v1``: sessions check their settings.

``from npu_bridge.npu_init import *`` brings the names that scripts take from it, ``tf``, ``os`` and ``RewriterConfig`` among them.
What TensorFlow 2 has no Estimator for, and loss scaling in a graph, raise NotImplementedError with the name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.client import session

from trueup.recording.engine.replacing import Around
from trueup.simdev import tensorflow as simulated

NO_ESTIMATOR = "TensorFlow has no Estimator any more; train with a session or with Keras"
NO_SCALING = "loss scaling in a graph is the device's own; train without it, or with Keras' LossScaleOptimizer"
REFUSED = {
    "set_keras_session_npu_config": "Keras 3 has no session; use npu_device",
    **dict.fromkeys(("NPUEstimator", "NPUEstimatorSpec", "NPURunConfig", "NPUCheckpointSaverHook", "NPUOutputTensorHook",
                     "npu_run_config_init"), NO_ESTIMATOR),
    **dict.fromkeys(("NPULossScaleOptimizer", "FixedLossScaleManager", "ExponentialUpdateLossScaleManager"), NO_SCALING),
}  # fmt: skip
__all__ = [
    *REFUSED, "DumpConfig", "NPUBroadcastGlobalVariablesHook", "NPUDistributedOptimizer", "NPUOptimizer", "RewriterConfig",
    "SessionConfigBuilder", "close_session", "config_pb2", "init_resource", "npu_keras_optimizer", "npu_tf_optimizer",
    "shutdown_resource", "get_local_rank_id", "get_rank_id", "get_rank_size", "npu_config_proto",
    "npu_distributed_optimizer_wrapper", "npu_hooks_append", "npu_session_config_init", "os", "rewriter_config_pb2", "session",
    "tf",
]  # fmt: skip
simulated.begin()


def _checked(original: Callable[..., None], made: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
    made._session = None  # which is asked when a session goes, also one that never was
    for name in simulated.check_session(config):
        known = ", ".join(sorted(simulated.SESSION))
        warnings.warn(f"NpuOptimizer knows no {name} and passes over it; it knows {known}", stacklevel=4)
    original(made, target, graph, config)


checking = Around(session.BaseSession, "__init__", _checked)
"""Sessions look at what ``NpuOptimizer`` is given, from the import of this module on."""
checking.install()


def npu_config_proto(config_proto: Any = None) -> Any:
    """Return the settings, or new ones, with remapping and XLA off, as the device needs them."""
    config = config_proto if isinstance(config_proto, config_pb2.ConfigProto) else config_pb2.ConfigProto()
    config.allow_soft_placement, config.log_device_placement = True, False
    config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
    config.graph_options.optimizer_options.global_jit_level = config_pb2.OptimizerOptions.OFF
    return config


def npu_session_config_init(session_config: Any = None) -> Any:
    """Return the settings with ``NpuOptimizer`` in them."""
    config = npu_config_proto(session_config)
    config.graph_options.rewrite_options.custom_optimizers.add().name = "NpuOptimizer"
    return config


class SessionConfigBuilder:
    """``npu_device.compat.v1``'s: settings with ``NpuOptimizer``, whose parameters are to be set."""

    def __init__(self, config: Any = None) -> None:
        self.session_config = npu_session_config_init(config)
        self.parameter_map = self.session_config.graph_options.rewrite_options.custom_optimizers[-1].parameter_map


class DumpConfig:
    """What an estimator dumps; checked as the session's options are."""

    def __init__(self, enable_dump: bool = False, dump_path: Any = None, dump_step: Any = None, dump_mode: str = "output",
                 enable_dump_debug: bool = False, dump_debug_mode: str = "all") -> None:  # fmt: skip
        for name, value in (("enable_dump", enable_dump), ("dump_mode", dump_mode), ("enable_dump_debug", enable_dump_debug)):
            simulated.check(name, value, "DumpConfig")
        self.enable_dump, self.dump_path, self.dump_step, self.dump_mode = enable_dump, dump_path, dump_step, dump_mode
        self.enable_dump_debug, self.dump_debug_mode = enable_dump_debug, dump_debug_mode


def npu_distributed_optimizer_wrapper(optimizer: Any, *_: Any, **__: Any) -> Any:
    """Return the optimizer: there is one worker."""
    simulated.one_worker("npu_bridge")
    return optimizer


NPUDistributedOptimizer = npu_tf_optimizer = npu_keras_optimizer = npu_distributed_optimizer_wrapper


def NPUOptimizer(
    opt: Any, loss_scale_manager: Any = None, is_distributed: bool = False, is_loss_scale: bool = False, **_: Any
) -> Any:
    """Return the optimizer: there is one worker; raises NotImplementedError for loss scaling."""
    if is_loss_scale or loss_scale_manager is not None:
        raise NotImplementedError(f"npu_bridge.NPUOptimizer(is_loss_scale=True) is not simulated: {NO_SCALING}")
    return npu_distributed_optimizer_wrapper(opt, is_distributed)


class NPUBroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook that does nothing: there is one worker."""

    def __init__(self, root_rank: int = 0, index: int = 0) -> None:
        self.root_rank, self.index = root_rank, index


def npu_hooks_append(hooks_list: Any = ()) -> list[Any]:
    """Return the hooks with one more that broadcasts."""
    return [*hooks_list, NPUBroadcastGlobalVariablesHook(0, 0)]


def init_resource() -> tuple[Any, None]:
    """Return a session of the device, and nothing to shut it down with."""
    return session.Session(config=npu_session_config_init()), None


def shutdown_resource(*_: Any) -> None:
    """Do nothing: there is nothing to shut down."""


def close_session(sess: Any) -> None:
    """Close a session."""
    sess.close()


def get_rank_size(*_: Any) -> int:
    """Return 1."""
    return 1


def get_rank_id(*_: Any) -> int:
    """Return 0."""
    return 0


get_local_rank_id = get_rank_id


@contextmanager
def keep_dtype_scope() -> Iterator[None]:
    """Keep dtypes, as they are anyway."""
    yield


without_npu_compile_scope = keep_dtype_scope


def set_iteration_per_loop(sess: Any, train_op: Any, iterations_per_loop: int = 1) -> Any:  # noqa: ARG001 - the vendor's signature
    """Return the operation for one turn; raises NotImplementedError for more."""
    simulated.check("iterations_per_loop", iterations_per_loop, "npu_bridge.set_iteration_per_loop")
    return train_op


def __getattr__(name: str) -> Any:
    if name not in REFUSED:
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"npu_bridge.{name} is not simulated: {REFUSED[name]}")

    return missing
