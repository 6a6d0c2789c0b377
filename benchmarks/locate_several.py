"""Several independent faults in one run: is each of them named, and nothing that only passes them on?

Trainings of `tests/zoo` and of `strange` run on the CPU, which itself plays the broken device (`strange.Altered`), with two or
three faults at once: of the simulated device's table, and settings and formulas changed in the model (`PLANTS`); in float32, in
float32 with sums in another order, and under bfloat16 autocast. Each fault is also planted alone.

    bert float32+noise gelu-backward+softmax-backward+epsilon-of-two-norms aten named 3 of 3 (deviates, 0.8 s)
    alone at aten float32: 11 of 12 named, with false culprits 0, stray calls 0
      several at aten float32: all named in 7 of 8, some in 8; with false culprits 0, stray calls 0

``record`` writes the captures of the chosen models with the truth beside them, ``judge`` compares what was recorded, so that a
change of the comparison is measured in minutes; without either both are done, in a folder for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torch.nn.functional as F
from torch import nn

import locate
import trueup
import zoo
from locate import LEVELS
from strange import PLAIN, STRANGERS, Altered
from trueup import simdev
from trueup.foundation.model import Finding, Result
from trueup.recording.adapters.torch import session as capturing
from trueup.simdev import injection

STEPS = 2
NOISE = "reordered-reductions"
PRECISIONS = ("float32", "float32+noise", "bfloat16")
TWO, THREE = 5, 3
"""Runs with two and with three faults for each model and precision."""
ALONE = 9
"""Faults of the device for each model and precision, drawn with the model's name as seed."""
VISIBLE = {"float32": 2e-6, "float32+noise": 2e-6, "bfloat16": 2.0**-7}
"""Relative L2 change of one result from which somebody could tell a fault from rounding."""


@dataclass
class Job:
    """A model, its optimizer and a function that trains one step."""

    model: nn.Module
    step: Callable[[], Any]
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Plant:
    """A fault that is made in the model, and where it shows: scopes, and the phase."""

    change: Callable[[Job], list[str]]
    phase: str
    """Where it shows: in all modules whose scopes ``change`` returns, or anywhere in the phase if it returns none."""


def _norms(job: Job) -> list[str]:
    """Normalise with another epsilon in the first and in the last norm."""
    found = [(name, one) for name, one in job.model.named_modules() if any(hasattr(one, e) for e in ("eps", "variance_epsilon"))]
    if len(found) < 2:
        return []
    for _, one in (found[0], found[-1]):
        setattr(one, "eps" if hasattr(one, "eps") else "variance_epsilon", 3e-2)
    return [found[0][0], found[-1][0]]


