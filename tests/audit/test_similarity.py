"""Which calls one run has and the other lacks, and how alike the graphs are."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trueup
from audit.trained import train
from trueup.analysis.audit import similarity
from trueup.analysis.audit.checking import dice
from verdict.captures import Recording, normal


def test_a_layer_more_and_a_norm_less(tmp_path: Path) -> None:
    base = train(tmp_path / "base", amp=False, level="api", steps=1)
    cand = train(tmp_path / "cand", amp=False, level="api", steps=1, extra=nn.Tanh())
    found = similarity(base, cand)
    assert found.missing == ()
    assert {(one.op, one.scope, one.phase, one.baseline, one.candidate) for one in found.extra} == {
        ("torch.tanh", "extra", "forward", 0, 1), ("torch.tanh", "extra", "backward", 0, 1),
    }  # fmt: skip
    total = found.baseline + found.candidate
    assert found.calls == pytest.approx(2 * found.baseline / total)
    assert found.edges < 1
    assert "has 2 that the baseline has not: 1 x torch.tanh in extra (forward) extra" in found.sentence
    again = similarity(base, base)
    assert (again.calls, again.edges, again.same) == (1.0, 1.0, True)
    assert again.sentence == f"the graphs are alike: the same {found.baseline:,} calls in both"


def test_the_same_calls_wired_otherwise(tmp_path: Path) -> None:
    paths = []
    for name in ("base", "cand"):
        recording = Recording()
        x = normal(4)
        y, z = x + 1, x * 2
        recording.call("aten::add", [x], [y], scope="a")
        recording.call("aten::mul", [x], [z], scope="b")
        recording.call("aten::exp", [y if name == "base" else z], [np.exp(y)], scope="c")
        paths.append(recording.write(tmp_path / name))
    found = similarity(*paths)
    assert (found.calls, found.edges, found.same) == (1.0, 0.0, False)
    assert found.sentence == "both runs make the same 3 calls, but hand their results on differently: 0 % of that is alike"


def test_captures_without_producers_have_no_edges(tmp_path: Path) -> None:
    recording = Recording()
    recording.call("aten::add", [normal(4)], [normal(4)])
    path = recording.write(tmp_path / "run")
    found = similarity(path, path)
    assert math.isnan(found.edges)
    assert found.same


def test_other_frameworks_are_refused(tmp_path: Path) -> None:
    paths = []
    for framework in ("torch", "paddle"):
        recording = Recording(framework=framework)
        recording.call("paddle.add", [normal(4)], [normal(4)], level="api")
        paths.append(recording.write(tmp_path / framework))
    with pytest.raises(trueup.TrueupError, match="The graphs of torch and paddle cannot be counted against each other"):
        similarity(*paths)
    (note,) = trueup.check(paths[1], against=paths[0]).notes
    assert note.startswith("the graphs were not compared: The graphs of torch and paddle")


@given(st.text("abc"), st.text("abc"))
def test_the_coefficient(first: str, second: str) -> None:
    a, b = Counter(first), Counter(second)
    value = dice(a, b)
    assert value == dice(b, a)
    assert 0 <= value <= 1
    assert (value == 1) == (a == b)
