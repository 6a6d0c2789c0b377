"""Public silent bugs, rebuilt: is the place named where the bug sits, and is the same training without it aligned?

Each case of `silent` is trained in a correct and a buggy form, and a second time correctly, with statistics only.
Prints what each comparison said: right, other place, could not tell or aligned, from all levels and from level ``api`` alone.

    case                             origin                          levels  buggy           correct
    accumulation-divides-twice       huggingface/accelerate#3533     all     right           aligned
    right at all: 20 of 34; correct aligned 34 of 34

`make bench-silent` runs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor

import trueup
from silent import CASES, Case, Form, Word
from trueup import simdev
from trueup.foundation.model import Result

LEVELS = {"all": None, "api": ["module", "api"]}


@dataclass
class Outcome:
    """What the comparison of one case said at one choice of levels."""

    name: str
    origin: str
    precision: str
    levels: str
    word: Word
    """Of the buggy form."""
    sound: str
    """Verdict of the second correct run: it should be ``aligned``."""
    truth: str
    said: str
    sound_said: str


def run(case: Case, form: Form, into: Path) -> tuple[list[float], list[Tensor]]:
    """Train a form of a case under capture; return its losses, and the weights and buffers that it ends with."""
    shutil.rmtree(into, ignore_errors=True)
    torch.manual_seed(0)
    training = case.build(form)
    torch.manual_seed(1)
    losses = []
    with training.around, trueup.capture(into, model=training.model, detail="stats") as capture:
        for _ in range(case.steps):
            losses.append(float(training.step()))
            capture.step()
    return losses, [kept.detach().cpu().float() for kept in training.model.state_dict().values()]


def said(result: Result) -> str:
    """Say in one line what a verdict names."""
    first = result.culprit
    if first is None:
        return " | ".join(result.sentence.splitlines()[:2])
    return f"{first.name} {first.level} {first.op} {first.kind} {first.error_out:.1e} of {first.expected:.1e}"


def check(case: Case, work: Path) -> Iterator[Outcome]:
    """Train the three forms and compare each of the others with the correct one."""
    forms: tuple[Form, ...] = ("correct", "buggy", "again")
    for form in forms:
        run(case, form, work / form)
    for name, levels in LEVELS.items():
        buggy = trueup.compare(work / "correct", work / "buggy", level=levels)
        sound = trueup.compare(work / "correct", work / "again", level=levels)
        word, truth = case.place(buggy), str(case.place)
        yield Outcome(case.name, case.origin, case.precision, name, word, sound.verdict, truth, said(buggy), said(sound))


def counts(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a line for each choice of levels."""
    lines = []
    outcomes = list(outcomes)
    for levels in LEVELS:
        some = [o for o in outcomes if o.levels == levels]
        words, aligned = Counter(o.word for o in some), sum(o.sound == "aligned" for o in some)
        rest = ", ".join(f"{word} {words[word]}" for word in ("other place", "could not tell", "aligned"))
        lines.append(f"right at {levels}: {words['right']} of {len(some)} ({rest}); correct aligned {aligned} of {len(some)}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write every row there")
    parser.add_argument("--counts", action="store_true", help="print no rows, only the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()  # before the first backward: autograd counts the devices then
    started, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as work:
        for name in options.only:
            for one in check(CASES[name], Path(work)):
                outcomes.append(one)
                if not options.counts:
                    print(f"{one.name:40} {one.origin:40} {one.levels:4} {one.word:15} {one.sound}", flush=True)
                    if one.word != "right":
                        print(f"    truth: {one.truth}; said: {one.said}", flush=True)
                    if one.sound != "aligned":
                        print(f"    of the correct run: {one.sound_said}", flush=True)
    print("\n".join(counts(outcomes)))
    print(f"{time.perf_counter() - started:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


if __name__ == "__main__":
    main()
