"""Policies under DDP, FSDP 1 and 2: parameters that are shared, gathered and reduced as without them, or one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from nursery import Nursery

from .running import run, said


def test_policies_on_parallel_training(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "policies")
    for rank in (0, 1):
        told = said(tmp_path, "policies", rank)
        for name in ("functions", "modules", "backward"):
            for wrap in ("_ddp", "_fsdp", "_fsdp1"):
                changed, norms = told[f"{name} {wrap}"]
                assert changed > 0
                expected = told[f"none {wrap}"][1]
                assert norms == pytest.approx(expected, rel=1e-3, abs=1e-6)
                assert norms != expected
        assert told["root _ddp"][0] > 0
        assert "modules inside whose parameters FSDP gathers one by one" in told["root _fsdp"]
        assert "name those modules, or functions" in told["root _fsdp"]