def _linear(job: Job) -> list[str]:
    """Multiply the weight of the middle linear layer by 1.01 when it is used."""
    found = [(name, one) for name, one in job.model.named_modules() if type(one) is nn.Linear]
    if not found:
        return []
    name, one = found[len(found) // 2]
    one.forward = lambda x: F.linear(x, one.weight * 1.01, one.bias)
    return [name]


def _second_moment(job: Job) -> list[str]:
    """Let the optimizer forget faster: another beta2, or another momentum."""
    for group in job.optimizer.param_groups if job.optimizer is not None else ():
        if "betas" in group:
            group["betas"] = (group["betas"][0], 0.9)
        else:
            group["momentum"] = 0.5
    return [""] if job.optimizer is not None else []


PLANTS = {
    "epsilon-of-two-norms": Plant(_norms, "forward"),
    "scaled-weight": Plant(_linear, "forward"),
    "optimizer-setting": Plant(_second_moment, "optimizer"),
}


@dataclass
class Outcome:
    """What a comparison said of one run."""

    model: str
    precision: str
    faults: list[str]
    level: str
    named: list[str]
    false: list[str]
    """Culprits that no fault made."""
    stray: int
    """Calls marked as culprits, beside the first of their kind, that no fault made."""
    missed: list[str]
    """Of each fault that was not named, the call with the largest excess of those that it made."""
    verdict: str
    seconds: float


class _Noting(list[Any]):
    """The simulator's list of fired faults, noting ``(step, seq, relative change)`` of each by the fault's name."""

    change = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.truth: dict[str, list[tuple[int, int, float]]] = {}

    def append(self, fired: Any) -> None:
        current = capturing.running.session
        if current is not None and not current.threads.state.busy:
            place = current.recorder.step, current.recorder._last, _Noting.change
            self.truth.setdefault(fired.fault, []).append(place)
        _Noting.change = 0.0


_overwrite = injection._overwrite


def _measured(healthy: Any, wrong: Any) -> bool:
    """Overwrite a result as the simulator does, and note how far it was changed."""
    if isinstance(healthy, torch.Tensor) and wrong is not None:
        before = healthy.detach().double()
        apart = float((wrong.detach().double() - before).norm() / before.norm().clamp_min(1e-30))
        _Noting.change = max(_Noting.change, apart)
    return _overwrite(healthy, wrong)


def build(model: str, precision: str) -> Job:
    """Build a training on the CPU; in bfloat16 the forward of each module runs under autocast."""
    if model in STRANGERS:
        torch.manual_seed(0)
        steps = STRANGERS[model].build(PLAIN, "cpu")
        torch.manual_seed(1)
        job = Job(steps.model, steps.step, None)
    else:
        training = zoo.build(model, "cpu")
        job = Job(training.model, training.step, training.optimizer)
    if precision == "bfloat16":
        for module in job.model.modules():
            module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)
    return job


def run(model: str, precision: str, faults: Sequence[str], into: Path, detail: str = "stats") -> dict[str, Any]:
    """Train under capture; return, by fault, the scopes where it shows or the calls that it changed."""
    shutil.rmtree(into, ignore_errors=True)
    simdev.heal()
    noting = injection._fired = _Noting()
    job = build(model, precision)
    truth: dict[str, Any] = {name: PLANTS[name].change(job) for name in faults if name in PLANTS}
    with contextlib.ExitStack() as stack:
        if faults and precision.endswith("noise"):
            stack.enter_context(simdev.noise(NOISE))
        for name in faults:
            if name not in PLANTS:
                stack.enter_context(simdev.inject(name))
        stack.enter_context(Altered())
        capture = stack.enter_context(trueup.capture(into, model=job.model, detail=detail))
        for _ in range(STEPS):
            job.step()
            capture.step()
    simdev.heal()
    injection._fired = []
    return truth | noting.truth


def executed(model: str, precision: str) -> set[str]:
    """Train a step and return which of the operators that can be broken it executes."""
    with Altered():
        return locate.executed(lambda: build(model, precision).step())


def record(model: str, precision: str, into: Path, detail: str = "stats") -> None:
    """Record the healthy run, each fault alone and some together; what shows nothing is not kept."""
    draw = random.Random(f"{model} {precision}")
    truths: dict[str, Any] = {}
    run(model, precision, [], into / "healthy")
    operators = executed(model, precision)
    names = [name for name, row in simdev.FAULTS.items() if not operators.isdisjoint(row.ops)]
    alone = []
    for name in [*draw.sample(names, len(names)), *PLANTS]:
        if len(alone) >= ALONE and name not in PLANTS:
            continue
        truth = run(model, precision, [name], into / name, detail).get(name, [])
        if _shows(truth, precision):
            truths[name] = {name: truth}
            alone.append(name)
        else:
            shutil.rmtree(into / name, ignore_errors=True)
    for count, wanted in ((2, TWO), (3, THREE)):
        for chosen in _combinations(alone, count, wanted, draw):
            key = "+".join(chosen)
            truths[key] = run(model, precision, chosen, into / key, detail)
    (into / "truth.json").write_text(json.dumps(truths))


