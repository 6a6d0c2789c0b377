"""One layer that computes otherwise than others that do the same, by no more than rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import trueup
from trueup.foundation.words.reasons import joined
from verdict.captures import Recording, compared, located, normal

UNIT = 2.0**-24


def layers(
    run: Recording, errors: Sequence[float], *, elements: int = 4096, dtype: type = np.float32, given: Sequence[float] = (1, 1, 1),
    inner: Sequence[str] = (), differing: float = 0.0, arguments: object = None, scope: str = "layer.{}",
) -> None:  # fmt: skip
    """Record a product a layer, each of its own data; ``elements`` of it are off by ``errors``, and ``given`` multiplies data."""
    for n, error in enumerate(errors):
        x = (given[n] * normal(64, 64, seed=n)).astype(dtype)
        weight = normal(64, 64, seed=10 + n).astype(dtype)
        made = (x.astype(np.float64) @ weight).astype(dtype)
        off = made.reshape(-1).copy()
        off[:elements] *= dtype(1 + error) * np.where(np.arange(elements) % 2, 1, 1 + 2 * error).astype(dtype)
        x = (x * dtype(1 + differing)).astype(dtype) if error else x
        about = {"scope": scope.format(n), "arguments": arguments if error else None}
        function = run.call("torch.matmul", [x, weight], [off.reshape(64, 64)], level="api", **about)
        for op in inner if error else ():
            run.call(op, [x, weight], [off.reshape(64, 64)], parent=function, scope=f"layer.{n}")


def found(errors: Sequence[float], **options: object) -> list[tuple[str, bool, str]]:
    runs = Recording(), Recording()
    layers(runs[0], [0.0] * len(errors), **{name: value for name, value in options.items() if name in ("dtype", "given", "scope")})  # type: ignore[arg-type]
    layers(runs[1], errors, **options)  # type: ignore[arg-type]
    return [(s.judged.call.candidate.scope, s.certain, joined(s.because)) for s in located(*runs).suspects]


SAID = "layer.0, which does the same, is bitwise equal"


def test_one_layer_of_three_that_differs_by_units_is_suspected() -> None:
    assert found([0, 2 * UNIT, 0]) == [("layer.1", False, SAID)]
    assert found([0, 2 * UNIT, 2 * UNIT]) == [("layer.1", False, SAID), ("layer.2", False, SAID)]


def test_another_layer_of_the_same_block_is_no_sibling() -> None:
    """Who writes ``block.norm1`` by hand in all blocks need not write ``block.norm2``, nor who writes the second layer of a
    numbered sequence the first."""
    assert found([0, 2 * UNIT, 0], scope="block.norm{}") == []
    assert found([0, 2 * UNIT, 0], scope="blocks.0.body.{}") == []
    assert [name for name, _, _ in found([0, 2 * UNIT, 0], scope="blocks.{}.body.3")] == ["blocks.1.body.3"]
    assert [name for name, _, _ in found([0, 2 * UNIT, 0], scope="blocks.{}.norm1")] == ["blocks.1.norm1"]


def test_runs_that_round_otherwise_everywhere_are_not() -> None:
    assert found([2 * UNIT, 2 * UNIT, 2 * UNIT]) == []


@pytest.mark.parametrize("options", [
    {"elements": 16},  # by chance none of them is another one in the other layers
    {"given": (0, 1, 0)},  # of zeros nothing is rounded
    {"differing": 1e-6},
    {"inner": ["aten::mm"]},  # an operator of this run alone: what it makes is judged by itself
    {"arguments": {"out": 1}},
], ids=["few", "zeros", "inputs", "inner", "arguments"])  # fmt: skip
def test_what_else_may_be_the_reason_suspects_nobody(options: dict[str, object]) -> None:
    assert [name for name, _, because in found([0, 2 * UNIT, 0], **options) if SAID in because] == []


@pytest.mark.parametrize(("switch", "verdict"), [
    ({"num_threads": "2"}, "aligned"), ({"cpu_capability": "AVX2"}, "aligned"),
    ({"CUDA_VISIBLE_DEVICES": "1"}, "inconclusive"), ({}, "inconclusive"),
])  # fmt: skip
def test_runs_that_may_have_other_kernels_round_otherwise_anywhere(tmp_path: Path, switch: dict[str, str], verdict: str) -> None:
    """Which kernel computes a product is chosen by threads and by what the processor has, and by each tensor's place in memory."""
    runs, said = (Recording(), Recording()), {"num_threads": "1", "cpu_capability": "AVX512", "CUDA_VISIBLE_DEVICES": "0"}
    layers(runs[0], [0, 0, 0])
    layers(runs[1], [0, 2 * UNIT, 0])
    paths = [
        run.write(tmp_path / name, environment=said | changed)
        for run, name, changed in zip(runs, ("baseline", "candidate"), ({}, switch), strict=True)
    ]
    assert trueup.compare(*paths).verdict == verdict


def test_the_verdict_is_open_and_names_the_place(tmp_path: Path) -> None:
    runs = Recording(), Recording()
    layers(runs[0], [0, 0, 0])
    layers(runs[1], [0, 2 * UNIT, 0])
    result = compared(tmp_path, *runs)
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert result.notes[0].startswith("layer.1, forward, step 0, rank 0 (torch.matmul) is off by 0.")
    assert result.notes[0].endswith(f"; {SAID}")
    assert "look at what it computes in both runs" in result.sentence
