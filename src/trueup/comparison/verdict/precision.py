"""How float32 products are rounded, as the runs declare it: TF32 and HF32 are choices, not faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trueup.comparison.verdict.criteria import TF32


@dataclass(frozen=True, slots=True)
class Precision:
    """How float32 matrix products are computed, as the two runs declare it."""

    matmul: float = 0.0
    convolution: float = 0.0


def precision_of(environments: Iterable[dict[str, str]], devices: Iterable[Iterable[str]]) -> Precision:
    """Read from two runs whether float32 products are rounded to TF32 or HF32 on their devices."""
    matmul = convolution = 0.0
    for environment, names in zip(environments, devices, strict=True):
        kinds = {name.partition(":")[0] for name in names}
        low = environment.get("float32_matmul_precision", "highest") != "highest"
        if "cuda" in kinds and (low or environment.get("cuda.matmul.allow_tf32") == "True"):
            matmul = TF32
        if "cuda" in kinds and environment.get("cudnn.allow_tf32") == "True":
            convolution = TF32
        for kind in kinds - {"cuda", "cpu"}:
            matmul = TF32 if environment.get(f"{kind}.matmul.allow_hf32") == "True" else matmul
            convolution = TF32 if environment.get(f"{kind}.conv.allow_hf32") == "True" else convolution
    return Precision(matmul, convolution)
