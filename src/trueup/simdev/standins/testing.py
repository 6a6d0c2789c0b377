"""``TestCase`` and ``run_tests`` as single-operator tests of the porting guide use them: ``assertEqual(cpu, npu, prec=1e-4)``."""

from __future__ import annotations

import unittest
from typing import Any

import torch


class TestCase(unittest.TestCase):
    """Compares tensors and arrays wherever they are."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None, *, prec: float | None = None, **limits: Any) -> None:
        """Fail unless values agree within ``prec``, absolute and relative; or ``atol`` and ``rtol``; or PyTorch's limits."""
        if not any(isinstance(one, torch.Tensor) or hasattr(one, "__array__") for one in (first, second)):
            super().assertEqual(first, second, msg)  # noqa: PT009 - this is that method
            return
        mine, other = (torch.as_tensor(one).detach().cpu() for one in (first, second))
        given = {"rtol": limits.get("rtol", prec), "atol": limits.get("atol", prec)}
        torch.testing.assert_close(mine, other, check_dtype=False, msg=msg, **given)

    assertRtolEqual = assertEqual


def run_tests() -> None:
    """Run the tests of the main module."""
    unittest.main()
