"""What Trueup says of some sixty runs, kept line by line: `--check` prints each line that a change of the verdict changes.

    bert.json
    - softmax-backward aten: deviates; 1 culprits; first bert.encoder.layer.1.attention.self backward step 0 aten ...
    + softmax-backward aten: aligned; 0 culprits; 0 unmatched

`--write` records what is said now into tests/verdict/goldens; whoever commits that explains each line. Kept is what no processor
changes: words, places and counts, and no number that was rounded. tests/verdict/test_goldens.py checks the quick groups.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import locate
import trueup
import zoo
from trueup import simdev
from trueup.foundation.model import Result

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "verdict" / "goldens"

Lines = Iterator[tuple[str, str]]
"""What was run, and what was said of it."""

LEVELS = {"module": ["module"], **locate.LEVELS}
FAULTS: dict[str, tuple[str, ...]] = {
    "centernet": ("lstm-backward-cell-gate", "conv-padding-replicates-edge"),
    "bert": ("layer-norm-epsilon", "softmax-backward", "gelu-tanh-for-erf"),
    "gpt2": ("log-softmax-backward", "adam-epsilon-inside-root"),
    "gpt2-eager": ("tanh-table-lookup", "dropout-no-rescale"),
    "llama": ("rsqrt-newton-short", "attention-scale"),
    "vit": ("gelu-backward", "attention-backward-query-scale"),
    "lstm_tagger": ("index-put-accumulate-lost", "sgd-momentum-dampened"),
    "resnet": ("batch-norm-running-variance-biased", "max-pool-ties"),
    "unet": ("group-norm-unbiased-variance", "upsample-align-corners"),
}
ROUNDING = ("N results were compared", "N result was compared", "could be rounding")
"""How notes begin that one processor has cause for and another has not."""
NOISE = "reordered-reductions"
NOISY = ("gpt2", "lstm_tagger", "resnet")
"""Models that also run under noise."""


def kind_of(note: str) -> str:
    """Return the first words of a note, without paths and numbers."""
    plain = re.sub(r"\S*/\S*", "PATH", note)
    return " ".join(re.sub(r"\d[\d,.e+-]*", "N", plain).split()[:6])


def summary(result: Result) -> str:
    """Return a comparison in a line: verdict, culprits, the first of them, what is unmatched, the kinds of its notes."""
    certain = [c for c in result.culprits if c.confidence == "high"]
    found = [f"{result.verdict}; {len(certain)} culprits"]
    if result.culprit is not None:
        c = result.culprit
        found.append(f"first {c.scope} {c.phase} step {c.step} {c.level} {c.op} {c.kind}")
    found.append(f"{result.counts['unmatched']} unmatched")
    kinds = {kind_of(note) for note in result.notes}
    return "; ".join([*found, *sorted(f"note: {kind}" for kind in kinds if not kind.startswith(ROUNDING))])


def compared(model: str, work: Path) -> Lines:
    """Yield a model of the zoo on the healthy device, under noise, and with faults, at each level."""
    baseline, candidate = work / "cpu", work / "npu"
    locate.run(model, "cpu", baseline)
    for what in ("healthy", *((NOISE,) if model in NOISY else ()), *FAULTS[model]):
        simdev.heal()
        if what == "healthy":
            locate.run(model, "npu", candidate)
        elif what == NOISE:
            with simdev.noise(what):
                locate.run(model, "npu", candidate)
        else:
            locate.run_broken(model, what, candidate)
        for level, chosen in LEVELS.items():
            yield f"{what} {level}", summary(trueup.compare(baseline, candidate, level=chosen))
    simdev.heal()


def overflowed(work: Path) -> Lines:
    """Yield trainings that overflow, and healthy ones full of infinities."""
    import overflow_faults
    from anomalies import planted

    del work
    trainings = {name: getattr(planted, name) for name in planted.ORIGINS} | {one.__name__: one for one in planted.HEALTHY}
    for name, train in trainings.items():
        for level in overflow_faults.LEVELS:
            found = overflow_faults.judged(train, level)
            said, first = f"{len(found.anomalies)} anomalies", found.first
            if first is not None:
                said += f"; {first.kind} {first.place.scope} {first.place.phase} step {first.place.step} {first.place.op}"
            yield f"{name} {level}", said


def replayed(model: str, work: Path) -> Lines:
    """Yield what a replay blames: on the healthy device, under noise, with faults."""
    import replay_faults

    for cell in replay_faults.table([model], FAULTS[model], [NOISE], work):
        yield cell.what, f"{cell.word}; {cell.beside} blamed beside"


def shadowed(model: str, work: Path) -> Lines:
    """Yield what a shadow run blames."""
    import shadow_faults

    del work
    for cell in shadow_faults.table([model], FAULTS[model], [NOISE]):
        yield cell.what, f"{cell.word}; {cell.truth}"


def followed(work: Path) -> Lines:
    """Yield what the recipe for Paddle says of small recordings made by hand."""
    from recipes.runs import pair, run
    from trueup.analysis.recipes import follow

    changes: dict[str, Callable[[], Any]] = {
        "healthy": run,
        "forward of body.second": partial(run, "body.second"),
        "backward of body.first": partial(run, "body.first", backward=True),
        "forward of stem at api": partial(run, "stem", level="api"),
        "other data": partial(run, data=0.5),
        "other losses": partial(run, losses=(2.0, 2.5)),
    }
    for number, (name, make) in enumerate(changes.items()):
        (folder := work / str(number)).mkdir()
        baseline = run(level="api" if "at api" in name else "module")
        result = follow(*pair(folder, baseline, make()), "paddle", every=True)
        yield name, f"{result.verdict}; " + ", ".join(f"{o.name} {o.status} {o.scope or ''}".strip() for o in result.outcomes)


def aligned(other: str, work: Path) -> Lines:
    """Yield pairs of a model in PyTorch and its port, in a process of their own: two frameworks are not loaded into this one."""
    del work
    program = f"import goldens; goldens.print_ports({other!r})"
    command = [sys.executable, "-W", "ignore", "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "benchmarks", check=False)
    if printed.returncode:
        raise RuntimeError(f"the ports to {other} could not be compared: {printed.stderr[-2000:]}")
    yield from json.loads(printed.stdout.splitlines()[-1]).items()


def print_ports(other: str) -> None:
    """Print the lines of all pairs and planted differences of a framework, as JSON."""
    import align_frameworks

    align_frameworks.pairs = pairs = import_module(align_frameworks.MODULES[other])
    lines = {name: summary(align_frameworks._run(name, "", 2, "stats").result) for name in pairs.PAIRS}
    for difference, (name, *_) in pairs.DIFFERENCES.items():
        found = align_frameworks._run(name, difference, 1, "stats")
        lines[difference] = f"{summary(found.result)}; {len(found.findings)} settings differ"
    print(json.dumps(lines))


GROUPS: dict[str, Callable[[Path], Lines]] = {
    **{name: partial(compared, name) for name in zoo.MODELS},
    "overflow": overflowed,
    "recipe": followed,
    **{f"replay-{name}": partial(replayed, name) for name in ("resnet",)},
    **{f"shadow-{name}": partial(shadowed, name) for name in ("gpt2", "unet")},
    "align-paddle": partial(aligned, "paddle"),
    "align-keras": partial(aligned, "keras"),
}
QUICK = ("overflow", "recipe", "resnet")
"""Groups that the tests check: ten seconds together."""


def said(group: str) -> list[str]:
    """Run a group and return its lines."""
    torch.set_num_threads(1)
    simdev.install()  # before the first backward: the engine counts devices then
    with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [f"{name}: {words}" for name, words in GROUPS[group](Path(work))]


def kept(group: str) -> list[str]:
    """Read the lines that were recorded of a group."""
    path = FOLDER / f"{group}.json"
    return list(json.loads(path.read_text())) if path.exists() else []


def write(group: str, lines: list[str]) -> None:
    """Record the lines of a group."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{group}.json").write_text(json.dumps(lines, indent=1) + "\n")


def differences(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """Return the lines that went, with ``-``, and those that came, with ``+``."""
    return [line for line in difflib.ndiff(list(before), list(now)) if line[0] in "+-"]


def main() -> None:
    """Record the goldens or compare with them; the exit status is 1 if a line differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="record what is said now")
    what.add_argument("--check", action="store_true", help="print what is said otherwise")
    parser.add_argument("groups", nargs="*", default=[], choices=[*GROUPS, []], metavar="GROUP")
    options = parser.parse_args()
    changed = 0
    for group in options.groups or GROUPS:
        now = said(group)
        lines = differences(kept(group), now)
        changed += len(lines)
        print("\n".join([f"{group}.json: {len(now)} lines, {len(lines)} differ", *lines]), flush=True)
        if options.write:
            write(group, now)
    raise SystemExit(1 if options.check and changed else 0)


if __name__ == "__main__":
    main()
