"""Which sets are tried: the smallest is found and verified, a check that is not steady is repeated, a stopped search goes on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import trueup
from trueup.analysis.bisection.changes import _is_inside, operators
from trueup.analysis.bisection.search import Attempt, Chosen, Found, Journal, Outcome, Search
from trueup.doors.report.executed import attempts_progress
from trueup.foundation.model import TrueupError
from trueup.foundation.store import open_capture

ITEMS = tuple("abcdefghij")


class Trial:
    """A training that some changes heal, and how often it was run."""

    def __init__(
        self, folder: Path, passes: Callable[[set[str]], bool], *, liar: random.Random | None = None, skips: Chosen | None = None
    ) -> None:
        self._passes, self._liar, self._skips = passes, liar, skips
        self.journal = folder / "journal.jsonl"
        self.runs: list[Chosen] = []

    def __call__(self, chosen: Chosen) -> Attempt:
        self.runs.append(chosen)
        good = self._passes(set(chosen))
        if self._liar is not None and self._liar.random() < 0.1:
            good = not good
        outcome: Outcome = "skip" if chosen == self._skips else "good" if good else "bad"
        return Attempt(chosen, outcome, 0.0)

    def search(self, items: Chosen = ITEMS, suspects: Chosen = ()) -> Search:
        return Search(items, suspects, self, Journal(self.journal, {"items": list(items)}))


@pytest.mark.parametrize("guilty", [{"a"}, {"j"}, {"c", "h"}, {"a", "e", "j"}, set(ITEMS)])
def test_the_smallest_set_is_found_and_verified(guilty: set[str], tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda chosen: guilty <= chosen)
    assert trial.search().smallest() == Found("found", tuple(sorted(guilty)), rest=len(ITEMS) - len(guilty))
    found = tuple(sorted(guilty))
    assert trial.runs.count(found) >= 3 if found != ITEMS else trial.runs.count(found) == 2
    assert found == ITEMS or trial.runs.count(tuple(name for name in ITEMS if name not in guilty)) >= 1


def test_nothing_to_find_and_nothing_that_helps(tmp_path: Path) -> None:
    right = Trial(tmp_path, lambda _: True)
    assert right.search().smallest().word == "nothing to find"
    assert right.runs == [(), ()], "what heals a run that is right is not asked"
    (tmp_path / "journal.jsonl").unlink()
    assert Trial(tmp_path, lambda _: False).search().smallest().word == "outside"
    (tmp_path / "journal.jsonl").unlink()
    assert Trial(tmp_path, lambda _: False).search(items=()).smallest().word == "could not tell"


def test_another_way_to_heal_is_said(tmp_path: Path) -> None:
    found = Trial(tmp_path, lambda chosen: bool(chosen & {"b", "i"})).search().smallest()
    assert found.word == "found"
    assert found.chosen in (("b",), ("i",))
    assert found.others


def test_what_changes_the_chosen_ones_too_is_no_other_way_to_heal(tmp_path: Path) -> None:
    items = ("a", "a.up", "b", "b.up", "c")
    trial = Trial(tmp_path, lambda chosen: bool(chosen & {"a", "a.up"}) and bool(chosen & {"b", "b.up"}))
    search = Search(items, (), trial, Journal(trial.journal, {}), overlap=_is_inside)
    assert (found := search.smallest()) == Found("found", found.chosen, rest=1)
    assert trial.runs[-1] == ("c",)


def test_suspects_are_tried_together_first(tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda chosen: {"c", "d"} <= chosen)
    items = ("c", "d", *(name for name in ITEMS if name not in "cd"))
    assert trial.search(items, suspects=("c", "d")).smallest().chosen == ("c", "d")
    assert trial.runs[4] == ("c", "d")
    assert len(trial.runs) <= 10


def test_what_cannot_be_tried_is_passed_over_or_said(tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda chosen: "c" in chosen, skips=tuple("abcde"))
    assert trial.search().smallest().chosen == ("c",)
    trial = Trial(tmp_path / "all", lambda chosen: "c" in chosen, skips=ITEMS)
    trial.journal.parent.mkdir()
    found = trial.search().smallest()
    assert found.word == "could not tell"
    assert "the run with all changes cannot be judged" in found.why


def test_a_check_that_is_wrong_one_time_in_ten_still_finds_it(tmp_path: Path) -> None:
    right = wrong = 0
    for seed in range(40):
        trial = Trial(tmp_path, lambda chosen: {"b", "g"} <= chosen, liar=random.Random(seed))
        trial.journal.unlink(missing_ok=True)
        found = trial.search().smallest()
        wrong += found.word == "found" and not {"b", "g"} <= set(found.chosen)  # what is said to heal does not
        right += found.word == "found" and found.chosen == ("b", "g")
    assert right >= 34
    assert wrong <= 2


@pytest.mark.parametrize("after", [0, 3, 7, 11])
def test_a_stopped_search_goes_on_where_it_was(after: int, tmp_path: Path) -> None:
    whole = Trial(tmp_path, lambda chosen: {"b", "g"} <= chosen)
    expected = whole.search().smallest()
    lines = whole.journal.read_text(encoding="utf-8").splitlines(keepends=True)
    whole.journal.write_text("".join(lines[: after + 1]) + lines[after + 1][:9], encoding="utf-8")  # killed while it wrote
    second = Trial(tmp_path, lambda chosen: {"b", "g"} <= chosen)
    assert second.search().smallest() == expected
    assert second.runs == whole.runs[after:]


@pytest.mark.parametrize("text", ['{"version": 1, "items": ["x"]}\n', "no JSON\n", '{"version": 1}\n{"chosen": 3}\n', "[]\n[]\n"])
def test_a_file_that_is_no_journal_of_this_search(text: str, tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda _: True)
    trial.journal.write_text(text, encoding="utf-8")
    with pytest.raises(TrueupError, match="cannot be continued") as caught:
        trial.search()
    assert "next:     name another directory with -o, or remove this one" in str(caught.value)


@pytest.mark.parametrize("bad_from", [0, 1, 5, 9])
def test_the_first_bad_of_a_history(bad_from: int, tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda chosen: ITEMS.index(*chosen) < bad_from)
    assert trial.search().first_bad() == Found("found", (ITEMS[bad_from],))
    assert len(trial.runs) <= 9


def test_a_history_with_gaps_and_one_that_is_good(tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda chosen: ITEMS.index(*chosen) < 6, skips=("e",))
    assert trial.search().first_bad().chosen == ("g",)
    good = Trial(tmp_path / "good", lambda _: True)
    good.journal.parent.mkdir()
    assert good.search().first_bad().word == "nothing to find"


def test_a_sentence_names_changes_as_they_are_said(tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda _: False, skips=ITEMS[-1:])
    journal = Journal(trial.journal, {"items": list(ITEMS)})
    found = Search(ITEMS, (), trial, journal, lambda name: f"{name} steps").first_bad()
    assert found.why == "j steps cannot be judged: the check said so (125)"


def test_what_is_unlike_in_a_journal_is_named(tmp_path: Path) -> None:
    Journal(tmp_path / "j", {"over": "scopes", "items": ["a"]})
    with pytest.raises(TrueupError, match="got:      the journal of a search with another set of changes\n"):
        Journal(tmp_path / "j", {"over": "scopes", "items": ["b"]})


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((), "as it is"),
        (("layers.1", "layers.4"), "layers.1, layers.4"),
        (tuple(f"layers.{n}.attn.c_proj" for n in range(40)), "layers.0.attn.c_proj, layers.1.attn.c_proj and 38 more"),
        (("x" * 70, "layers.1"), "x" * 29 + "\N{HORIZONTAL ELLIPSIS}" + "x" * 19 + " and 1 more"),
        (("a\x1b[2Jb",), "a\\x1b[2Jb"),
    ],
)
def test_a_run_is_told_with_whole_names(chosen: Chosen, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    attempts_progress(Console(width=120))(Attempt(chosen, "good", 1.5))
    assert capsys.readouterr().out.rstrip() == f"   1  {said:<60}     1.5 s  good"


@pytest.mark.parametrize("autocast", [True, False])
def test_a_function_under_autocast_gives_what_it_computed(autocast: bool, tmp_path: Path) -> None:
    """Its result in 16 bits would have lost it; where nothing casts, the code after it takes no other dtype."""
    x = torch.ones(2, 2) if autocast else torch.ones(2, 2, dtype=torch.bfloat16)
    with trueup.capture(tmp_path / "run"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.matmul(x, x)
    changes = operators(open_capture(tmp_path / "run"), ["float32"])
    assert changes.items == ("torch.matmul",)
    policy = changes.setup(changes.items, tmp_path).policy
    assert policy is not None
    assert ('returns = "float32"' in policy) == autocast
