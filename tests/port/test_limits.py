"""Limits of the platform, each row with a run that breaks it and one that does not; packages with code for CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trueup.foundation.model import UsageError
from trueup.migration.assess.assessing import extensions, linked, packages
from trueup.migration.assess.support import Row, broken, check_version, limits
from trueup.simdev.shapes import _kind

PLAIN: dict[str, Any] = {
    "operator": "aten::mm", "kind": "kernel", "phase": "forward", "function": "torch.mm", "dtypes": ["float16"],
    "site": ("train.py", 3, "step"), "calls": 1, "flops": 0, "shapes": [(0, "(2, 3) (3, 4)")], "why": None, "decomposes": False,
}  # fmt: skip
SENT = {"operator": "c10d::allreduce_", "dtypes": ["float32"], "groups": [8]}
BREAKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "group-size": ("5.0", SENT | {"groups": [3]}, SENT),
    "collective-dtype": ("5.0", SENT | {"dtypes": ["int64"]}, SENT),
    "fixed-shapes": ("5.0", {"shapes": [(0, "(2, 3)"), (1, "(1, 3)")]}, {"shapes": [(0, "(2, 3)"), (1, "(2, 3)")]}),
    "cube-float16": ("5.0", {"dtypes": ["float32"]}, {"operator": "aten::add.Tensor", "dtypes": ["float32"]}),
    "dimensions": ("newest", {"shapes": [(0, "(1, 1, 1, 1, 1, 1, 1, 1, 2)")]}, {"shapes": [(0, "(1, 1) (1, 1, 1, 1, 1, 1, 1)")]}),
    "matrix-dtype": ("newest", {"dtypes": ["float64"]}, {"dtypes": ["float32"]}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_limit_is_broken_by_what_breaks_it(name: str) -> None:
    version, bad, good = BREAKS[name]
    assert name in {one.id for one in broken([Row(**PLAIN | bad)], [], version)}
    assert name not in {one.id for one in broken([Row(**PLAIN | good)], [], version)}


def test_each_limit_has_a_case_and_a_version() -> None:
    assert {one.id for one in limits()} - {"apex-kernels"} == set(BREAKS)
    assert [one.says for one in broken([], ["amp_C"], "5.0")] == [
        "amp_C is a kernel of apex for CUDA; mixed precision and fused optimizers alone are there"
    ]
    rows = [Row(**PLAIN | bad) for _, bad, _ in BREAKS.values()]
    assert {one.id for one in broken(rows, ["amp_C"])} == {"apex-kernels", "dimensions", "matrix-dtype"}
    assert "dimensions" not in {one.id for one in broken([Row(**PLAIN | BREAKS["dimensions"][1])], [], "5.0")}


@pytest.mark.parametrize(
    ("version", "sure"),
    [("5.0", True), ("5.1", True), ("5.2", False), ("6.9", False), ("7.0", None), ("8.3", None), ("newest", None)],
)
def test_a_limit_has_two_ends(version: str, sure: bool | None) -> None:
    """Of groups the last document with the limit is of CANN 5.1, the first without it of 7.0: between those nobody knows."""
    found = [one for one in broken([Row(**PLAIN | SENT | {"groups": [3]})], [], version) if one.id == "group-size"]
    assert [one.sure for one in found] == ([] if sure is None else [sure])
    assert all(("nobody says" in one.says) is not one.sure and "not in CANN 7.0 (" in one.source for one in found)
    (dimensions,) = (one for one in limits() if one.id == "dimensions")
    assert (dimensions.holds("6.3"), dimensions.holds("7.0"), dimensions.holds("newest")) == (False, True, True)
    assert dimensions.known.endswith("no source says that it ended")


def test_what_is_no_version_of_cann_is_refused() -> None:
    for version in ("newest", "5", "5.1", "8.0.RC1"):
        check_version(version)
    for version in ("", "latest", "-1", "5."):
        with pytest.raises(UsageError, match="There is no CANN"):
            check_version(version)


def test_packages_that_link_cuda(tmp_path: Path) -> None:
    for name, content in {"ops": b"\x7fELF libcudart.so.12", "plain": b"\x7fELF libc.so.6"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "_C.so").write_bytes(content)
    assert linked(str(tmp_path / "ops")) == ("ops/_C.so",)
    places = {name: str(tmp_path / name) for name in ("ops", "plain")}
    found = [(one.name, one.calls, bool(one.cuda)) for one in packages(places, {"plain": 3}, {})]
    assert found == [("plain", 3, False), ("ops", 0, True)]


def test_kernels_beside_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from torch.utils.cpp_extension import load as build\nimport json\nroi = build('roi')\njson.load(0)\n")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "roi.cu").write_text("template <typename T>\n__global__ void roi_forward(T* x) {}\nvoid host(int x) {}\n")
    (tmp_path / "csrc" / "host.cuh").write_text("inline int host();")
    found = extensions([script])
    assert [(Path(one.place).name, one.kernels) for one in found] == [("roi.cu", ("roi_forward",)), ("train.py:3", ())]


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::digamma", "kernel"), ("aten::_linalg_eigh", "kernel"), ("aten::lerp.Scalar", "kernel"),
        ("aten::huber_loss", "kernel"), ("aten::pixel_shuffle", "composite"), ("aten::nan_to_num", "composite"),
        ("aten::linear", "composite"), ("mine::op", "custom"),
    ],
)  # fmt: skip
def test_what_pytorch_makes_of_others(operator: str, kind: str) -> None:
    """A function that calls its own form with ``out=`` has a kernel for each device: nothing else computes it."""
    assert _kind(operator) == kind
