"""Compile the Triton kernel for a device that need not be here: ``compiled.py cuda:90 [few]``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from trueup.recording.adapters.torch import triton_kernel, triton_statistics

POINTERS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "i16", torch.float8_e4m3fn: "u8",
    torch.float8_e5m2: "u8", torch.bool: "u8", torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.uint16: "u16",
    torch.int32: "i32", torch.uint32: "u32", torch.int64: "i64", torch.uint64: "u64",
}  # fmt: skip
FEW = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
SUMS = {torch.float64: "fp64", torch.float32: "fp32"}
OPTIONS = {"enable_fp_fusion": False}
ALIGNED = {(k,): [["tt.divisibility", 16]] for k in (0, 1)}


def compiled(kernel: object, types: dict[str, str], constants: dict[str, object], target: GPUTarget) -> dict[str, object]:
    signature = types | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=ALIGNED)
    return triton.compile(source, target=target, options=OPTIONS).asm


def check_cuda(what: str, assembly: dict[str, object], bytes_of_four: int) -> None:
    """Four elements a load where 16 bytes hold them, and no spilled register."""
    widest = max(_bytes(load) for load in re.findall(r"ld\.global(\S*)", str(assembly["ptx"])))
    assert widest >= min(16, bytes_of_four), (what, widest)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if tool.exists():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            Path(cubin.name).write_bytes(assembly["cubin"])
            usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"STACK:(\d+)", usage)[-1] == "0", (what, usage)


def _bytes(load: str) -> int:
    vector = re.search(r"\.v(\d)", load)
    width = re.search(r"\.[bfus](\d+)", load)
    return (int(vector[1]) if vector else 1) * (int(width[1]) // 8 if width else 0)


def main(name: str, dtypes: Iterable[torch.dtype]) -> None:
    backend, architecture = name.split(":")
    target = GPUTarget(backend, int(architecture) if backend == "cuda" else architecture, 64 if backend == "hip" else 32)
    for accumulator, sums in SUMS.items():
        for dtype in dtypes:
            if triton_statistics.takes(dtype, accumulator):
                constants = triton_statistics._constants(dtype, accumulator) | {"HINTS": True}
                types = {"x": f"*{POINTERS[dtype]}", "out": f"*{sums}", "size": "i64", "programs": "i32", "turns": "i32"}
                assembly = compiled(triton_kernel.measure, types, constants, target)
                if backend == "cuda":
                    check_cuda(f"{dtype} in {sums}", assembly, 4 * dtype.itemsize)
        constants = {"ACCUMULATOR": triton_statistics._TYPES[accumulator], "PAIR": sums == "fp32"}
        compiled(triton_kernel.merge, {"partial": f"*{sums}", "out": f"*{sums}", "rows": "i32"}, constants, target)
    print(f"{name} passed")


if __name__ == "__main__":
    main(sys.argv[1], FEW if "few" in sys.argv else POINTERS)
