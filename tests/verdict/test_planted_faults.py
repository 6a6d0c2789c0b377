"""The headline: faults under the models in which they show, from statistics alone, and no blame for legitimate noise.

Each fault under two of the models in whose column docs/planted-faults.md has it; `make bench-locate` prints the whole table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import locate
import zoo
from trueup import simdev


def plan() -> dict[str, list[str]]:
    """Return two models for each fault, other ones from fault to fault."""
    page = Path(__file__).parents[2].joinpath("docs", "planted-faults.md").read_text("utf-8")
    head, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    found: dict[str, list[str]] = {}
    for name, *cells in rows:
        if name in simdev.FAULTS:
            models = [model for model, cell in zip(head[1:], cells, strict=True) if cell]
            found[name] = [models[(len(found) + k) % len(models)] for k in range(min(2, len(models)))]
    return found


PLAN = plan()


def test_all_faults_of_the_table_are_planned() -> None:
    assert len(PLAN) >= 30
    assert all(PLAN.values())


@pytest.mark.parametrize("model", list(zoo.MODELS))
def test_first_culprit_is_the_right_call(model: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    simdev.install()
    planned = [fault for fault, models in PLAN.items() if model in models]
    outcomes = list(locate.table([model], planned, list(simdev.NOISE), tmp_path))
    broken = [o for o in outcomes if o.truth != "nothing"]
    unsound = [o for o in outcomes if o.truth == "nothing" and o.word != "aligned"]
    missed = [o for o in broken if o.word != "ok"]
    assert unsound == []
    assert missed == []
    assert len(outcomes) - len(broken) == 2 * (1 + len(simdev.NOISE))
    assert len(broken) >= len(planned), "faults of the table do not show any more"
