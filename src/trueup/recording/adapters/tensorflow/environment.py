"""What a run was made of, as read inside the run: versions, devices, ranks, seeds and every switch that moves numerics."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from typing import Any

import tensorflow as tf

from trueup.foundation.version import VERSION
from trueup.recording.recorder import surroundings


def rank_and_world() -> tuple[int | None, int]:
    """Return this process's rank (None when nothing says so) and the world size: by ``TF_CONFIG``, else by the launcher."""
    try:
        told = json.loads(os.environ.get("TF_CONFIG", "{}"))
        cluster = told.get("cluster", {})
        workers = [*cluster.get("chief", []), *cluster.get("worker", [])]
        task = told.get("task", {})
        if workers and task.get("type") in ("chief", "worker"):
            before = len(cluster.get("chief", [])) if task["type"] == "worker" else 0
            return before + int(task.get("index", 0)), len(workers)
    except (ValueError, AttributeError, TypeError):  # a TF_CONFIG that says nothing
        pass
    return surroundings.rank_and_world()


def describe_run(devices: list[str]) -> dict[str, Any]:
    """Describe this process for its rank's manifest."""
    rank, world = rank_and_world()
    return {
        "framework": "tensorflow",
        "devices": devices,
        "versions": _versions(),
        "seeds": _seeds(),
        "world_size": world,
        "rank": rank or 0,
        "pid": os.getpid(),
        "argv": sys.argv[:64],
        "environment": switches() | surroundings.variables(),
    }


def _versions() -> dict[str, str]:
    names = ("numpy", "keras", "npu_device", "horovod", "tensorflow_addons")
    found = {name: getattr(sys.modules[name], "__version__", "?") for name in names if name in sys.modules}
    found |= {"python": platform.python_version(), "tensorflow": tf.__version__, "trueup": VERSION}
    return {k: str(v) for k, v in sorted(found.items())}


def _seeds() -> dict[str, int]:
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return {} if seed is None else {"tensorflow": int(seed)}


def switches() -> dict[str, str]:
    """Return the effective values of TensorFlow's numeric switches."""
    found: dict[str, Any] = {"onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1")}
    with suppress(Exception):  # a part of TensorFlow that this version has not
        found["op_determinism"] = tf.config.experimental.is_op_determinism_enabled()
        found["tensor_float_32"] = tf.config.experimental.tensor_float_32_execution_enabled()
        found["jit"] = tf.config.optimizer.get_jit()
        found |= {f"optimizer.{name}": value for name, value in tf.config.optimizer.get_experimental_options().items()}
        found["functions_run_eagerly"] = tf.config.functions_run_eagerly()
    keras = sys.modules.get("keras")
    with suppress(Exception):  # likewise
        if keras is not None:
            found["keras.floatx"] = keras.config.floatx()
            found["keras.dtype_policy"] = keras.config.dtype_policy().name
    return {k: str(v) for k, v in found.items()}
