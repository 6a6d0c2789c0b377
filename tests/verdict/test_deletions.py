"""Captures that lack calls, and are never aligned with whole ones: their counts and seals are right, as if nothing had been there.

``dropped``: references still show that calls are gone. ``closed``: nothing in the capture itself does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch

import implementation_deletions as deletions
import implementations
import trueup
from implementation_models import Row, build


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    bench = implementations.Bench(tmp_path_factory.mktemp("runs"))
    return bench.baseline(Row("deleted", "", "text", lambda _: None), "float32")


@pytest.fixture(scope="module")
def calls(whole: Path) -> list[deletions.Call]:
    return deletions.calls_of(whole)


@pytest.mark.parametrize("closed", [False, True])
def test_nothing_deleted_is_the_same_capture(closed: bool, whole: Path, tmp_path: Path) -> None:
    again = trueup.open_capture(deletions.without(whole, [], tmp_path / "again", closed=closed))
    names = ["step", "phase", "level", "scope", "op", "ordinal", "slot", "dtype", "shape", "digest", "value", "l2", "producer_slot"]
    names += [] if closed else ["seq", "parent", "producer_seq", "forward_seq"]
    assert repr(again.records(names).to_pydict()) == repr(trueup.open_capture(whole).records(names).to_pydict())
    assert again.problems == []


@pytest.mark.parametrize("name", [*deletions.DELETIONS])
def test_a_capture_that_hides_what_is_gone_is_not_aligned(
    name: str, whole: Path, calls: list[deletions.Call], tmp_path: Path
) -> None:
    """Calls are gone, nothing refers to them, and what else the capture says of itself is true."""
    gone = list(deletions.DELETIONS[name](calls))
    part = trueup.open_capture(deletions.without(whole, gone, tmp_path / "part", closed=True))
    left = deletions.calls_of(part.path)
    assert (part.problems, len(left)) == ([], len(calls) - len(gone))
    assert sorted(call["seq"] for call in left) == list(range(len(left)))
    rows = part.records(["seq", "parent", "producer_seq", "forward_seq"])
    for column in ("parent", "producer_seq", "forward_seq"):
        assert pc.all(pc.is_in(rows[column].drop_null(), rows["seq"].combine_chunks())).as_py() in (True, None)
    assert part.ranks[0]["written"]["rows"] == part.rows
    result = trueup.compare(whole, part.path)
    assert (result.verdict, result.culprits) == ("inconclusive", [])


def test_dropped_leaves_references(whole: Path, calls: list[deletions.Call], tmp_path: Path) -> None:
    gone = list(deletions.DELETIONS["one product"](calls))
    rows = trueup.open_capture(deletions.without(whole, gone, tmp_path / "part", closed=False)).records(["seq", "producer_seq"])
    assert gone[0]["seq"] in rows["producer_seq"].to_pylist()
    assert gone[0]["seq"] not in rows["seq"].to_pylist()


@pytest.mark.parametrize(("name", "lacking"), [(name, k % 2) for k, name in enumerate(deletions.DELETIONS) if k % 3 == 0])
def test_a_capture_with_dropped_calls_is_not_aligned(
    name: str, lacking: int, whole: Path, calls: list[deletions.Call], tmp_path: Path
) -> None:
    """By turns it is the candidate's and the baseline's. Every third deletion: what refers to the calls tells of all of them."""
    part = deletions.without(whole, list(deletions.DELETIONS[name](calls)), tmp_path / "part", closed=False)
    result = trueup.compare(*((part, whole) if lacking else (whole, part)))
    assert (result.verdict, result.culprits) == ("inconclusive", [])


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("level", [None, ["module"], ["module", "api"]])
def test_a_whole_capture_written_again_is_aligned(closed: bool, level: list[str] | None, whole: Path, tmp_path: Path) -> None:
    again = deletions.without(whole, [], tmp_path / "again", closed=closed)
    assert trueup.compare(whole, again, level=level).verdict == "aligned"


REASONS = {
    "one product": "input.0 of aten::view (rank 0 step 0 forward aten blocks.1.down/aten::view#1) was made by call 134",
    "one view": "aten::view (rank 0 step 0 forward aten blocks.1.attn/aten::view#1) is there, and one of its kind before it is not",
    "one module, its functions stay": "torch.nn.functional.layer_norm (rank 0 step 0 forward api blocks.1.ln1/",
    "the root module": "Embedding (rank 0 step 0 forward module embed/Embedding#0) runs inside call 0, which is not there",
    "all forward": "grad_output.0 of Text (rank 0 step 0 backward module Text#0) was made by call 226, which is not there",
}


@pytest.mark.parametrize("level", [None, ["module"]])
@pytest.mark.parametrize("name", REASONS)
def test_a_hole_shows_in_the_capture_itself(name: str, level: list[str] | None, whole: Path, tmp_path: Path) -> None:
    """Both runs lack the same call, so that nothing differs; what level is compared does not matter."""
    gone = list(deletions.DELETIONS[name](deletions.calls_of(whole)))
    first, second = (deletions.without(whole, gone, tmp_path / side, closed=False) for side in ("first", "second"))
    result = trueup.compare(first, second, level=level)
    assert result.verdict == "inconclusive"
    assert result.notes[0].startswith("calls are missing that were recorded: first: ")
    assert REASONS[name] in result.notes[0]


TRACES = {
    "one view": "torch.Tensor.unflatten (rank 0 step 0 forward api blocks.1.attn/torch.Tensor.unflatten#0) runs no operator",
    "one update": "torch.Tensor.add_ (rank 0 step 0 optimizer api torch.Tensor.add_#0) runs no operator",
    "the root module": "Text (rank 0 step 0 backward module Text#0) belongs to no forward call",
}


@pytest.mark.parametrize("name", TRACES)
def test_a_hole_shows_though_nothing_refers_to_it(name: str, whole: Path, tmp_path: Path) -> None:
    gone = list(deletions.DELETIONS[name](deletions.calls_of(whole)))
    first, second = (deletions.without(whole, gone, tmp_path / side, closed=True) for side in ("first", "second"))
    result = trueup.compare(first, second)
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert result.notes[0].startswith("calls are missing that were recorded: first: ")
    assert TRACES[name] in result.notes[0]


FILTERS: dict[str, dict[str, Any]] = {
    "functions": {"level": ["api"]},
    "operators": {"level": ["aten"]},
    "modules and operators": {"level": ["module", "aten"]},
    "modules": {"level": ["module"]},
    "forward": {"phase": ["forward"]},
    "backward": {"phase": ["backward"]},
    "a layer": {"include": ["blocks.1*"]},
    "without a layer": {"exclude": ["blocks.1*"]},
    "without products": {"exclude": ["aten::addmm"]},
    "later steps": {"steps": "1:3"},
    "steps apart": {"steps": "0,2"},
}


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_what_filters_leave_out_is_not_missing(options: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for side in ("first", "second"):
        training = build("text")
        with trueup.capture(tmp_path / side, model=training.model, on_error="stop", **options) as capture:
            for _ in range(3):
                training.step()
                capture.step()
    result = trueup.compare(tmp_path / "first", tmp_path / "second")
    assert not [note for note in result.notes if "missing" in note]
    assert result.verdict == "aligned"
