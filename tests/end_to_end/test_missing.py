"""Nothing that is missing passes as aligned: real captures, of which something is taken away or was never recorded."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trueup
from nursery import LIMIT, Nursery
from trueup.foundation.model import Result
from trueup.foundation.store import open_capture

Step = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]

SCRIPT = """
import os, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 6)).square().mean()
    if str(step) in sys.argv:
        print("here", flush=True)
        time.sleep(60)
    loss.backward()
    optimizer.step()
"""


def _train(path: Path, step: Step | None = None, fails: int | None = None, **options: Any) -> Path:
    """Capture three steps, or what precedes an error in one of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(5, 6)
    with trueup.capture(path, **options) as capture:
        for number in range(3):
            optimizer.zero_grad()
            made = model(data) if step is None else step(model, data)
            if number == fails:
                raise ValueError("no more data")
            made.square().mean().backward()
            optimizer.step()
            capture.step()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("whole") / "run")


def _rewritten(whole: Path, to: Path, kept: Callable[[pa.Table], pa.Array]) -> Path:
    """Copy a capture, its parts without the rows that are not kept."""
    shutil.copytree(whole, to)
    for part in to.glob("rank-*/step-*/records-*.parquet"):
        table = pq.read_table(part, partitioning=None)
        pq.write_table(table.filter(kept(table)), part)
    return to


def _because(result: Result) -> str:
    assert (result.verdict, result.exit_code) == ("inconclusive", 2), result.sentence
    return result.sentence.splitlines()[0]


def test_the_same_training_is_aligned(whole: Path, tmp_path: Path) -> None:
    assert trueup.compare(whole, _train(tmp_path / "again")).verdict == "aligned"


@pytest.mark.parametrize("step", range(3))
def test_a_part_less_is_not_aligned_even_if_both_lack_it(whole: Path, tmp_path: Path, step: int) -> None:
    sides = [tmp_path / "baseline", tmp_path / "candidate"]
    for side in sides:
        shutil.copytree(whole, side)
        shutil.rmtree(side / f"rank-00000/step-{step:06d}")
    place = "at the beginning" if step == 0 else f"after step-{step - 1:06d}/records-000"
    assert re.search(rf"(is|are) missing {place}", _because(trueup.compare(*sides)))


def test_each_kind_of_call_is_missed(whole: Path, tmp_path: Path) -> None:
    """Both sides lack the same calls, so nothing but the counts can tell."""
    table = open_capture(whole).records(["level", "phase", "op"])
    kinds = sorted({tuple(row.values()) for row in table.to_pylist()}, key=str)
    assert len(kinds) > 50
    for number, (level, phase, op) in enumerate(kinds):
        def kept(rows: pa.Table, level: str = level, phase: str = phase, op: str = op) -> pa.Array:
            named = {"level": level, "phase": phase, "op": op}
            alike = [pc.equal(rows[name].cast(pa.string()), text) for name, text in named.items()]
            return pc.invert(pc.and_(pc.and_(alike[0], alike[1]), alike[2]))

        less = _rewritten(whole, tmp_path / f"{number}", kept)
        assert "can be read" in open_capture(less).lost[0], (level, phase, op)
        if op in ("torch.nn.functional.linear", "Linear", "aten::mm", "AddmmBackward0"):
            assert "parts of the captures cannot be read: rank 0 wrote " in _because(trueup.compare(less, less))
        shutil.rmtree(less)


def test_all_of_a_phase_missing_is_not_aligned(whole: Path, tmp_path: Path) -> None:
    less = _rewritten(whole, tmp_path / "less", lambda rows: pc.not_equal(rows["phase"].cast(pa.string()), "backward"))
    for sides in ((whole, less), (less, whole)):
        assert "cannot be read: rank 0 wrote " in _because(trueup.compare(*sides))


