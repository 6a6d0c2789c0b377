"""Which sets of changes are tried, how often, and what is known in the end.

    as it is                  fails, else there is nothing to find
    all changes               pass, else what is wrong lies outside the set
    both once more            the same again? Else each set is tried until a sequential test decides
    suspects, then halves     down to a set of which no change can be left out (ddmin)
    the set twice more        passes
    all but the set           and what lies around or inside it: fails; where it passes, there is another way to heal the run

Ordered changes (commits, numbers of steps) are halved: the first with which the check fails. Each outcome is written to
``journal.jsonl`` at once, so a search that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trueup.analysis.kept_runs import fewest
from trueup.foundation.model import TrueupError

Outcome = Literal["good", "bad", "skip"]
Chosen = tuple[str, ...]

WRONG = 0.1
"""How often a check that is not steady may say the opposite: the two hypotheses of Wald's sequential probability ratio test (1945)
are that it says "good" in 90 % and in 10 % of all runs."""
RISK = 0.01  # of a wrong decision, either way. Together: three runs more on one side than on the other decide.
MOST_REPEATS = 15  # runs of one set that decide nothing: then it counts as one that cannot be tried
LARGEST_JOURNAL = 1 << 26  # bytes that are read of it
INSTEAD = "name another directory with -o, or remove this one"
QUESTION = {"over": "--over", "items": "set of changes", "commands": "command", "captures": "capture"}
"""What makes two searches the same, in words, where that is not the key itself."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run and what the check said of it."""

    chosen: Chosen
    outcome: Outcome
    seconds: float
    why: str = ""  # why it could not be judged, in words


