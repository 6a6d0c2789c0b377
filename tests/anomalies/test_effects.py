"""Whether an overflow matters, told by executing calls again: right, on trainings in which it was planted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trueup
from anomalies import planted
from trueup import simdev
from trueup.foundation.facts.anomaly import OverflowResult


def recorded(path: Path, case: str, *levels: str, detail: str = "tensor", fault: str | None = None) -> Path:
    torch.manual_seed(0)
    train = getattr(planted, case)
    with trueup.capture(path, level=levels, detail=detail, on_error="stop"):
        if fault is None:
            train()
        else:
            with simdev.inject(fault):
                train()
    return path


LEVELS = (("api",), ("aten",), ("api", "aten"))
CASES = {
    # case: fault of the device, word before, word after, what is said
    "clamped": (None, "harmless", "harmless", "in their place float64 gives up to"),
    "half_norm": (None, "harmless", "accuracy-relevant", "and with that the loss is 0.3"),
    "half_norm_evaluated": (None, "harmless", "unknown", "gives clean numbers, and wrong ones: in their place"),
    "saturating": ("products-saturate-65504", "unknown", "accuracy-relevant", "in their place float64 gives up to"),
    "saturating_and_clamped": ("products-saturate-65504", "unknown", "harmless", "in their place float64 gives up to"),
    "logarithm_of_zero_masked": (None, "harmless", "harmless", "float64 gives the same from the same inputs"),
}


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
@pytest.mark.parametrize("case", CASES)
def test_whether_it_matters(case: str, levels: tuple[str, ...], tmp_path: Path) -> None:
    fault, before, after, said = CASES[case]
    path = recorded(tmp_path / "run", case, *levels, fault=fault)
    first, again = trueup.overflow(path).first, trueup.overflow(path, replay=True)
    assert first is not None
    assert again.first is not None
    assert (first.matters, first.run_next) == (before, f"trueup overflow {path} --replay"), first.because
    assert (again.first.matters, again.first.run_next) == (after, ""), again.first.because
    assert said in again.first.because
    assert again.exit_code == (0 if after == "harmless" else 1)


def test_who_heals_and_how_many_calls_were_executed_is_said(tmp_path: Path) -> None:
    result = trueup.overflow(recorded(tmp_path / "run", "clamped", "aten"), replay=True)
    assert result.first is not None
    calls = "1/aten::clamp, 1/aten::ge, 1/aten::le"
    assert f"with that {calls} give the same, but for rounding (4 calls executed again)" in result.first.because


def test_what_the_formula_gives_needs_no_wider_dtype(tmp_path: Path) -> None:
    result = trueup.overflow(recorded(tmp_path / "run", "logarithm_of_zero_masked", "api"), replay=True)
    assert result.first is not None
    assert "a wider dtype does not change it" in result.first.because
    assert result.first.policy == ""


def test_without_elements_it_is_said_how_to_record_them(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", "half_norm", "api", detail="stats")
    plain, again = trueup.overflow(path), trueup.overflow(path, replay=True)
    assert plain.first is not None
    record = f"trueup capture --detail tensor --steps 0:2 --stop -o {path}-tensors -- COMMAND"
    assert plain.first.run_next == f"{record}; trueup overflow {path}-tensors --replay"
    assert again.first is not None
    assert again.first.matters == "harmless"
    assert "whether those are right could not be told: its call could not be executed again: input.0 was kept by its" in (
        again.first.because
    )


def test_modules_alone_cannot_be_executed(tmp_path: Path) -> None:
    result = trueup.overflow(recorded(tmp_path / "run", "half_norm_evaluated", "module"), replay=True)
    assert all("a module is code" in one.because for one in result.anomalies if one.place.level == "module")


def against(tmp_path: Path, case: str, include: str | None = None) -> OverflowResult:
    """Judge a run on a saturating device against one of the healthy device, perhaps of one call alone."""
    paths = []
    for name, fault in (("base", None), ("cand", "products-saturate-65504")):
        torch.manual_seed(0)
        with trueup.capture(tmp_path / name, level="api", include=include, on_error="stop"):
            if fault is None:
                getattr(planted, case)()
            else:
                with simdev.inject(fault):
                    getattr(planted, case)()
        paths.append(tmp_path / name)
    return trueup.overflow(paths[1], against=paths[0])


@pytest.mark.parametrize("include", [None, "torch.nn.functional.linear"], ids=["whole", "this call alone"])
def test_a_baseline_that_gives_other_numbers_tells(include: str | None, tmp_path: Path) -> None:
    result = against(tmp_path, "saturating", include)
    assert result.first is not None
    assert result.first.kind == "saturated"
    assert result.first.matters == "accuracy-relevant"
    assert "the baseline's call gives different numbers from the same inputs" in result.first.because


def test_a_baseline_that_gives_the_same_tells(tmp_path: Path) -> None:
    path = recorded(tmp_path / "one", "half_norm_evaluated", "api", detail="stats")
    same = recorded(tmp_path / "two", "half_norm_evaluated", "api", detail="stats")
    result = trueup.overflow(path, against=same)
    assert result.first is not None
    assert result.first.because == "the baseline's call gives the same: this run loses nothing against it"
    assert result.exit_code == 0
