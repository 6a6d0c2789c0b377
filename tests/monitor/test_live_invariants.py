"""Invariants while a run goes: a healthy run is silent, faults are named in the first window after them; conditions are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import trueup
from trueup.analysis.invariants.conditions import Condition
from trueup.analysis.invariants.relations import Invariants, Live, check, learn, load, save
from trueup.foundation.model import TrueupError
from trueup.foundation.store import Writer, claim


def steps(count: int, seed: int, *, fault: str = "", at: int = 6, two: bool = False) -> None:
    """Train with an evaluation after each third step, and with two micro-batches in each fourth if asked."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    evaluated = model.eval if fault == "evaluation mode" else model.train
    for step in range(count):
        for _ in range(2 if two and step % 4 == 3 else 1):
            torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.ones(3, 2)).backward()
        if fault == "learning rate" and step >= at:
            optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        if two and step % 3 == 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(3, 4))
            model.train()
        elif step >= at - 1:
            evaluated()


def record(path: Path, count: int = 6, **options: Any) -> Path:
    with trueup.capture(path, level=("module", "api"), detail="digest"):
        steps(count, options.pop("seed", 0), **options)
    return path


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    return save(learn([record(folder / "c")]), folder / "known.json")


@pytest.mark.parametrize(("fault", "said"), [
    ("", None), ("learning rate", "step 7, rank 0: arguments of torch.Tensor.add_#1 (optimizer) are"),
    ("evaluation mode", 'step 7, rank 0: arguments of 1/torch.nn.functional.dropout (forward) are {"inplace": false, "p"'),
])  # fmt: skip
def test_a_window_says_what_broke(learned: Path, tmp_path: Path, fault: str, said: str | None) -> None:
    monitor = trueup.monitor(None, None, tmp_path / "m", invariants=learned, check=5)
    steps(12, 3, fault=fault)
    monitor.close()
    assert monitor.failure is None
    alerts = [one for one in monitor.alerts if one.rule == "invariant"]
    if said is None:
        assert monitor.alerts == []
    else:
        assert alerts[0].said.startswith(said), alerts
        assert json.loads((tmp_path / "m/rank-00000/alerts.jsonl").read_text().splitlines()[0])["rule"] == "invariant"
    assert monitor.count == 5  # steps 1 to 3, 6 to 8 and 11 were recorded by digests instead
    assert not (tmp_path / "m/invariants").exists()


def test_what_holds_at_times_is_learned_with_its_condition(tmp_path: Path) -> None:
    known = learn([record(tmp_path / "a", 13, two=True)])
    said = {f"{one.name} {one.key[3] if one.key else ''} {one.when}" for one in known.relations if one.when is not None}
    assert "arguments torch.nn.functional.dropout in steps 3n + 1 and 3n + 2" in said
    assert any(one.startswith("same torch.Tensor.") and "in steps with 1 call of" in one for one in said), said
    again = load(save(known, tmp_path / "known.json"))
    assert set(again.relations) == set(known.relations)
    healthy = check(again, record(tmp_path / "b", 13, two=True, seed=5))
    assert (healthy.verdict, healthy.violations) == ("aligned", ())
    broken = check(again, record(tmp_path / "c", 13, seed=5, fault="evaluation mode"))
    assert any(one.said.endswith('"training": true} in steps 3n + 1 and 3n + 2') for one in broken.violations)


def write(path: Path, ranks: range, steps: int = 5, parted: bool = False) -> Path:
    """Record steps of weights that ranks 0 and 2 share, and 1 and 3."""
    for rank in ranks:
        claim(path, rank, "run")
    for rank in ranks:
        writer = Writer(path, rank, {"run": "run", "levels": ["module"], "detail": "digest"}, {"world_size": 4})
        for step in range(steps):
            writer.write_records(step, {
                "seq": [1], "phase": ["forward"], "level": ["module"], "scope": ["head"], "op": ["Linear"], "ordinal": [0],
                "slot": ["param.weight"], "digest": [f"{16 * step + rank % 2 + 4 * (parted and rank == 2 and step == 2):016x}"],
            })  # fmt: skip
        writer.close("complete")
    return path


PARTED = (
    "rank 2: param.weight of head/Linear (forward) is not the same on ranks 0 and 2; in the healthy run it is "
    "on ranks that are 2 apart"
)


def test_ranks_of_a_group_are_equal(tmp_path: Path) -> None:
    known = learn([write(tmp_path / "a", range(4))])
    (equal,) = [one for one in known.relations if one.query == "equal"]
    assert equal.when == Condition(("apart",), frozenset({(2,)}))
    found = check(known, write(tmp_path / "b", range(4), parted=True))
    assert [one.said for one in found.violations if one.relation == "equal"] == [f"step 2, {PARTED}"]

    said = []  # while they run each rank has windows of its own, and looks at those of the ranks below one window later
    live = {rank: Live(Invariants((equal,)), tmp_path / "m", rank, 4) for rank in (0, 2)}
    for first in (100, 200, 300):
        for rank, one in live.items():
            write(one.folder(first), range(rank, rank + 1), 3, parted=first == 100)
            said += [(first, violation.said) for violation in one.judge(first)]
    assert said == [(200, f"step 102, {PARTED}")]
    assert sorted(one.name for one in (tmp_path / "m/invariants/rank-00002").iterdir()) == ["step-000200", "step-000300"]


@pytest.mark.parametrize("relation", [
    ["dance", None, "x", None], ["bytes", ["api"], "changes", None], ["types", None, "x", [["secret:x"], [[1]]]],
    ["types", None, "x", [["period:0"], [[1]]]], ["types", None, "x", [["calls:linear"], [[1]]]],
])  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path: Path, relation: Any) -> None:
    (tmp_path / "known.json").write_text(json.dumps({"schema": "trueup-invariants", "schema_version": 2, "relations": [relation]}))
    with pytest.raises(TrueupError, match="cannot be read"):
        load(tmp_path / "known.json")