class Journal:
    """The attempts of a search, kept in ``file``, which is read if it exists. ``question`` (JSON) is what makes two searches the
    same: command, check, changes. Raises TrueupError, which says what to do ``instead``, if the file is another search's, or no
    journal."""

    def __init__(self, file: Path, question: dict[str, Any], instead: str = INSTEAD) -> None:
        self._file = file
        self.attempts: list[Attempt] = []
        if not file.exists():
            self._write({"version": 1, **question})
            return
        if file.stat().st_size > LARGEST_JOURNAL:
            raise _other(file, f"{file.stat().st_size:,} bytes", instead)
        lines = file.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
        try:
            header, *rows = [json.loads(line) for line in lines if line.endswith("\n")]  # a killed search leaves half a line
            found = [_attempt(row) for row in rows]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _other(file, "something else than a journal", instead) from None
        if header != _plain({"version": 1, **question}):
            raise _other(file, f"the journal of a search with another {_unlike(header, question)}", instead)
        self.attempts = found
        whole = "".join(line for line in lines if line.endswith("\n"))
        file.write_text(whole, encoding="utf-8")

    def add(self, attempt: Attempt) -> None:
        """Keep an attempt, on disk too."""
        self.attempts.append(attempt)
        self._write(asdict(attempt))

    def _write(self, row: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _attempt(row: dict[str, Any]) -> Attempt:
    if row["outcome"] not in ("good", "bad", "skip") or not all(isinstance(name, str) for name in row["chosen"]):
        raise ValueError
    return Attempt(tuple(row["chosen"]), row["outcome"], float(row["seconds"]), str(row["why"]))


def _unlike(header: Any, question: Mapping[str, Any]) -> str:
    """Say in what two searches differ."""
    held = header if isinstance(header, dict) else {}
    return " and ".join(QUESTION.get(key, key) for key in question if held.get(key) != _plain(question[key])) or "version"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _other(file: Path, got: str, instead: str) -> TrueupError:
    return TrueupError(
        f"{file} cannot be continued.\n  expected: the journal of this search\n  got:      {got}\n  next:     {instead}"
    )


Word = Literal["found", "nothing to find", "outside", "could not tell"]


@dataclass(frozen=True)
class Found:
    """What a search knows in the end."""

    word: Word
    chosen: Chosen = ()
    why: str = ""  # of "could not tell": in words; of "found" why the rest of the changes could not be judged
    others: bool = False  # whether the run is healed without these changes, too, by the rest of them
    rest: int = 0  # of how many: what changes the chosen ones, too, is none of them
    steady: bool = True  # whether the check said the same of the same set each time


def apart(one: str, other: str) -> bool:  # noqa: ARG001
    """Say of two changes that they have nothing in common."""
    return False


# No change, and all: the expected outcome, and the word otherwise
_ENDS: tuple[tuple[bool, Outcome, Word], ...] = ((False, "bad", "nothing to find"), (True, "good", "outside"))


@dataclass
class Search:
    """The search for the smallest set of ``items``, suspects first. The ``suspects`` are tried together before anything else;
    ``attempt`` runs the command with some changes and asks the check."""

    items: Chosen
    suspects: Chosen
    attempt: Callable[[Chosen], Attempt]
    journal: Journal
    said: Callable[[str], str] = str  # an item in a sentence
    overlap: Callable[[str, str], bool] = apart  # whether two items change something in common
    steady: bool = True
    _outcomes: dict[Chosen, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    _decided: dict[Chosen, Outcome] = field(default_factory=dict)

    def smallest(self) -> Found:
        """Return the smallest set with which the check passes."""
        if not self.items:
            return Found("could not tell", why="there is nothing that could be changed")
        nothing = {self._once(()) for _ in range(2)}
        everything = {self._once(self.items) for _ in range(2)} if nothing == {"bad"} else nothing
        self.steady = len(nothing) == len(everything) == 1
        found = self._reduced()
        if found is None:
            self.steady = False
            self._decided.clear()
            found = self._reduced()
        assert found is not None
        return found

    def _reduced(self) -> Found | None:
        """Return the result; None if a check that seemed steady changes its answer."""
        for chosen, wanted, word in _ENDS:
            outcome = self._decide(self.items if chosen else ())
            if outcome == "skip":
                which = "the run with all changes" if chosen else "the run as it is"
                return Found("could not tell", why=self._why(self.items if chosen else (), which), steady=self.steady)
            if outcome != wanted:
                return Found(word, steady=self.steady)
        whole = self.suspects if self.suspects and self._good(self.suspects) else self.items
        found = fewest(whole, self._good)
        if self.steady and found != self.items and any(self._once(found) != "good" for _ in range(2)):
            return None
        rest = tuple(name for name in self.items if not any(name == one or self.overlap(name, one) for one in found))
        without = self._decide(rest) if rest else "bad"
        why = self._why(rest, "that run") if without == "skip" else ""
        return Found("found", found, why, others=without == "good", rest=len(rest), steady=self.steady)

    def first_bad(self) -> Found:
        """Return the first of ordered changes with which the check fails; it passes before the first of them."""
        last = self.items[-1:]
        if not last:
            return Found("could not tell", why="there is nothing between the good and the bad end")
        outcome = self._decide(last)
        if outcome != "bad":
            why = self._why(last, self.said(last[0]))
            return Found("nothing to find") if outcome == "good" else Found("could not tell", last, why)
        low, high = -1, len(self.items) - 1  # good up to `low`, bad from `high` on
        while high - low > 1:
            middle = (low + high) // 2
            near = sorted(range(low + 1, high), key=lambda k: abs(k - middle))
            known = next(((k, one) for k in near if (one := self._decide((self.items[k],))) != "skip"), None)
            if known is None:
                return Found("could not tell", self.items[low + 1 : high + 1], "none of those between can be tried")
            low, high = (known[0], high) if known[1] == "good" else (low, known[0])
        found, before = (self.items[high],), self.items[max(low, 0) : low + 1]
        for _ in range(2):
            if self._once(found) != "bad":
                return Found("could not tell", found, f"{self.said(found[0])} failed, and passed when run again", steady=False)
        if before and self._once(before) != "good":
            return Found("could not tell", found, f"{self.said(before[0])} passed, and failed when run again", steady=False)
        return Found("found", found)

    def _good(self, chosen: Sequence[str]) -> bool:
        return self._decide(tuple(chosen)) == "good"

    def _decide(self, chosen: Chosen) -> Outcome:
        """Return a set's outcome: of its first run, or of the sequential test if the check is not steady."""
        if chosen not in self._decided:
            known = self._outcomes[chosen]
            self._decided[chosen] = self._by_test(chosen) if not self.steady else known[0] if known else self._once(chosen)
        return self._decided[chosen]

    def _by_test(self, chosen: Chosen) -> Outcome:
        known = self._outcomes[chosen]
        enough, weight = math.log((1 - RISK) / RISK), math.log((1 - WRONG) / WRONG)
        while True:
            ahead = known.count("good") - known.count("bad")
            if abs(ahead) * weight >= enough:
                return "good" if ahead > 0 else "bad"
            if len(known) >= MOST_REPEATS or known.count("skip") > 2:
                return "skip"
            self._once(chosen)

    def _once(self, chosen: Chosen) -> Outcome:
        """Run once more, or take the next attempt that a stopped search left."""
        left = [one for one in self.journal.attempts if one.chosen == chosen][len(self._outcomes[chosen]) :]
        if left:
            attempt = left[0]
        else:
            attempt = self.attempt(chosen)
            self.journal.add(attempt)
        self._outcomes[chosen].append(attempt.outcome)
        return attempt.outcome

    def _why(self, chosen: Chosen, which: str) -> str:
        said = [one.why for one in self.journal.attempts if one.chosen == chosen and one.why]
        return f"{which} cannot be judged: {said[-1] if said else 'the check said so (125)'}"