def _shows(truth: Sequence[Any], precision: str) -> bool:
    return any(isinstance(one, str) or one[2] > VISIBLE[precision] for one in truth)


def _combinations(names: Sequence[str], count: int, wanted: int, draw: random.Random) -> Iterator[tuple[str, ...]]:
    """Yield some combinations of faults of which no two break the same operator."""
    seen: set[tuple[str, ...]] = set()
    for _ in range(50 * wanted):
        chosen = tuple(sorted(draw.sample(names, min(count, len(names)))))
        ops = [op for name in chosen for op in (simdev.FAULTS[name].ops if name in simdev.FAULTS else (name,))]
        if len(chosen) == count and chosen not in seen and len(set(ops)) == len(ops) and len(seen) < wanted:
            seen.add(chosen)
            yield chosen


class _Calls:
    """The candidate's calls, to ask which fault one belongs to."""

    def __init__(self, candidate: Path, truth: dict[str, Any]) -> None:
        columns = ["seq", "step", "parent", "scope", "phase", "level", "op", "forward_seq"]
        rows = trueup.open_capture(candidate).records(columns=columns).to_pylist()
        self.rows = {(row["step"], row["seq"]): row for row in rows}
        self.truth = truth
        self.around = {
            name: {key for step, seq, _ in places for key in self._around(step, seq)}
            for name, places in truth.items() if name not in PLANTS
        }  # fmt: skip

    def _around(self, step: int, seq: int) -> Iterator[tuple[int, int]]:
        """Yield a call and the functions around it."""
        yield step, seq
        row = self.rows.get((step, seq))
        while row is not None and (row := self.rows.get((step, row["parent"]))) is not None and row["level"] == "api":
            yield step, row["seq"]

    def faults(self, step: int, seq: int, finding: Finding | None = None) -> list[str]:
        """Return the faults that made what a call shows; of the model's own settings those whose module it is in."""
        row = self.rows.get((step, seq), {})
        keys = {(step, seq)}
        if row.get("level") == "api":  # a result that the function does not return shows in its backward only
            keys.add((step, row["forward_seq"]))
        found = [name for name, places in self.around.items() if keys & places]
        scope, phase = (finding.scope, finding.phase) if finding is not None else (row.get("scope"), row.get("phase"))
        for name, scopes in self.truth.items():
            if name in PLANTS and phase == PLANTS[name].phase and (scopes == [""] or scope in scopes):
                found.append(name)
        return found

    def loudest(self, name: str, result: Result) -> str:
        """Return numbers of the call that a fault made with the largest excess over what is explained."""
        rows = [row for row in result.matched.to_pylist() if name in self.faults(row["step"], row["seq_candidate"])]
        if not rows:
            return "no call was compared"
        row = max(rows, key=lambda row: (row["role"] != "culprit", row["ratio"] or 0.0))
        numbers = f"{row['error_in']:.1e} > {row['error_out']:.1e} of {row['expected']:.1e}"
        return f"{row['scope']} {row['op']} {row['phase']} step {row['step']} {numbers} {row['rule']}"

    def is_complete(self, name: str, named: set[str]) -> bool:
        """Tell whether all places of a setting of the model were named."""
        return name not in PLANTS or PLANTS[name].phase == "optimizer" or set(self.truth[name]) <= named


