"""Cosines of calls: those of a float64 oracle where bytes were kept, near it from sketches, and none where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cli.written import capture
from trueup.comparison.result.comparing import compare
from trueup.comparison.result.cosines import Cosines

RNG = np.random.default_rng(3)
BASE = RNG.standard_normal((40, 50)).astype(np.float32)
NOISE = RNG.standard_normal((40, 50)).astype(np.float32)
WITH_NAN = BASE.copy()
WITH_NAN[3, 3] = np.nan
CASES = {
    "equal/op": (BASE, BASE), "near/op": (BASE, BASE + np.float32(0.01) * NOISE), "far/op": (BASE, BASE + np.float32(0.5) * NOISE),
    "turned/op": (BASE, -BASE), "scaled/op": (BASE, 2 * BASE), "other/op": (BASE, NOISE), "zeros/op": (0 * BASE, 0 * BASE),
    "lost/op": (BASE, 0 * BASE), "nan/op": (BASE, WITH_NAN),
}  # fmt: skip


def cosines(folder: Path, detail: str) -> Cosines:
    sides = [
        capture(folder / f"{name}-{detail}", {call: {"output.0": pair[side]} for call, pair in CASES.items()}, detail)
        for side, name in enumerate(("base", "cand"))
    ]
    found = Cosines()
    compare(*sides, see=found.see)
    return found


def by_scope(found: Cosines, limit: float) -> dict[str, float]:
    return {call.key.scope: call.slots[0].cosine for call in found.below(limit, 99).calls}


def oracle(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_of_tensors(tmp_path: Path) -> None:
    found = cosines(tmp_path, "tensor")
    low = by_scope(found, 0.98)
    assert list(low) == ["far", "turned", "other", "lost", "nan"]  # in order of execution
    for name in ("far", "turned", "other"):
        assert low[name] == pytest.approx(oracle(*CASES[f"{name}/op"]), abs=1e-12)
    assert np.isnan([low["lost"], low["nan"]]).all()
    reasons = {call.key.scope: call.slots[0].reason for call in found.below(0.98, 99).calls}
    assert (reasons["lost"], reasons["nan"]) == ("zero on one side only", "NaN or Inf in different places")
    all_ = by_scope(found, 1.0)
    assert all_["near"] == pytest.approx(oracle(*CASES["near/op"]), abs=1e-12)
    assert all_["scaled"] == pytest.approx(1.0)
    assert not found.below(1.0, 99).estimated
    listing = found.below(0.98, 2)
    assert (len(listing.calls), listing.total, listing.compared, listing.unknown, listing.exit_code) == (2, 5, 9, 0, 1)
    far = found.below(0.98, 1).calls[0].slots[0]
    assert far.max_absolute == np.abs(CASES["far/op"][0].astype(np.float64) - CASES["far/op"][1]).max()


def test_of_statistics(tmp_path: Path) -> None:
    found = cosines(tmp_path, "stats")
    low = by_scope(found, 0.98)
    assert list(low) == ["far", "turned", "other", "lost", "nan"]
    exact = oracle(*CASES["far/op"])
    assert 1 - low["far"] == pytest.approx(1 - exact, rel=0.6)
    assert low["turned"] < -0.5
    assert abs(low["other"]) < 0.5
    assert by_scope(found, 1.0)["near"] > 0.9998
    assert found.below(0.98, 9).estimated
    assert found.below(0.98, 9).calls[0].slots[0].is_estimate


def test_what_only_a_digest_tells_is_not_known(tmp_path: Path) -> None:
    listing = cosines(tmp_path, "digest").below(0.98, 9)
    assert (listing.total, listing.compared, listing.unknown, listing.exit_code) == (0, 2, 7, 2)
    assert "digests differ" in listing.why_unknown
