"""Elements drawn to match recorded numbers."""

from __future__ import annotations

import numpy as np
import pytest

from trueup.foundation.kernels import summarize
from trueup.foundation.model import NUMBERS, PACKED
from trueup.recording.execution.recorded import RecordedTensor, draw


def recorded(values: np.ndarray) -> RecordedTensor:
    packed = np.empty(PACKED)
    summarize(values, packed)
    numbers = dict(zip(NUMBERS, packed.tolist(), strict=False))
    return RecordedTensor("input.0", values.dtype.name, values.shape, None, "cpu", numbers, None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int8", "bool"])
def test_counts_and_bounds_are_met(dtype: str) -> None:
    values = (np.random.default_rng(3).normal(size=(40, 30)) * 5).astype(dtype)
    values[:4] = 0
    tensor = recorded(values)
    again = recorded(draw(tensor))
    assert again.shape == tensor.shape
    for name in ("min", "max", "n_zero"):
        assert again.numbers[name] == tensor.numbers[name], name


def test_mean_and_norm_are_close_and_the_same_each_time() -> None:
    values = np.random.default_rng(3).normal(2.0, 3.0, size=5000).astype(np.float32)
    values[:10], values[10:13] = np.nan, np.inf
    drawn = draw(recorded(values))
    finite = np.isfinite(values)
    assert np.isnan(drawn).sum() == 10
    assert np.isposinf(drawn).sum() == 3
    assert drawn[np.isfinite(drawn)].mean() == pytest.approx(values[finite].mean(), rel=0.1)
    assert np.linalg.norm(drawn[np.isfinite(drawn)]) == pytest.approx(np.linalg.norm(values[finite]), rel=0.1)
    assert drawn.tobytes() == draw(recorded(values)).tobytes()


def test_a_size_that_no_file_bears_out_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="at most"):
        draw(RecordedTensor("input.0", "float32", (1 << 40,), None, "cpu", dict.fromkeys(NUMBERS, 0.0), None))
