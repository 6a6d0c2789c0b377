from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from trueup.comparison.result.comparing import compare
from trueup.foundation.facts.arguments import equal_values

from .captures import Recording, changed, normal


def test_arguments_are_equal_by_value() -> None:
    assert equal_values({"a": [1, 2.0, "x"]}, {"a": [1, 2.0000000000000001, "x"]})
    assert equal_values(float("nan"), float("nan"))
    assert not equal_values({"eps": 1e-5}, {"eps": 1e-6})
    assert not equal_values({"a": 1}, {"b": 1})
    assert not equal_values([1], [1, 2])
    assert not equal_values(1.0, "one")


def momentum(into: Path, decay: float, gradient_off: float, *, reads: str | None = None) -> Path:
    """Record two steps in which a wrong product comes first and a buffer is multiplied by what the program chose in the second."""
    run, buffer = Recording(), normal(8, 8, seed=4)
    for step in (0, 1):
        x, g = normal(8, 8, seed=step), changed(normal(8, 8, seed=step + 7), gradient_off, seed=step)
        run.call("aten::mm", [x, normal(8, 8, seed=2)], [g], step=step)
        if reads is not None:
            run.call(reads, [g], [g[:4].copy()] if reads == "aten::index" else [], step=step)
        if step:
            run.call("aten::mul_", [buffer], [after := buffer * decay], step=step, phase="optimizer", arguments={"1": decay})
            buffer = after
        run.call("aten::add_", [buffer, g], [buffer := buffer + g], step=step, phase="optimizer")
    return run.write(into)


@pytest.mark.parametrize(
    ("reads", "named"),
    [(None, ["aten::mm", "aten::mul_"]), ("aten::index", ["aten::mm", "aten::mul_"]), ("aten::_local_scalar_dense", ["aten::mm"])],
)
def test_what_the_program_chose_is_named_in_later_steps(reads: str | None, named: list[str], tmp_path: Path) -> None:
    """However far off the buffer is; but a number that was read out of a tensor that differs may have made the argument."""
    sides = [momentum(tmp_path / name, decay, off, reads=reads) for name, decay, off in (("a", 0.9, 0.0), ("b", 0.5, 0.3))]
    assert [culprit.op for culprit in compare(*sides).culprits] == named


def test_another_switch_behind_rounding(tmp_path: Path) -> None:
    """Nothing that the pooling gets is equal, and its row grants more than the switch makes: 8 times what came in is no chance."""
    for name, counts, coarse in (("a", True, False), ("b", False, True), ("c", True, True)):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 8, 3, padding=1)
        with trueup.capture(tmp_path / name, model=layer) as capture, torch.autocast("cpu", torch.bfloat16, enabled=coarse):
            nn.functional.avg_pool2d(layer(torch.randn(4, 3, 16, 16)) + 1, 3, 2, 1, count_include_pad=counts).sum().backward()
            capture.step()
    result = trueup.compare(tmp_path / "a", tmp_path / "b", level=["module", "api"])
    assert "count_include_pad of torch.nn.functional.avg_pool2d: true in the baseline, false" in result.sentence.splitlines()[0]
    assert trueup.compare(tmp_path / "a", tmp_path / "c", level=["module", "api"]).verdict == "aligned"
