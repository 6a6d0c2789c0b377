"""What a run was made of, as read inside the run: versions, places, ranks, seeds and every switch that moves numerics."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from typing import Any

import paddle
from paddle.base import core

from trueup.foundation.version import VERSION
from trueup.recording.recorder import surroundings

FLAGS = (
    "FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic", "FLAGS_cpu_deterministic", "FLAGS_use_autotune",
    "FLAGS_use_accuracy_compatible_kernel", "FLAGS_cudnn_exhaustive_search", "FLAGS_conv_workspace_size_limit",
    "FLAGS_gemm_use_half_precision_compute_type", "FLAGS_allow_cublas_tf32", "FLAGS_allow_cudnn_tf32", "FLAGS_use_mkldnn",
    "FLAGS_use_onednn", "FLAGS_npu_storage_format", "FLAGS_npu_jit_compile", "FLAGS_use_stride_kernel", "FLAGS_prim_all",
    "FLAGS_enable_api_kernel_fallback", "FLAGS_layout_autotune", "FLAGS_set_to_1d", "FLAGS_use_fast_math",
)  # fmt: skip
"""Flags that choose kernels or their order of operations (Paddle 3.3; those a build lacks are left out)."""


def rank_and_world() -> tuple[int | None, int]:
    """Return this process's rank (None when nothing says so) and the world size, as Paddle's launchers tell them."""
    return surroundings.rank_and_world()


def describe_run(devices: list[str]) -> dict[str, Any]:
    """Describe this process for its rank's manifest."""
    rank, world = rank_and_world()
    return {
        "framework": "paddle",
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
    names = ("numpy", "paddlenlp", "paddleocr", "ppocr", "ppdet", "paddle_custom_device")
    found = {name: getattr(sys.modules[name], "__version__", "?") for name in names if name in sys.modules}
    found |= {"python": platform.python_version(), "paddle": paddle.__version__, "trueup": VERSION}
    with suppress(Exception):  # a build without a commit
        found["paddle commit"] = paddle.version.commit
    return {k: str(v) for k, v in sorted(found.items())}


def _seeds() -> dict[str, int]:
    with suppress(Exception):  # private, and of no use to anything but the manifest
        return {"paddle": int(core.default_cpu_generator().initial_seed())}
    return {}


def switches() -> dict[str, str]:
    """Return the effective values of Paddle's numeric switches."""
    found: dict[str, Any] = {"default_dtype": paddle.get_default_dtype(), "device": paddle.get_device()}
    for name in FLAGS:
        with suppress(ValueError):  # this build has no such flag
            found |= paddle.get_flags(name)
    return {k: str(v) for k, v in found.items()}
