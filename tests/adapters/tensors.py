"""Tensors of every dtype and layout, and those that a statistics kernel gets wrong first."""

from __future__ import annotations

from collections.abc import Callable

import torch

NAN, INF = float("nan"), float("inf")


def _bytes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def _halves(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a sixteen-bit float."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(37, 53),
    "float16": lambda: torch.randn(600).half() * 1e-4,
    "bfloat16": lambda: torch.randn(3, 700).bfloat16(),
    "float64": lambda: torch.randn(70000, dtype=torch.float64),
    "int64": lambda: torch.randint(-9, 9, (11, 13)),
    "int8": lambda: torch.arange(-128, 128).to(torch.int8),
    "int16": lambda: torch.arange(-700, 900).to(torch.int16),
    "int32": lambda: torch.randint(-(2**31), 2**31 - 1, (999,), dtype=torch.int32),
    "uint8": lambda: torch.arange(200, dtype=torch.uint8),
    "uint16": lambda: torch.arange(64000, 65536, dtype=torch.int32).to(torch.uint16),
    "uint32": lambda: torch.arange(2**32 - 600, 2**32).to(torch.uint32),
    "uint64": lambda: torch.arange(9).to(torch.uint64),
    "bool": lambda: torch.rand(100) > 0.5,
    "complex64": lambda: torch.randn(9, 9, dtype=torch.complex64),
    "complex128": lambda: torch.randn(700, dtype=torch.complex128),
    "float8": lambda: torch.randn(100).to(torch.float8_e4m3fn),
    "every float8_e4m3fn": lambda: _bytes(torch.float8_e4m3fn),
    "every float8_e5m2": lambda: _bytes(torch.float8_e5m2),
    "every float8_e4m3fnuz": lambda: _bytes(torch.float8_e4m3fnuz),
    "every float16": lambda: _halves(torch.float16),
    "every bfloat16": lambda: _halves(torch.bfloat16),
    "empty": lambda: torch.empty(0, 3),
    "empty int": lambda: torch.empty(0, dtype=torch.int32),
    "0-d": lambda: torch.tensor(-2.5),
    "nan and inf": lambda: torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-42, 3.4028235e38, 7.0]),
    "only nan": lambda: torch.full((5,), NAN),
    "attention mask": lambda: torch.full((40, 40), torch.finfo(torch.float32).min).triu(1),
    "mask of bfloat16, cast": lambda: torch.randn(40, 40) + torch.full((40, 40), torch.finfo(torch.bfloat16).min).triu(1),
    "only masks": lambda: torch.full((5,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
    "saturated half": lambda: torch.tensor([65504.0, -65504.0, 6e-8]).half(),
    "huge float32": lambda: torch.randn(3000) * 1e30,
    "huge float64": lambda: torch.randn(3000, dtype=torch.float64) * 1e306,
    "tiny float64": lambda: torch.randn(3000, dtype=torch.float64) * 1e-300,
    "huge and tiny float64": lambda: torch.tensor([1e300, 1.0, 1e-300], dtype=torch.float64),
    "not contiguous": lambda: torch.randn(20, 30).t()[3:, ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(7, 1).expand(7, 90),
    "conjugate": lambda: torch.randn(8, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(8, dtype=torch.complex64).conj().imag,
}
