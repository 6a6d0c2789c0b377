"""Step 2 over a command that is played: what its losses are follows from what is off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trueup.analysis.triage.running import Outcome, Switch, Table, Trial
from trueup.analysis.triage.triaging import NO_LOSS, Search

ROWS = ("a", "b", "c", "d", "whole")
PARTS = ("first part", "second part", "third part")
RIGHT = {0: 2.0, 1: 1.5, 2: 1.2}


def table() -> Table:
    whole = [Switch(name, "torch", f"what {name} does", "o", environment={name.upper(): "0"}) for name in ROWS]
    parts = [Switch(name, "torch", f"what the {name} does", "o", "whole", environment={"P": "0"}) for name in PARTS]
    return Table([*whole, *parts])


class Played:
    """A runner that runs nothing."""

    def __init__(
        self, losses: Callable[[set[str], int], dict[int, float]], failing: Callable[[set[str]], str] = lambda _: ""
    ) -> None:
        self.table, self.steps = table(), 3
        self.runs: list[Trial] = []
        self._losses, self._failing = losses, failing

    def losses(self, name: str, off: Iterable[Switch] = (), steps: int | None = None) -> Trial:
        names = tuple(one.name for one in off)
        failed = self._failing(set(names))
        losses = {} if failed else {k: v for k, v in self._losses(set(names), len(self.runs)).items() if k < (steps or 3)}
        self.runs.append(Trial(name, names, Path("nowhere"), losses, failed=failed, framework="torch", devices=("cpu",)))
        return self.runs[-1]

    def capture(self, name: str, off: Iterable[Switch], steps: str) -> Trial:
        return Trial(name, (), Path("nowhere"), failed="captures are not played")


def looked(played: Played, baseline: dict[int, float] | None = None) -> Outcome:
    runner: Any = played
    return Search(runner, Path("nowhere"), runner.losses("as it is"), baseline).look()


def wrong_unless(*sets: Sequence[str], by: float = 0.02) -> Callable[[set[str], int], dict[int, float]]:
    """Return losses that are right where all switches of one of some sets are off."""

    def losses(off: set[str], _: int) -> dict[int, float]:
        fixed = any(set(names) <= off for names in sets)
        wobble = 1 + 1e-7 * len(off)
        return {step: loss * (1.0 if fixed else 1 + by) * wobble for step, loss in RIGHT.items()}

    return losses


def test_one_switch_is_named() -> None:
    played = Played(wrong_unless(["c"]))
    found = looked(played)
    assert (found.status, found.guilty) == ("DEVIATES", ("c",))
    assert found.said.startswith("with c off the loss of step 0 becomes 2.00000 instead of 2.04000, 1.96 % apart")
    assert found.remarks[0] == "c: what c does"
    assert found.advice == ("export C=0",)
    assert played.runs[-1].off == ("a", "b", "d", "whole"), "the check: all others off"
    assert len(played.runs) <= 10


def test_two_that_only_help_together_are_both_named() -> None:
    found = looked(Played(wrong_unless(["b", "d"])))
    assert found.guilty == ("b", "d")
    assert "with b and d off the loss" in found.said


def test_it_goes_on_inside_a_switch() -> None:
    found = looked(Played(wrong_unless(["whole"], ["second part"])))
    assert found.guilty == ("second part",)
    assert "second part: what the second part does (a part of whole)" in found.remarks
    found = looked(Played(wrong_unless(["whole"])))
    assert found.guilty == ("whole",)
    assert "not its parts: the 3 switches within whole, off together, change nothing" in found.remarks


def test_rounding_is_no_fault() -> None:
    found = looked(Played(wrong_unless([], by=0.0)))
    assert (found.status, found.guilty) == ("pass", ())
    assert "without 5 optimisations the losses move by at most 5e-07: the size of rounding, judged by losses alone" in found.said
    same = looked(Played(lambda _off, _n: RIGHT))
    assert same.said == "losses of 3 steps are bitwise the same with and without 5 optimisations"


def test_a_training_that_does_not_repeat_itself_is_not_blamed_on_a_switch() -> None:
    found = looked(Played(lambda _, n: {step: loss * (1 + 0.03 * (n % 3)) for step, loss in RIGHT.items()}))
    assert found.status in ("pass", "could not tell")
    assert any("set seeds (trueup.seed_all)" in text for text in (found.said, *found.remarks))


def test_numbers_that_are_none_are_a_difference() -> None:
    found = looked(Played(lambda off, _: RIGHT if "a" in off else {0: math.nan, 1: math.nan, 2: math.nan}))
    assert found.guilty == ("a",)
    assert "becomes 2.00000 instead of nan" in found.said


def test_a_switch_that_the_command_does_not_survive_stays_on() -> None:
    found = looked(Played(wrong_unless(["c"]), lambda off: "it was killed by SIGSEGV" if "b" in off else ""))
    assert found.guilty == ("c",)
    assert "b was left on: without it it was killed by SIGSEGV" in found.remarks
    found = looked(Played(wrong_unless(["c"]), lambda off: "it ended with exit code 1" if len(off) > 1 else ""))
    assert found.status == "could not tell"
    assert found.said == "with everything off it ended with exit code 1"


def test_no_loss_and_no_repeat_are_said() -> None:
    assert looked(Played(lambda _off, _n: {})).said == NO_LOSS
    found = looked(Played(lambda _off, n: RIGHT if n != 1 else {}))
    assert (found.status, found.said) == ("could not tell", "run as it is again, it drew no loss")


@pytest.mark.parametrize(
    ("baseline", "status", "told"),
    [
        (RIGHT, "DEVIATES", "the run is 1.96 % apart from the baseline's loss of step 0 as it is, and 5e-07 without"),
        ({0: 2.0 * 1.02 * 1.5}, "pass", "so it does not explain the difference from the baseline"),
        ({7: 1.0}, "DEVIATES", "the baseline has no loss of step 0"),
    ],
)
def test_a_baseline_tells_which_is_right(baseline: dict[int, float], status: str, told: str) -> None:
    found = looked(Played(wrong_unless(["c"])), baseline)
    assert (found.status, found.guilty) == (status, ("c",))
    assert told in found.remarks[-1]
