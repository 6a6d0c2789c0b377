"""In which dtypes products ran, and whether a sentence says the truth about mixed precision."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from audit.trained import line, train
from trueup.analysis.audit import census, difference
from trueup.analysis.audit.reading import WHAT
from verdict.captures import Recording, normal

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("level", ["api", "aten"])
def test_a_real_training_under_autocast(level: str, tmp_path: Path) -> None:
    on, off = (census(train(tmp_path / str(amp), amp=amp, level=("module", level))) for amp in (True, False))
    assert on.level == off.level == level
    assert set(on.counts()) == {"bfloat16", "float32"}
    assert set(off.counts()) == {"float32"}
    assert off.sentence == f"mixed precision is off: all {sum(off.counts().values())} {WHAT} run in float32"
    assert on.sentence.startswith("mixed precision is on: ")
    head = "torch.nn.functional.linear" if level == "api" else "aten::addmm"
    assert f"head {head} ({line('return self.head')})" in on.sentence
    assert on.counts("forward")["float32"] == (2 if level == "api" else 6)  # autocast leaves the attention's bmm in float32
    wide = {"head"} if level == "api" else {"head", "layer.self_attn"}
    assert {one.scope for one in on.products if one.dtype == "float32"} == wide
    assert on.weights == ("float32",)
    told = difference(off, on)
    assert told.differs
    assert ("mixer", "forward") in {(here.scope, here.phase) for _, here in told.other}
    assert all((before.dtype, after.dtype) == ("float32", "bfloat16") for before, after in told.other)
    assert not difference(on, on).differs


def test_modules_alone_tell_too(tmp_path: Path) -> None:
    found = census(train(tmp_path / "run", amp=True, level="module"))
    assert found.level == "module"
    assert {(one.scope, one.dtype) for one in found.products} >= {("mixer", "bfloat16"), ("conv", "bfloat16"), ("head", "float32")}


def test_a_recurrent_layer_counts_by_its_result(tmp_path: Path) -> None:
    recording = Recording()
    recording.call("LSTM", [normal(4, 4)], [normal(4, 4).astype(BF16)], level="module", scope="lstm")
    assert census(recording.write(tmp_path / "run")).counts() == {"bfloat16": 1}


def matmul(recording: Recording, dtype: object, times: int = 1, scope: str = "block", op: str = "aten::mm") -> None:
    for _ in range(times):
        recording.call(op, [normal(4, 4).astype(dtype), normal(4, 4).astype(dtype)], [normal(4, 4).astype(dtype)], scope=scope)  # type: ignore[call-overload]


def said(recording: Recording, path: Path, **manifest: object) -> str:
    return census(recording.write(path, **manifest)).sentence


def test_sentences(tmp_path: Path) -> None:
    number = (tmp_path / str(n) for n in itertools.count())
    recording = Recording()
    matmul(recording, np.float32, 3)
    matmul(recording, BF16, 1, "head")
    assert said(recording, next(number)) == (
        f"mixed precision is on for a few calls only: 3 of 4 {WHAT} run in float32, 1 in bfloat16: head aten::mm"
    )
    whole = Recording()
    matmul(whole, BF16, 2)
    unknown = f"all 2 {WHAT} run in bfloat16, and whether weights are kept wider was not recorded"
    assert said(whole, next(number)) == unknown
    whole.call("Linear", {"param.weight": normal(2, 2)}, [normal(2, 2)], level="module")
    assert said(whole, next(number)).endswith(f"on: all 2 {WHAT} run in bfloat16, and weights are kept in float32")
    pure = Recording()
    matmul(pure, BF16, 2)
    pure.call("Linear", {"param.weight": normal(2, 2).astype(BF16)}, [normal(2, 2)], level="module")
    assert said(pure, next(number)) == f"all 2 {WHAT} run in bfloat16, and the weights are bfloat16 too"
    none = Recording()
    none.call("aten::add", [normal(4)], [normal(4)])
    unknown = f"could not tell whether mixed precision is on: none of the {WHAT} were recorded"
    assert said(none, next(number)) == unknown
    tf32 = Recording(devices=["cuda:0"], environment={"cuda.matmul.allow_tf32": "True"})
    matmul(tf32, np.float32)
    assert said(tf32, next(number)).endswith("run in float32; float32 products are rounded to TF32 or HF32, as the run declares")


def test_eight_bit_operands_count_as_such(tmp_path: Path) -> None:
    recording = Recording()
    given = [np.ones((4, 4), np.int8), np.ones((4, 4), np.int8)]
    recording.call("aten::_scaled_mm", given, [np.ones((4, 4), np.int32)])
    narrow = normal(4, 4).astype(ml_dtypes.float8_e4m3fn)
    recording.call("aten::_scaled_mm", [narrow, narrow], [normal(4, 4).astype(BF16)])
    assert census(recording.write(tmp_path / "run")).counts() == {"float8_e4m3fn": 1, "int8": 1}  # integers are no mixed precision


def test_runs_of_two_frameworks_are_compared_in_total(tmp_path: Path) -> None:
    first, second = Recording(), Recording(framework="paddle")
    matmul(first, np.float32)
    matmul(second, BF16, op="paddle._C_ops.matmul")
    told = difference(census(first.write(tmp_path / "a")), census(second.write(tmp_path / "b")))
    assert told.differs
    assert told.sentence.startswith("the two runs compute in other dtypes: all in float32 there, all in bfloat16 here (compared in")
