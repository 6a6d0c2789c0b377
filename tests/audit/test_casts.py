"""Dangerous casts of real trainings and of captures made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trueup
from audit.trained import line, train
from trueup.analysis.audit import dangerous_casts
from trueup.foundation.model import TrueupError
from verdict.captures import Recording, Slot, normal


@pytest.mark.parametrize("level", ["api", "aten", ("api", "aten")], ids=str)
def test_a_healthy_training_under_autocast_has_none(level: str, tmp_path: Path) -> None:
    found = dangerous_casts(train(tmp_path / "run", amp=True, level=level))
    assert (found.verdict, found.dangerous, found.unmeasured) == ("clean", (), 0)
    assert found.looked > 10
    assert found.sentence == f"no cast is dangerous: {found.looked:,} looked at"


@pytest.mark.parametrize("level", ["api", "aten", ("module", "api", "aten")], ids=str)
def test_what_goes_beyond_fp16_is_named_with_its_line(level: str, tmp_path: Path) -> None:
    found = dangerous_casts(train(tmp_path / "run", amp=True, level=level, scale=1e6, positions=True))
    overflow, rounded = found.dangerous
    assert (overflow.kind, overflow.source, overflow.target, overflow.times) == ("overflow", "float32", "float16", 2)
    assert overflow.place.op == ("aten::_to_copy" if level == "aten" else "torch.Tensor.half")
    assert overflow.place.step == 0
    assert "of 64 elements become infinite: the input reaches" in overflow.sentence
    assert line(".half()") in overflow.sentence
    assert (rounded.kind, rounded.source, rounded.target) == ("rounded", "int64", "bfloat16")
    assert line("torch.arange") in rounded.sentence
    assert found.sentence.startswith(f"2 dangerous casts ({found.looked:,} looked at): the first: ")


def test_autocast_that_overflows_inside_a_product_is_found_without_aten(tmp_path: Path) -> None:
    recording = Recording()
    wide, weight = normal(8, 16) * np.float32(3e5), normal(16, 4)
    result = np.full((8, 4), np.inf, np.float16)
    where = {"scope": "head", "source": "/a/net.py:3 in forward"}
    recording.call("torch.nn.functional.linear", [wide, weight], [result], level="api", **where)
    path = recording.write(tmp_path / "run")
    (cast,) = dangerous_casts(path).dangerous
    assert cast.implicit
    assert cast.sentence.startswith(
        "head, forward, step 0, rank 0 (torch.nn.functional.linear), computes float16 of float32: elements become infinite: "
    )
    assert cast.sentence.endswith("[a/net.py:3 in forward]")
    recording.call("aten::mm", [normal(2, 2), normal(2, 2)], [normal(2, 2)])
    assert not dangerous_casts(recording.write(tmp_path / "with aten")).casts  # there the cast itself is recorded, or was not made


def test_a_gradient_that_is_cast_back_is_looked_at(tmp_path: Path) -> None:
    recording = Recording()
    small = np.full((64,), 1e-9, np.float32)
    recording.call(
        "torch.Tensor.float", {"grad_output.0": small}, {"grad_input.0": small.astype(np.float16)}, level="api", phase="backward"
    )
    (cast,) = dangerous_casts(recording.write(tmp_path / "run")).dangerous
    assert (cast.kind, cast.share) == ("flushed", 1.0)


def test_what_has_no_statistics_could_not_be_told(tmp_path: Path) -> None:
    recording = Recording(parts="digest")
    recording.call("aten::_to_copy", [normal(4)], [normal(4).astype(np.float16)])
    found = dangerous_casts(recording.write(tmp_path / "run"))
    assert (found.verdict, found.unmeasured) == ("inconclusive", 1)
    assert found.sentence == "could not tell of 1 of 1 cast, which have no statistics"
    modules = Recording()
    modules.call("Linear", [normal(4)], [normal(4)], level="module")
    found = dangerous_casts(modules.write(tmp_path / "modules"))
    assert found.sentence == "could not tell of casts: the capture holds modules alone; record level api or aten"


def test_a_mask_is_counted_and_not_blamed(tmp_path: Path) -> None:
    recording = Recording()
    mask = np.where(np.tri(8) > 0, 0, np.float32(-1e9)).astype(np.float32)
    with np.errstate(over="ignore"):
        recording.call("torch.Tensor.half", [mask], [mask.astype(np.float16)], level="api")
    found = dangerous_casts(recording.write(tmp_path / "run"))
    assert (found.masks, found.casts, found.verdict) == (1, (), "clean")
    assert found.sentence == "no cast is dangerous: 1 looked at; 1 make a mask infinite"


def test_steps_and_ranks_can_be_chosen(tmp_path: Path) -> None:
    recording = Recording()
    for step in (0, 1):
        bad = np.float32([1, 7e4 if step else 1])
        with np.errstate(over="ignore"):
            recording.call("torch.Tensor.half", [bad], [bad.astype(np.float16)], level="api", step=step)
    path = recording.write(tmp_path / "run")
    assert not dangerous_casts(path, step=0).dangerous
    assert [cast.place.step for cast in dangerous_casts(path).dangerous] == [1]
    with pytest.raises(TrueupError, match="The capture has no such step"):
        dangerous_casts(path, step=7)


def test_a_comparison_and_an_overflow_report_say_it(tmp_path: Path) -> None:
    paths = []
    for name, ids in (("base", [1, 2, 3, 4]), ("cand", [2**40, 2, 3, 4])):
        recording = Recording()
        given, x = np.int64(ids), normal(4)
        wrapped = given.astype(np.int32)
        recording.call("torch.Tensor.int", [given], [wrapped], level="api", source="/a/ids.py:3 in load")
        recording.call("torch.Tensor.mul", [x, wrapped], [x * wrapped], level="api")
        paths.append(recording.write(tmp_path / name))
    base, cand = paths
    result = trueup.compare(base, cand)
    assert result.verdict == "deviates"
    (note,) = [note for note in result.notes if "dangerous cast" in note]
    assert note.startswith("dangerous cast in the candidate alone: torch.Tensor.int, forward, step 0, rank 0, int64 to int32: ")
    assert "ids.py:3" in note
    assert any(note.startswith("dangerous cast: torch.Tensor.int") for note in trueup.overflow(cand).notes)
    assert not [note for note in trueup.overflow(base).notes if "cast" in note]


def test_what_moves_tensors_without_a_cast_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, x = Recording(), normal(4)
    recording.call("torch.Tensor.to", [x], [x], level="api")
    recording.call("torch.nn.functional.linear", [x, x], [x], level="api")
    path = recording.write(tmp_path / "run")
    monkeypatch.setattr("trueup.analysis.audit.casts.calls", None)
    assert dangerous_casts(path).looked == 0
    recording.call("torch.Tensor.to", [x], [x.astype(np.float16)], level="api")
    with pytest.raises(TypeError, match="not callable"):
        dangerous_casts(recording.write(tmp_path / "casts"))


def test_two_tensors_that_could_not_be_measured(tmp_path: Path) -> None:
    recording = Recording()
    recording.call("torch.Tensor.half", [Slot(normal(4), "")], [Slot(normal(4).astype(np.float16), "stats")], level="api")
    assert dangerous_casts(recording.write(tmp_path / "run")).unmeasured == 1
