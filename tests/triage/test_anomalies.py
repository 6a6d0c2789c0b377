"""Step 1 over what a watched run left behind; and what step 3 records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trueup.analysis.triage import triaging
from trueup.analysis.triage.running import Outcome, Trial
from trueup.recording.recorder.options import CaptureOptions

SCALE = "the loss scale fell from 65536 to 1 in 40 steps"


class Watched:
    """A runner whose watched run is played."""

    steps = 5

    def __init__(self, folder: Path, reports: list[dict[str, Any]], failed: str = "") -> None:
        (folder / "processes").mkdir(parents=True)
        for number, report in enumerate(reports):
            (folder / "processes" / f"{number}.json").write_text(json.dumps(report))
        self._trial = Trial("under a watch", (), folder, failed=failed)

    def watch(self, _name: str, options: CaptureOptions, watch: str) -> Trial:
        assert "optimizer" not in options.phases
        assert json.loads(watch)["stop_after"] == 1
        return self._trial


def report(*hits: dict[str, Any], steps: int = 9, skipped: int = 0, said: str | None = None) -> dict[str, Any]:
    told = {"steps": steps, "hits": len(hits), "first": list(hits), "transients": skipped, "loss_scale": {"said": said}}
    return {"watch": told, "calls": 100}


def looked(tmp_path: Path, reports: list[dict[str, Any]], failed: str = "") -> Outcome:
    runner: Any = Watched(tmp_path / "run", reports, failed)
    return triaging.look_for_anomalies(runner, tmp_path / "out", None)


def hit(step: int, rank: int, name: str) -> dict[str, Any]:
    return {"step": step, "rank": rank, "said": f"{name}: overflow", "name": name, "source": "train.py:3", "path": None}


def test_the_earliest_hit_of_all_ranks_explains_it(tmp_path: Path) -> None:
    found = looked(tmp_path, [report(hit(4, 0, "b")), report(hit(2, 1, "a"), said=SCALE)])
    assert (found.status, found.said) == ("DEVIATES", "a: overflow")
    assert found.remarks == ("your code: train.py:3", SCALE)


def test_a_clean_run_passes(tmp_path: Path) -> None:
    found = looked(tmp_path, [report(steps=9, skipped=2)])
    assert found.status == "pass"
    assert found.said == (
        "no NaN, Inf or saturated value in 5 steps; 2 steps were skipped by the loss scaling, as it is meant to"
    )


@pytest.mark.parametrize(
    ("reports", "failed", "said"),
    [([report()], "it hung", "under a watch it hung"), ([], "", "nothing was"), ([{"calls": 3}], "", "nothing was")],
)
def test_what_was_not_watched_is_not_clean(tmp_path: Path, reports: list[dict[str, Any]], failed: str, said: str) -> None:
    found = looked(tmp_path, reports, failed)
    assert found.status == "could not tell"
    assert found.said.startswith(said)


class Recorded:
    """A capture of which only the options are looked at."""

    def __init__(self, config: Any, steps: list[int], levels: frozenset[str] = frozenset({"module", "api"})) -> None:
        self.root, self.steps, self.levels = {"config": config}, steps, levels


def test_the_candidate_is_recorded_like_the_baseline() -> None:
    given = CaptureOptions.of(level=("api",), detail="tensor", steps="0,2:4", include="net.*", on_error="stop", compile="through")
    baseline: Any = Recorded(json.loads(given.to_json()), [0, 2, 3])
    found = triaging.options_of(baseline, 10)
    assert (found.levels, found.detail, found.include, found.compile) == (("api",), "tensor", ("net.*",), "through")
    assert (found.steps, found.stop, found.on_error) == (((0, 1), (2, 4)), True, "continue")
    endless: Any = Recorded(json.loads(CaptureOptions.of().to_json()), list(range(7)))
    assert triaging.options_of(endless, 10).steps == ((0, 7),)
    imported: Any = Recorded(None, [3, 4], frozenset({"api"}))
    found = triaging.options_of(imported, 10)
    assert (found.levels, found.steps, found.stop) == (("api",), ((3, 5),), True)