def judge(model: str, precision: str, key: str, truth: dict[str, Any], work: Path, levels: Sequence[str]) -> Iterator[Outcome]:
    """Compare a recorded run with the healthy one."""
    calls = _Calls(work / key, truth)
    for level in levels:
        started = time.perf_counter()
        result = trueup.compare(work / "healthy", work / key, level=LEVELS[level])
        seconds = time.perf_counter() - started
        named: set[str] = set()
        scopes: set[str] = set()
        false = []
        for finding in result.culprits:
            its = calls.faults(finding.step, finding.seq[1], finding)
            named.update(its)
            scopes.add(finding.scope)
            if not its:
                what = f"{finding.error_in:.1e} > {finding.error_out:.1e} of {finding.expected:.1e}"
                false.append(f"{finding.name} {finding.level} {finding.op} {finding.kind} {what} (+{finding.alike}) {finding.rule}")
        marked = result.matched
        marked = marked.filter(marked["role"].to_numpy(zero_copy_only=False) == "culprit").to_pylist()
        stray = 0
        for row in marked:
            its = calls.faults(row["step"], row["seq_candidate"])
            named.update(its)
            scopes.add(row["scope"])
            stray += not its
        named = {name for name in named if calls.is_complete(name, scopes)}
        faults = key.split("+")
        missed = [f"{name}: {calls.loudest(name, result)}" for name in faults if name not in named]
        yield Outcome(model, precision, faults, level, sorted(named & set(faults)), false, stray, missed, result.verdict, seconds)


def rates(outcomes: Sequence[Outcome]) -> list[str]:
    """Return lines of counts: each fault alone, several of those that are named alone, and all."""
    lines = []
    for level in dict.fromkeys(o.level for o in outcomes):
        for precision in [*dict.fromkeys(o.precision for o in outcomes), ""]:
            some = [o for o in outcomes if o.level == level and precision in ("", o.precision)]
            alone = [o for o in some if len(o.faults) == 1]
            found = {(o.model, o.precision, o.faults[0]) for o in alone if o.named}
            lines.append(
                f"alone at {level} {precision or 'all'}: {len(found)} of {len(alone)} named, "
                f"with false culprits {sum(bool(o.false) for o in alone)}, stray calls {sum(o.stray for o in alone)}"
            )
            several = [o for o in some if len(o.faults) > 1]
            known = [o for o in several if all((o.model, o.precision, fault) in found for fault in o.faults)]
            for what, those in (("several", several), ("several of what is named alone", known)):
                every, first = (sum(len(o.named) >= (n or len(o.faults)) for o in those) for n in (0, 1))
                lines.append(
                    f"  {what} at {level} {precision or 'all'}: all named in {every} of {len(those)}, some in {first}; "
                    f"with false culprits {sum(bool(o.false) for o in those)}, stray calls {sum(o.stray for o in those)}"
                )
    return lines


def main() -> None:
    """Record, judge, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", nargs="?", choices=("record", "judge"))
    parser.add_argument("--models", nargs="*", default=[*zoo.MODELS, *STRANGERS])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--levels", nargs="*", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--counts", action="store_true", help="print no runs, only the counts")
    parser.add_argument(
        "--detail", choices=("stats", "tensor"), default="stats", help="of broken runs; with tensors calls are computed again"
    )
    parser.add_argument("--work", type=Path, help="folder of the captures")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    simdev.install()
    injection._overwrite = _measured
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for model in options.models:
            for precision in options.precisions:
                folder = work / f"{model}-{precision}"
                if options.do != "judge":
                    record(model, precision, folder, options.detail)
                if options.do == "record" or not (folder / "truth.json").exists():
                    continue
                for key, truth in json.loads((folder / "truth.json").read_text()).items():
                    for one in judge(model, precision, key, truth, folder, options.levels):
                        outcomes.append(one)
                        if not options.counts:
                            print(_line(one), flush=True)
    print("\n".join(rates(outcomes)))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))


def _line(one: Outcome) -> str:
    said = f"{one.model} {one.precision} {'+'.join(one.faults)} {one.level} named {len(one.named)} of {len(one.faults)}"
    parts = [f"{said} ({one.verdict}, {one.seconds:.1f} s)", *(f"missed {missed}" for missed in one.missed)]
    parts += [f"false {false}" for false in one.false[:4]] + ([f"stray calls {one.stray}"] if one.stray else [])
    return "\n    ".join(parts)


if __name__ == "__main__":
    main()
