"""`import precision_tool.tf_config as npu_tf_config`: what a training script calls.

    config = npu_tf_config.session_dump_config(config, action="dump")      # the candidate
    sess = npu_tf_config.sess_dump(sess)                                   # the baseline

As with the tool, importing this module seeds everything: the two runs begin with the same weights without another line in the
script.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import rewriter_config_pb2

from trueup.doors.training import seed_all
from trueup.foundation.model import TrueupError
from trueup_compat.precision_tool import config as settings
from trueup_compat.precision_tool import recording
from trueup_compat.precision_tool.keys import OPTIMIZER, actions_of, environment_of, keys_of, set_keys

__all__ = [
    "estimator_dump", "estimator_dump_config", "npu_device_dump_config", "seed_everything", "sess_dump", "session_dump_config",
    "update_custom_op",
]  # fmt: skip

OFF = rewriter_config_pb2.RewriterConfig.OFF
FUSING = ("remapping", "layout_optimizer")
"""Optimizers of a session's graph that put several operations into one, or choose another kernel's layout."""


def seed_everything(seed: int = settings.DUMP_SEED) -> None:
    """Seed Python, NumPy and TensorFlow, the present default graph included.

    Raises:
        TrueupError: the seed is out of range.
    """
    seed_all(seed)
    tf.get_default_graph().seed = seed  # set_random_seed leaves it alone until a script has disabled eager execution
    for what in ("PYTHONHASHSEED", "random", "numpy", "tensorflow"):
        print(f"[PrecisionTool] Set {what} seed {seed}")


def sess_dump(sess: Any) -> Any:
    """Record what sessions compute from now on, as the baseline (``precision_data/tf/dump``); return the session.

    Raises:
        TrueupError: something that is no capture is in the way.
    """
    recording.capture(settings.baseline())
    return sess


class _Dumping(tf.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow is not followed
    """Records while an estimator, or a MonitoredSession, runs."""

    def begin(self) -> None:
        """Begin the capture."""
        recording.capture(settings.baseline())

    def end(self, session: Any) -> None:  # noqa: ARG002
        """End it."""
        recording.end()


def estimator_dump() -> Any:
    """Return a hook for estimators and monitored sessions that records as `sess_dump` does."""
    return _Dumping()


def session_dump_config(config: Any = None, action: str | None = None) -> Any:
    """Return the config of a session that does what ``action`` asks: ``overflow``, ``dump``, ``fusion_off``, ...

    The keys for the device's ``NpuOptimizer`` are in it. On other devices ``overflow`` begins a watch, ``dump`` a capture (the
    candidate), and ``fusion_off`` switches off what TensorFlow fuses.

    Args:
        config: a ``ConfigProto``, or None for a new one.
        action: one or several, joined by ``|``; None: what PRECISION_TOOL_OVERFLOW or PRECISION_TOOL_DUMP in the environment ask.

    Raises:
        TrueupError: there is no such action.
    """
    actions = actions_of(action)
    made = tf.ConfigProto() if config is None else config
    rewriting = made.graph_options.rewrite_options
    found = [one for one in rewriting.custom_optimizers if one.name == OPTIMIZER]
    optimizer = found[0] if found else rewriting.custom_optimizers.add()
    optimizer.name = OPTIMIZER
    optimizer.parameter_map["use_off_line"].b = True
    update_custom_op(optimizer, action)
    rewriting.remapping = OFF
    if "fusion_off" in actions:
        for name in FUSING:
            setattr(rewriting, name, OFF)
        made.graph_options.optimizer_options.global_jit_level = tf.OptimizerOptions.OFF
    recording.begin(actions)
    return made


def update_custom_op(custom_op: Any, action: str | None = None) -> Any:
    """Write the keys of an action into a custom optimizer that is there, and return it; nothing is recorded by this.

    Raises:
        TrueupError: there is no such action.
    """
    actions = actions_of(action)
    set_keys(custom_op, keys_of(actions))
    os.environ.update(environment_of(actions))
    return custom_op


@dataclass
class DumpConfig:
    """What an estimator on the device takes; this one where its plug-in is not installed."""

    enable_dump: bool = False
    dump_path: str | None = None
    dump_step: str | None = None
    dump_mode: str = "output"
    enable_dump_debug: bool = False
    dump_debug_mode: str = "all"


def estimator_dump_config(action: str | None = None) -> Any:
    """Return the ``DumpConfig`` of an estimator for ``overflow`` or ``dump``; on other devices begin what these ask for.

    Raises:
        TrueupError: there is no such action, or it is none for estimators.
    """
    actions = actions_of(action)
    if set(actions) - {"overflow", "dump"}:
        raise TrueupError(f"action {action!r} is none for estimators: expected overflow or dump")
    keys = {name: value for name, value in keys_of(actions).items() if name != "op_debug_level"}
    recording.begin(actions)
    if recording.on_device():
        from npu_bridge.estimator.npu.npu_config import DumpConfig as OfDevice  # type: ignore[import-not-found]

        return OfDevice(**keys)
    return DumpConfig(**keys)  # type: ignore[arg-type]


def npu_device_dump_config(npu_device: Any, action: str | None = None) -> Any:
    """Write what ``action`` asks into the global options of ``npu_device`` (TensorFlow 2), and return that.

    Args:
        npu_device: the plug-in's module; None on other devices, where ``overflow`` begins a watch and ``dump`` a capture.
        action: one or several, joined by ``|``.

    Raises:
        TrueupError: there is no such action.
    """
    actions = actions_of(action)
    recording.begin(actions)
    if npu_device is None:
        return None
    options = npu_device.global_options()
    of_dump = ("enable_dump", "dump_mode", "dump_step", "dump_path", "enable_dump_debug", "dump_debug_mode")
    for name, value in keys_of(actions).items():
        if name == "profiling_mode":
            options.profiling_config.enable_profiling = value
        elif name == "profiling_options":
            options.profiling_config.profiling_options = value
        else:
            setattr(options.dump_config if name in of_dump else options, name, value)
    os.environ.update(environment_of(actions))
    return npu_device


seed_everything()
