"""One setting is changed in a training: does the first line of the verdict name it?

Each script of `setting_changes` is trained once as it is and once for each change, and a second time as it is.

    script      first line  elsewhere  not named  wrong cause  both of two  undone: kept  again
    plain               28          4          2            0      9 of 10       9 of 10  aligned

With ``--undo`` each pair of changes is trained again without the one that the first line names: what is left has to be what the
verdict called independent, and nothing else.

`make bench-settings` runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trueup
from setting_changes.options import CHANGES, Change, Options
from trueup.analysis.remedy.undoing import by_hand
from trueup.foundation.model import Result

SCRIPTS = ("plain", "trainer", "lightning", "ranks", "keras", "paddle")
TORCH = ("torch", "torch._dynamo", "trueup.recording.adapters.torch.session")
PRELOADED = {"plain": TORCH, "trainer": (*TORCH, "transformers"), "lightning": TORCH, "ranks": TORCH}
"""What the server of processes imports once: PyTorch's first optimizer imports Dynamo. Keras and Paddle begin threads when they are
imported, and are not to find PyTorch there: each of their trainings begins with an interpreter of its own."""
WORDS = ("first line", "noted", "elsewhere", "not named", "wrong cause")
"""Where a change is named; ``noted``: in a note of runs that are aligned, so that there is nothing to explain."""


@dataclass
class Cell:
    """What a comparison said of a script in which settings were changed."""

    script: str
    changes: tuple[str, ...]
    words: tuple[str, ...]
    """Of each change: one of `WORDS`."""
    further: int
    """Culprits beside, that name none of the changes."""
    said: str
    undone: str = ""
    """What came of a pair once the change in the first line was undone: ``kept``, or what was not left as it was said."""


def record(script: str, options: Options, into: Path) -> None:
    """Train under capture in a process of its own, so that nothing of one training is left in the next.

    PyTorch's are forked from one that has imported and computed nothing else: autograd's threads do not survive a fork.
    """
    context = multiprocessing.get_context("forkserver" if script in PRELOADED else "spawn")
    if script in PRELOADED:
        context.set_forkserver_preload(["trueup", *PRELOADED[script]])
    child = context.Process(target=train, args=(script, asdict(options), str(into)))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"the training {script} failed: {options}")


def train(script: str, options: dict[str, Any], into: str) -> None:
    """Train under capture in this process, which has computed nothing yet."""
    importlib.import_module(f"setting_changes.{script}").record(Options(**options), Path(into))


def word(change: Change, result: Result, beside: Sequence[Change] = ()) -> str:
    """Say where a verdict names a change; ``beside``: others that were made at once, which the first line may name."""
    first, *rest = result.sentence.splitlines()
    if re.search(change.says, first):
        return "first line"
    if re.search(change.says, "\n".join(rest)):
        return "noted" if result.verdict == "aligned" else "elsewhere"
    explained = any(re.search(one.says, first) for one in beside)
    return "wrong cause" if result.culprit is not None and result.culprit.cause and not explained else "not named"


def further(changes: Sequence[Change], result: Result) -> int:
    """Count culprits of which no setting is the cause, beside the one in the first line."""
    said = [one.cause or one.sentence for one in result.culprits[1:]]
    return sum(not any(re.search(change.says, one) for change in changes) for one in said)


def cell(script: str, names: Sequence[str], work: Path, *, undo: bool = False) -> Cell:
    """Train a script with all of some changes and compare it with the one that has none; ``undo`` the first named of two."""
    changes = [CHANGES[name] for name in names]
    both = {name: value for change in changes for name, value in change.both.items()}
    baseline = dataclasses.replace(Options(), **both)
    candidate = dataclasses.replace(baseline, **{name: value for change in changes for name, value in change.candidate.items()})
    first = work / f"{script}-{'-'.join(f'{name}={value}' for name, value in sorted(both.items()))}"
    if not first.exists():
        record(script, baseline, first)
    second = work / f"{script}-{'+'.join(names) or 'again'}"
    shutil.rmtree(second, ignore_errors=True)
    record(script, candidate, second)
    result = trueup.compare(first, second)
    words = tuple(word(change, result, changes) for change in changes) or (result.verdict,)
    undone = _undone(script, baseline, changes, (first, second, result)) if undo and len(changes) == 2 else ""
    return Cell(script, tuple(names), words, further(changes, result), result.sentence, undone)


def _undone(script: str, baseline: Options, changes: Sequence[Change], compared: tuple[Path, Path, Result]) -> str:
    """Train without the change that the first line names: is what is left what the verdict called independent?"""
    first, second, before = compared
    line, *rest = before.sentence.splitlines()
    matching = [one for one in changes if re.search(one.says, line)]
    if not matching:
        return "none named"
    named = min(matching, key=lambda one: bool(re.search(one.says, "\n".join(rest))))  # what stands further down, too, is another
    (left,) = (one for one in changes if one is not named)
    third = second.with_name(f"{second.name}-undone")
    record(script, dataclasses.replace(baseline, **left.candidate), third)
    kept = by_hand(before, trueup.compare(first, third))
    if kept.holds:
        return "kept"
    broken = (("new", kept.new), ("lost", kept.lost), ("stays", () if kept.gone else kept.undone))
    return "; ".join(f"{word}: {', '.join(some)}" for word, some in broken if some)


def pairs(script: str, number: int) -> list[tuple[str, str]]:
    """Return pairs of changes that can be made at once, drawn once for all: no setting is changed by both. A pair in which one
    has no effect beside the other is drawn and left out."""
    known = [(a, b) for a, b in itertools.combinations(possible(script), 2) if _apart(CHANGES[a], CHANGES[b])]
    return [(a, b) for a, b in random.Random(0).sample(known, number) if _act(CHANGES[a], CHANGES[b])]


def _act(*changes: Change) -> bool:
    set_to = {name: value for change in changes for name, value in change.both.items()}
    return all(set_to.get(name, value) == value for change in changes for name, value in change.needs.items())


def _apart(a: Change, b: Change) -> bool:
    held = [{*change.candidate, *change.both} for change in (a, b)]
    return not held[0] & held[1]


def possible(script: str) -> list[str]:
    """Return the changes that make sense in a script."""
    return [name for name, change in CHANGES.items() if script not in change.without]


def counts(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each script: of single changes, of pairs, and of the run again."""
    lines = [f"{'script':10}{''.join(f'{one:>13}' for one in WORDS)}{'further':>9}  both of two  again"]
    for script in dict.fromkeys(one.script for one in cells):
        mine = [one for one in cells if one.script == script]
        single = [one for one in mine if len(one.changes) == 1]
        found = Counter(one.words[0] for one in single)
        two = [set(one.words) for one in mine if len(one.changes) == 2]
        named = sum(words <= {"first line", "noted", "elsewhere"} for words in two)
        kept = [one.undone == "kept" for one in mine if one.undone]
        again = next((one.words[0] for one in mine if not one.changes), "")
        beside = sum(one.further > 0 for one in single)
        lines.append(
            f"{script:10}{''.join(f'{found[one]:13}' for one in WORDS)}{beside:9}  {f'{named} of {len(two)}':>11}"
            f"  {f'{sum(kept)} of {len(kept)}':>12}  {again}"
        )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="*", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--only", nargs="*", choices=list(CHANGES), metavar="CHANGE", help="these changes alone")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs of changes, beside the single ones")
    parser.add_argument("--undo", action="store_true", help="train each pair again without the change that was named first")
    parser.add_argument("--json", type=Path, help="write every cell there")
    parser.add_argument("--say", action="store_true", help="print each verdict")
    parser.add_argument("--work", type=Path, help="keep captures there")
    options = SimpleNamespace(**vars(parser.parse_args()))  # what argparse holds would be found as the trainings' own
    started, cells = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        for script in options.scripts:
            names = [name for name in options.only or possible(script) if name in possible(script)]
            asked = [(), *((name,) for name in names), *(pairs(script, options.pairs) if options.pairs else [])]
            for some in asked:
                one = cell(script, some, options.work or Path(scratch), undo=options.undo)
                cells.append(one)
                print(
                    f"{script:10} {' + '.join(some) or 'again':30} {', '.join(one.words):24} {one.further or ''} {one.undone}",
                    flush=True,
                )
                if options.say:
                    print(one.said, flush=True)
    print("\n".join(counts(cells)))
    print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in cells], indent=1))


if __name__ == "__main__":
    main()
