"""A single wrong element, wherever it is: a norm hides it, and it must not pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.foundation.model import Result
from verdict.captures import Recording, compared

RNG = np.random.default_rng(3)
X, W = (RNG.normal(size=(200, 300)).astype(np.float32) for _ in range(2))
ONE = (77, 41)
STATS, TENSOR = "stats digest", "stats digest tensor"


def changed(values: np.ndarray[Any, Any], by: float) -> np.ndarray[Any, Any]:
    found = values.copy()
    found[ONE] += np.float32(by)
    return found


def chain(parts: str, *, wrong: float = 0.0, noise: float = 0.0, op: str = "aten::linear") -> Recording:
    """A step of an operator whose rounding is granted much more than one element adds to the norm."""
    run = Recording(parts=parts)
    made = (X * W).astype(np.float32)
    if noise:
        made = (made * (1 + noise * np.random.default_rng(5).normal(size=made.shape))).astype(np.float32)
    made = changed(made, wrong) if wrong else made
    run.call(op, [X, W], [made], scope="a")
    run.call("aten::neg", [made], [-made], scope="a")
    return run


@pytest.mark.parametrize("parts", [STATS, TENSOR])
@pytest.mark.parametrize("op", ["aten::linear", "aten::_fused_thing", "aten::native_layer_norm"])
def test_an_element_among_equal_ones_is_found(tmp_path: Path, parts: str, op: str) -> None:
    result = compared(tmp_path, chain(parts, op=op), chain(parts, op=op, wrong=0.01))
    assert result.verdict == "deviates"
    assert (result.culprit.op, result.culprit.kind) == (op, "operator")
    assert result.culprit.rule.endswith(" in few elements")
    assert result.culprit.error_out < 1e-4  # a norm does not show it


@pytest.mark.parametrize("parts", [STATS, TENSOR])
def test_an_element_that_rounds_otherwise_is_rounding(tmp_path: Path, parts: str) -> None:
    value = float(np.spacing(np.abs(X * W).max()))
    result = compared(tmp_path, chain(parts), chain(parts, wrong=value))
    assert result.verdict == "aligned", result.sentence


def test_tensors_show_it_among_rounding(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(TENSOR), chain(TENSOR, noise=2e-8, wrong=0.5))
    assert result.verdict == "deviates"
    assert result.culprit.rule == "matmul in few elements"


def test_rounding_alone_is_rounding(tmp_path: Path) -> None:
    assert compared(tmp_path, chain(TENSOR), chain(TENSOR, noise=1e-7)).verdict == "aligned"


def test_statistics_say_what_they_do_not_show(tmp_path: Path) -> None:
    """Where all elements are rounded otherwise, a sketch does not tell one wrong element from it."""
    result = compared(tmp_path, chain(STATS), chain(STATS, noise=2e-8, wrong=1e-3))
    assert result.verdict == "aligned"
    assert "2 results were compared by statistics only" in result.notes[-1]
    assert "--detail tensor" in result.notes[-1]
    assert not compared(tmp_path, chain(STATS), chain(STATS)).notes
    assert not compared(tmp_path, chain(TENSOR), chain(TENSOR, noise=1e-7)).notes


# ---------------------------------------------------------------- outside of any module, in a training
def training(directory: Path, level: str, detail: str, fault: str = "") -> Path:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(0.1 * torch.randn(*size)) for size in ((32, 64), (64, 16)))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    batches = [(torch.randn(40, 32), torch.randn(40, 16)) for _ in range(2)]
    for step in range(2):
        if fault == f"data of step {step}":
            batches[step][0][1, 7] += 0.01
    with trueup.capture(directory, level=level, detail=detail):
        for step, (data, target) in enumerate(batches):
            optimizer.zero_grad()
            hidden = torch.tanh(data @ first)
            if fault == "activation" and step == 0:
                hidden.data[1, 7] += 0.01
            output = hidden @ second
            if fault == "result" and step == 0:
                more = torch.zeros_like(output)
                more[1, 7] = 0.01
                output = output + more
            (output - target).square().mean().backward()
            assert first.grad is not None
            if fault == "gradient" and step == 0:
                first.grad[1, 7] *= 1.01
            optimizer.step()
    return directory


@pytest.mark.parametrize(("level", "detail"), [("aten", "stats"), ("api", "tensor")])
def test_one_wrong_element_outside_of_modules(tmp_path: Path, level: str, detail: str) -> None:
    baseline = training(tmp_path / "baseline", level, detail)
    expected = {
        "data of step 0": ("input", 0), "data of step 1": ("input", 1), "activation": ("region", 0), "result": ("region", 0),
        "gradient": ("region", 0),
    }  # fmt: skip
    found: dict[str, tuple[str, int]] = {}
    for fault in expected:
        result: Result = trueup.compare(baseline, training(tmp_path / fault.replace(" ", "-"), level, detail, fault))
        assert result.verdict == "deviates", (fault, result.sentence)
        found[fault] = result.culprit.kind, result.culprit.step
    assert found == expected
