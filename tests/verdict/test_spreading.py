"""A comparison whose ranks are shared out among workers finds what one process finds, and loses no rank."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from trueup.comparison.result import comparing
from trueup.comparison.result.comparing import Assembly, compare
from trueup.comparison.result.spreading import COUNTED, GATHERED
from trueup.comparison.verdict.compare import Comparison
from trueup.doors.report.document import document
from trueup.foundation.engines import ENDED, Failed, Local, engine_of
from trueup.foundation.facts import criteria
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.model import UsageError
from trueup.foundation.store import open_capture
from verdict.captures import Recording, changed, normal
from verdict.engine_work import twice
from verdict.test_exchange import data_parallel, pipeline, product


class OneByOne:
    """Does the work here, on copies as another process has them: each rank is a share of its own. ``broken``: ranks that fail."""

    workers = 100

    def __init__(self, broken: Sequence[int] = ()) -> None:
        self.broken = broken

    def map(self, work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for n in reversed(range(len(items))):  # who is done first is not known
            wrong = set(self.broken) & set(items[n][1].ranks)
            yield n, Failed("it broke") if wrong else pickle.loads(pickle.dumps(work(pickle.loads(pickle.dumps(items[n])))))


def longer(*, wrong: bool = False) -> Recording:
    """Four ranks, three steps; the last rank has other operators, and goes wrong in the first step, another one in the second."""
    run = Recording()
    for step in range(3):
        for rank in range(4):
            y = product(run, rank, normal(8, 16, seed=rank + 9 * step), 0, wrong and (rank, step) in ((2, 1), (3, 2)), step)
            run.call("aten::relu" if wrong and rank == 3 else "aten::gelu", [y], [changed(y, 0.5)], rank=rank, step=step)
    run.rows.sort(key=lambda row: (row["rank"], row["step"], row["seq"]))
    return run


CASES = {
    "aligned": (data_parallel(), data_parallel()),
    "through a collective": (data_parallel(), data_parallel(wrong=1)),
    "between the ranks": (data_parallel(), data_parallel(broken=True)),
    "a pipeline": (pipeline(steps=2), pipeline(wrong=0, steps=2)),
    "several steps": (longer(), longer(wrong=True)),
    "other ranks": (data_parallel(), data_parallel(ranks=(0, 1))),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """To the last word of the document, and all rows of the table."""
    baseline, candidate = (run.write(tmp_path / str(n)) for n, run in enumerate(CASES[case]))
    expected = compare(baseline, candidate)
    monkeypatch.setattr(comparing, "engine_of", lambda *_: OneByOne())
    found = compare(baseline, candidate, jobs=2)
    assert json.dumps(document(found), default=str) == json.dumps(document(expected), default=str)
    rows, others = (sorted(map(str, result.calls.to_pylist())) for result in (found, expected))
    assert rows == others


def test_a_rank_that_no_worker_can_compare_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, candidate = (data_parallel().write(tmp_path / str(n)) for n in range(2))
    monkeypatch.setattr(comparing, "engine_of", lambda *_: OneByOne(broken=(1,)))
    found = compare(baseline, candidate, jobs=2)
    assert found.verdict == "inconclusive"
    assert "rank 1 could not be compared, because it broke" in found.sentence
    assert {row["rank"] for row in found.calls.to_pylist()} == {0, 2}


def test_all_that_a_comparison_gathers_is_joined(tmp_path: Path) -> None:
    """What is added there has to be said here, or a worker's is lost."""
    captures = [open_capture(data_parallel().write(tmp_path / str(n))) for n in range(2)]
    comparison = Comparison((captures[0], captures[1]), None, criteria.load("default"), Mapping())
    given = {"own_errors", "overlap", "captures", "forced", "criterion", "mapping", "runs", "repeats", "ranks", "steps"}
    before = {*given, "recorded", "names", "see", "beside", "in_full"}
    apart = {"overviews", "origins", "exchange", "passes"}
    assert set(vars(comparison)) == {*COUNTED, *before, *apart}
    assert set(vars(Assembly(comparison))) == {*GATHERED, "comparison", "sites", "frameworks", "findings"}


def test_a_killed_worker_costs_the_item_that_killed_it() -> None:
    found = dict(Local(2).map(twice, [1, 3, 4, 5]))
    assert found == {0: 2, 1: Failed(ENDED), 2: 8, 3: Failed("5 is damaged")}


def test_workers_of_this_machine_compare(tmp_path: Path) -> None:
    baseline, candidate = (run.write(tmp_path / str(n)) for n, run in enumerate(CASES["through a collective"]))
    found, expected = (compare(baseline, candidate, jobs=jobs) for jobs in (2, 1))
    assert (found.verdict, found.sentence) == ("deviates", expected.sentence)


@pytest.mark.parametrize(("engine", "needs"), [("ray", "ray"), ("dask", "distributed")])
def test_clusters_compare(tmp_path: Path, engine: str, needs: str) -> None:
    """Two workers of this machine; from the shell, for `distributed` is a folder of these tests, too."""
    try:
        importlib.metadata.version(needs)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{needs} is not installed")
    baseline, candidate = (run.write(tmp_path / str(n)) for n, run in enumerate(CASES["through a collective"]))
    command = [sys.executable, "-m", "trueup", "compare", str(baseline), str(candidate), "-j", "2", "--engine", engine]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, check=False)
    assert said.returncode == 1, said.stderr
    assert "2 ranks got it from others; rank 0 got it from rank 1" in " ".join(said.stdout.split())


@pytest.mark.parametrize("name", ["spark", "local:here", ""])
def test_an_engine_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="expected: local, ray, dask, ray:ADDRESS"):
        engine_of(name, 1)
