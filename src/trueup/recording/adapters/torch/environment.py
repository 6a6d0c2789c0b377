"""What a run was made of, as read inside the run: versions, devices, ranks, seeds and every switch that moves numerics."""

from __future__ import annotations

from typing import Any

import torch

from trueup.recording.adapters.torch.device_statistics import descriptions
from trueup.recording.engine import environment as shared

_joined: tuple[int, int] | None = None
_groups: list[list[int]] = []
MOST_GROUPS = 256
"""Groups of ranks that are recorded."""


def rank_and_world() -> tuple[int | None, int]:
    """Return this process's rank (None when nothing says so) and the world size. A process group says it best, and what it said
    holds after it was destroyed: scripts do that before they end."""
    global _joined, _groups
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _joined = torch.distributed.get_rank(), torch.distributed.get_world_size()
        known = torch.distributed.distributed_c10d._world.pg_group_ranks
        _groups = sorted([*map(list, {tuple(sorted(ranks)) for ranks in list(known.values())[:MOST_GROUPS]})])
    return _joined or shared.rank_and_world()


def describe_run(devices: list[str]) -> dict[str, Any]:
    """Describe this process for its rank's manifest."""
    measured = {f"statistics.{device}": how for device, how in descriptions().items()}
    rank = rank_and_world()
    return {"parallel": {"groups": _groups}} | shared.described(
        "torch", torch.__version__, devices, rank, seeds=seeds(),
        libraries=(
            "numpy", "transformers", "accelerate", "deepspeed", "torch_npu", "apex", "lightning", "pytorch_lightning", "triton",
        ),
        switches={**switches(), **measured},
    )  # fmt: skip


def seeds() -> dict[str, int]:
    """Return the seed that PyTorch's generator has now."""
    return {"torch": torch.initial_seed()}


def switches() -> dict[str, str]:
    """Return the effective values of PyTorch's numeric switches."""
    found: dict[str, Any] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(), "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(), "num_threads": torch.get_num_threads(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark, "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32, "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "mkldnn.enabled": torch.backends.mkldnn.enabled, "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    npu = getattr(torch, "npu", None)
    for part in ("matmul", "conv"):
        flag = getattr(getattr(npu, part, None), "allow_hf32", None)
        if flag is not None:
            found[f"npu.{part}.allow_hf32"] = flag
    return {k: str(v) for k, v in found.items()}


def schemas(op: str) -> list[list[str]]:
    """Return what each overload of an operator or a method (``torch.Tensor.mul_``) calls its arguments by position: of those that
    take a tensor first, where some do."""
    if not op.startswith(("torch.", "aten::")):
        return []
    found = torch._C._jit_get_schemas_for_operator(f"aten::{op.rpartition('.')[2].removeprefix('aten::')}")
    takes = [str(schema.arguments[0].type) == "Tensor" for schema in found if schema.arguments]
    of_tensors = [schema for schema, first in zip(found, takes, strict=False) if first or not any(takes)]
    return [[one.name for one in schema.arguments if not one.kwarg_only] for schema in of_tensors]