def test_a_step_overwritten_by_another_is_not_aligned(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.copy(copy / "rank-00000/step-000000/records-0000.parquet", copy / "rank-00000/step-000002/records-0000.parquet")
    assert "rows are not of step 2, as the folder is" in _because(trueup.compare(whole, copy))


def test_killed_in_a_step_is_not_aligned(nursery: Nursery, tmp_path: Path) -> None:
    """Both are killed in the same place, so that what is left of them is equal."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    runs = {}
    for name, step in (("first", "0"), ("second", "0"), ("third", "2"), ("wanted", "2"), ("complete", "none")):
        wanted = {"steps": "0:2"} if name == "wanted" else {}
        child = nursery.script(tmp_path / f"{name}.log", script, step, directory=tmp_path / name, **wanted)
        if step != "none":
            child.see("here")
            until = time.monotonic() + LIMIT
            while time.monotonic() < until and not _flushed(tmp_path / name, int(step), told=bool(wanted)):
                time.sleep(0.1)
            child.kill()
        child.wait()
        runs[name] = tmp_path / name
    for pair in (("first", "second"), ("complete", "third"), ("third", "complete"), ("third", "third")):
        said = _because(trueup.compare(*(runs[name] for name in pair)))
        assert "is a fragment that ends in step" in said
        assert said.endswith("rank 0 was interrupted or is still recording (status 'recording'): readable up to the last flush")
    assert trueup.compare(runs["wanted"], runs["wanted"]).verdict == "aligned"  # killed after the last step that was wanted


def _flushed(path: Path, step: int, *, told: bool) -> bool:
    """Whether a running capture has a step on disk; ``told``: or says that all that was wanted is."""
    manifest = path / "rank-00000/manifest.json"
    if told:
        return manifest.exists() and "steps_over" in manifest.read_text()
    return any(path.glob(f"rank-*/step-{step:06d}/*.parquet"))


def test_ended_by_an_error_is_not_aligned_unless_all_that_was_wanted_is_there(whole: Path, tmp_path: Path) -> None:
    for name, steps in (("all", None), ("wanted", "0:2")):
        with pytest.raises(ValueError, match="no more data"):
            _train(tmp_path / name, fails=2, steps=steps)
    said = _because(trueup.compare(whole, tmp_path / "all"))
    assert "the candidate is a fragment that ends in step 2: rank 0 was ended by an error (status 'interrupted')" in said
    assert trueup.compare(tmp_path / "wanted", tmp_path / "wanted").verdict == "aligned"


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({"phase": "forward"}, "baseline without --phase, candidate --phase forward"),
        ({"exclude": "*GELU*"}, "baseline without --exclude, candidate --exclude *GELU*"),
        ({"include": "0"}, "baseline without --include, candidate --include 0"),
    ],
)
def test_other_filters_are_not_aligned_and_the_same_are(
    whole: Path, tmp_path: Path, options: dict[str, Any], filters: str
) -> None:
    sides = [_train(tmp_path / name, **options) for name in ("first", "second")]
    result = trueup.compare(whole, sides[0])
    assert f"the runs were recorded through different filters ({filters}), and " in _because(result)
    assert result.sentence.splitlines()[-1].strip() == "next: record both with the same --phase, --include and --exclude"
    assert trueup.compare(*sides).verdict == "aligned"


def test_a_filter_that_leaves_nothing_out_makes_no_difference(whole: Path, tmp_path: Path) -> None:
    assert trueup.compare(whole, _train(tmp_path / "run", exclude="absent")).verdict == "aligned"


@pytest.mark.parametrize(("detail", "level"), [("digest", "all"), ("tensor", "all"), ("stats", "module")])
def test_less_of_the_same_is_said(whole: Path, tmp_path: Path, detail: str, level: str) -> None:
    result = trueup.compare(whole, _train(tmp_path / "run", detail=detail, level=level))
    assert result.verdict == "aligned"
    expected = f"the baseline keeps detail stats, the candidate {detail}" if detail != "stats" else "only one capture holds level"
    assert expected in result.sentence


def test_dtypes_that_differ_are_said_whatever_the_verdict(whole: Path, tmp_path: Path) -> None:
    def doubled(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model[2:](model[1](model[0](data).double()).float())
        return made

    def mixed(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(data)

    for name, step, dtype in (("double", doubled, "float64"), ("mixed", mixed, "bfloat16")):
        for sides in ((whole, made := _train(tmp_path / name, step)), (made, whole)):
            result = trueup.compare(*sides)
            there, here = ("candidate", "baseline") if sides[0] == whole else ("baseline", "candidate")
            text = f"results are {dtype} in the {there} and float32 in the {here}, first in"
            if there == "baseline":
                text = f"results are float32 in the {here} and {dtype} in the {there}, first in"
            assert text in result.sentence
            assert any(text in note for note in result.notes)
        shutil.rmtree(made)


def _overflowing(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(model(data) * 1e30 * 1e30, (3,))


def _masked(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    made = model(data)
    scores = (made @ made.T).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    return torch.nn.functional.softmax(scores, -1) @ made


def _all_masked(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    made = model(data)
    return (made @ made.T).masked_fill(torch.ones(5, 5).bool(), float("-inf")).softmax(-1) @ made


@pytest.mark.parametrize(
    ("step", "said"),
    [(_overflowing, "both runs made Inf and -Inf first in aten::mul (rank 0 step 0 forward"),
     (_all_masked, "both runs made NaN first in aten::_softmax (rank 0 step 0 forward"), (_masked, None)],
)  # fmt: skip
def test_an_overflow_that_both_share_is_said(tmp_path: Path, step: Step, said: str | None) -> None:
    result = trueup.compare(_train(tmp_path / "first", step), _train(tmp_path / "second", step))
    if said is None:
        assert "both runs" not in result.sentence
    else:
        assert said in result.sentence
        assert f": `trueup overflow {tmp_path / 'second'}` says why and what it did" in result.sentence


def test_calls_of_one_run_are_in_the_table_and_in_the_counts(whole: Path, tmp_path: Path) -> None:
    def longer(model: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model(data)
        made.abs().sum()  # nobody reads it
        return made

    result = trueup.compare(whole, _train(tmp_path / "run", longer))
    alone = result.calls.filter(pc.equal(result.calls["state"].cast(pa.string()), "only candidate"))
    assert result.counts["only_candidate"] == len(alone) == 12  # two functions, two operators, in three steps
    assert result.counts["only_baseline"] == 0
    assert result.counts["compared"] == len(result.matched) == len(result.calls) - 12
    row = alone.slice(0, 1).to_pylist()[0]
    assert (row["op"], row["seq_baseline"], row["error_out"]) == ("torch.Tensor.abs", None, None)
    assert "test_missing.py" in row["source"]
    saved = pq.read_table(result.save(tmp_path / "report") / "calls.parquet")
    assert saved["state"].to_pylist().count("only candidate") == 12
