"""Gradients that are finite and in trouble: underflow, explosion, vanishing; healthy ones say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.foundation.facts.anomaly import OverflowResult
from verdict.captures import Array, Recording, normal


def judged(path: Path, *steps: tuple[Array, Array], **manifest: Any) -> OverflowResult:
    recording = Recording()
    for step, gradients in enumerate(steps):
        for name, gradient in zip("ab", gradients, strict=True):
            recording.call("torch.nn.functional.linear", {"grad_output.0": normal(8, 8)}, {"grad_input.0": gradient},
                           level="api", phase="backward", scope=name, step=step)  # fmt: skip
    return trueup.overflow(recording.write(path, **manifest))


def test_healthy(tmp_path: Path) -> None:
    steps = [(normal(8, 32, seed=k) * scale, normal(8, 32, seed=k) * 1e-5) for k, scale in enumerate((1, 50, 900))]
    assert judged(tmp_path / "run", *steps).verdict == "clean"


def test_half_precision_underflows_without_a_loss_scale(tmp_path: Path) -> None:
    small = (normal(8, 32) * 1e-5).astype(np.float16)
    result = judged(tmp_path / "run", (small, small))
    (one,) = result.anomalies
    assert (one.kind, one.place.scope, result.exit_code) == ("underflow", "a", 1)
    assert "of the elements of this step's float16 gradients that are not zero are subnormal" in one.sentence
    assert judged(tmp_path / "one", (small, normal(64, 64).astype(np.float16))).verdict == "clean"
    assert judged(tmp_path / "scaled", (small * 1024, small * 1024)).verdict == "clean"


@pytest.mark.parametrize(("kind", "steps"), [
    ("explodes", [(normal(8, 8), normal(8, 8)), (normal(8, 8), normal(8, 8) * 1e6)]),
    ("vanishes", [(normal(8, 8), normal(8, 8) * 1e-14)]),
])  # fmt: skip
def test_by_layer(kind: str, steps: list[tuple[Array, Array]], tmp_path: Path) -> None:
    (one,) = judged(tmp_path / "run", *[(a.astype(np.float32), b.astype(np.float32)) for a, b in steps]).anomalies
    assert (one.kind, one.place.scope, one.place.step) == (kind, "b", len(steps) - 1)


@pytest.mark.parametrize(("optimizers", "said"), [
    ([{"class": "AdamW", "clipping": "norm at 1"}], "gradients are clipped (norm at 1), so the step stays small"),
    ([{"class": "AdamW"}], "no clipping was recorded: clip them"),
    ([], "whether gradients are clipped was not recorded: clip them"),
])  # fmt: skip
def test_what_explodes_says_whether_it_is_clipped(optimizers: list[dict[str, str]], said: str, tmp_path: Path) -> None:
    steps = (normal(8, 8), normal(8, 8)), (normal(8, 8), normal(8, 8) * 1e6)
    (one,) = judged(tmp_path / "run", *steps, settings={"optimizers": optimizers}).anomalies
    assert one.because.startswith(said)
