"""What `trueup monitor` costs beside msprobe's TrainerMon, and how often its alerts are wrong.

    python benchmarks/monitoring.py cost --rival /tmp/rival/bin/python   # 10 minutes; without --rival Trueup alone
    python benchmarks/monitoring.py part                                 # a minute: CPU time of the monitor's own code
    python benchmarks/monitoring.py part --first 0                       # of its beginning, which has everything in 42 of 100 steps
    python benchmarks/monitoring.py alerts                               # 3 minutes: 100,000 healthy steps of 5 kinds, 11 faults

`cost`: the GPT of `models.py`, one thread. A process switches the monitor on for single steps, each beside the mean of the two
steps around it without: the clock of a shared machine drifts by more than the monitor costs. Each tenth one is taken in full by
both tools: activations, gradients, moments, weights, direction of gradients. A file that is due is written within its step.
(TrainerMon cannot be taken off again: its process runs plain blocks, then its own.) Processes of both tools take turns. CPU
seconds of the whole process, so other work counts little. Said are medians, of steps with everything by a tenth, and their 95 %
interval (bootstrap). The rival's environment: `pip install mindstudio-probe` beside the same PyTorch.

`part`: the CPU time between the entrance and the end of each of the monitor's hooks, and of the thread that writes files, beside
that of reading once what has to be read: gradients in each step; in each tenth weights twice, their copy, moments, outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
EVERY, BLOCK, WARM = 10, 20, 10
NEVER = 1_000_000  # steps apart
Ratios = dict[str, list[tuple[float, float, float]]]  # by kind of step: CPU seconds of a plain one, and ratios of CPU and clock
SHARES = {"all": 1.0, "usual": 1 - 1 / EVERY, "full": 1 / EVERY}
DRAWS = 2000
LATER = 1000  # a step from which on everything is taken in each tenth alone
STEPS, SERIES = 100_000, 100
NOISE: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda random, size: random.standard_normal(size),
    "Laplace": lambda random, size: random.laplace(size=size) / 2**0.5,
    "correlated by 0.5": lambda random, size: correlated(random, size, 0.5),
    "correlated by 0.9": lambda random, size: correlated(random, size, 0.9),
    "Student's t, 5 degrees": lambda random, size: random.standard_t(5, size) / (5 / 3) ** 0.5,
}


# ------------------------------------------------------------------------------------------------------------------------- cost
def seconds(step: Callable[[], object], count: int) -> tuple[float, float]:
    """Return CPU seconds of the process and seconds of the clock, a step."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        step()
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def measured(tool: str, blocks: int) -> None:
    """Print ratios of blocks with a tool's monitor to plain ones beside them."""
    import torch

    import models

    torch.set_num_threads(1)
    step = models.build("gpt")
    seconds(step, WARM)
    with tempfile.TemporaryDirectory() as folder:
        found = with_trueup(step, Path(folder), blocks) if tool == "trueup" else with_trainer_mon(step, Path(folder), blocks)
    print(json.dumps({"tool": tool, "ratios": found, "load": os.getloadavg()[0]}))


def with_trueup(step: Any, folder: Path, blocks: int) -> Ratios:
    """Switch one monitor on for each second step, and let each tenth of these have everything."""
    import trueup

    found: Ratios = {"usual": [], "full": []}
    with trueup.monitor(step.model, step.optimizer, folder / "m", step=10 * NEVER + 1) as monitor:

        def own() -> None:
            step()
            monitor._writer._finish_writing()  # else the step after it pays for the file

        seconds(step, WARM)
        monitor.obey(["off"])
        before = seconds(step, 1)
        for one in range(blocks * BLOCK):
            what = "usual" if one % EVERY else "full"
            monitor.obey(["on"])
            monitor.wanted.every = 1 if what == "full" else NEVER
            with_it = seconds(own, 1)
            monitor.obey(["off"])
            after = seconds(step, 1)
            cpu, wall = ((x + y) / 2 for x, y in zip(before, after, strict=True))
            found[what].append((cpu, with_it[0] / cpu, with_it[1] / wall))
            before = after
    return found


def with_trainer_mon(step: Any, folder: Path, blocks: int) -> Ratios:
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder / "out")
    from msprobe.pytorch import TrainerMon

    config = {
        "targets": {}, "format": "csv", "step_interval": EVERY, "ops": ["norm", "min", "max", "zeros"], "xy_distribution": True,
        "forward_only": True, "all_xy": True, "wg_distribution": True, "mv_distribution": True, "param_distribution": True,
        "mg_direction": True, "step_count_per_record": 100,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    plain = [seconds(step, BLOCK) for _ in range(blocks)]
    monitor = TrainerMon(str(folder / "config.json"), params_have_main_grad=False)
    monitor.set_monitor(step.model, step.optimizer, grad_acc_steps=1)
    seconds(step, WARM)
    return {"all": [(cpu, (own := seconds(step, BLOCK))[0] / cpu, own[1] / wall) for cpu, wall in plain]}


def part(steps: int, first: int) -> None:
    """Print CPU time of the monitor's own code, by hook, and that of only reading what it reads."""
    import torch

    import models
    import trueup
    from trueup.analysis.monitor.session import Monitor
    from trueup.foundation.kernels import SPREAD, streams
    from trueup.foundation.store.series import SeriesWriter
    from trueup.recording.adapters.torch.monitored_layers import TorchLayers
    from trueup.recording.engine.monitored_step import StepProbe

    torch.set_num_threads(1)
    spent: Counter[str] = Counter()
    depth = 0

    def timed(kind: Any, name: str, what: Callable[..., str]) -> None:
        call = getattr(kind, name)

        def around(self: Any, *given: Any) -> Any:
            nonlocal depth
            own = threading.current_thread() is not threading.main_thread()
            depth += not own
            began = time.thread_time()
            try:
                return call(self, *given)
            finally:
                took = time.thread_time() - began
                depth -= not own
                outermost = own or not depth
                spent[what(*given) if outermost else f"  of that {what(*given)}"] += took
                spent["all"] += took if outermost else 0

        setattr(kind, name, around)

    step = models.build("gpt")
    seconds(step, WARM)
    plain = seconds(step, EVERY)[0]
    timed(StepProbe, "guarded", lambda what, *_: str(what))
    timed(TorchLayers, "_ran", lambda *_: "a module's hook")
    timed(Monitor, "ended", lambda *_: "writing and judging")
    timed(SeriesWriter, "_write", lambda *_: "files")
    given = {"every": EVERY, "step": first}
    with tempfile.TemporaryDirectory() as folder, trueup.monitor(step.model, step.optimizer, Path(folder) / "m", **given):
        if first:
            seconds(step, EVERY + 1)
        spent.clear()
        own = seconds(step, steps)[0]
    table = [one for p in step.model.parameters() for one in (p.data_ptr(), 0, 0, 0, p.numel())]
    reading = min(seconds(lambda: streams(SPREAD, table), 1)[0] for _ in range(20))
    rows = 1 + 8 / EVERY  # gradients; in each tenth step gradient and momentum, weights and copy twice, momentum and variance
    print(f"load {os.getloadavg()[0]:.1f}; a step of {plain * 1e3:.0f} ms CPU, {own * 1e3:.0f} ms with the monitor")
    least = 1e3 * reading * rows
    print(f"reading {rows:.1f} times as many bytes as the weights have: {least:.2f} ms a step, {least / plain / 10:.2f} % of it")
    for what, took in spent.most_common():
        print(f"{what:34} {took / steps * 1e3:7.3f} ms a step, {100 * took / steps / plain:5.2f} %")


def cost(rival: str | None, rounds: int, blocks: int) -> None:
    """Let processes of both tools take turns and print medians."""
    tools = [("trueup", sys.executable), *([("msprobe", rival)] if rival else [])]
    ratios: dict[str, Ratios] = {name: {} for name, _ in tools}
    loads = []
    for _ in range(rounds):
        for name, python in tools:
            command = [python, str(Path(__file__).resolve()), "one", "--tool", name, "--blocks", str(blocks)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
            if done.returncode:
                print(f"{name}: did not run\n{done.stderr[-2000:]}")
                continue
            held = json.loads(done.stdout.strip().splitlines()[-1])
            for kind, found in held["ratios"].items():
                ratios[name].setdefault(kind, []).extend(found)
            loads.append(held["load"])
    print(f"load of the machine {min(loads):.1f} to {max(loads):.1f}, {os.cpu_count()} cores, one thread, GPT of 6.9 M parameters")
    print("tool      plain step  CPU: median [95 % interval]           clock: median [95 % interval]          of so many")
    for name, kinds in ratios.items():
        if kinds:
            plain = statistics.median(one[0] for held in kinds.values() for one in held)
            count = ", ".join(f"{len(held)} {kind}" for kind, held in kinds.items())
            print(f"{name:8}  {plain * 1e3:7.0f} ms  {spoken(kinds, 1)}  {spoken(kinds, 2)}  {count}")
            for kind, held in kinds.items() if len(kinds) > 1 else ():
                print(f"  {kind:18}  {spoken({kind: held}, 1)}  {spoken({kind: held}, 2)}")


def spoken(kinds: Ratios, column: int) -> str:
    """Say by how much steps are longer: the median, of several kinds by their shares, and its 95 % interval."""
    random, whole, middle, drawn = np.random.default_rng(0), sum(SHARES[kind] for kind in kinds), 0.0, np.zeros(DRAWS)
    for kind, held in kinds.items():
        values = 100 * (np.array([one[column] for one in held]) - 1)
        middle += SHARES[kind] / whole * float(np.median(values))
        drawn += SHARES[kind] / whole * np.median(values[random.integers(0, len(values), (DRAWS, len(values)))], axis=1)
    lowest, highest = np.percentile(drawn, (2.5, 97.5))
    return f"{middle:+6.2f} % [{lowest:+6.2f} - {highest:+6.2f}]".ljust(34)


# ----------------------------------------------------------------------------------------------------------------------- alerts
def correlated(random: np.random.Generator, size: tuple[int, int], by: float) -> np.ndarray:
    """Return an autoregressive process of variance 1."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([(1 - by * by) ** 0.5], [1, -by], random.standard_normal(size), axis=0))


def alerts(steps: int) -> None:
    """Print alerts in healthy noise, and after how many steps each planted fault is known."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from monitor.test_alerts import AT, FAULTS, run
    from trueup.analysis.monitor.alerts import Alerts

    names = tuple(f"gradient_norm/l{k}" for k in range(SERIES))
    for kind, noise in NOISE.items():
        random, judge, found = np.random.default_rng(0), Alerts(None, 0, 1), []
        started, at = time.process_time(), 0
        while at < steps:
            some = min(10_000, steps - at)
            trend = -0.3 * np.log1p((at + np.arange(some)) / 1000)
            values = np.exp(0.15 * noise(random, (some, SERIES + 1)) + trend[:, None])
            for k in range(some):
                row = values[k, :SERIES]
                total = np.sqrt(np.sum(row * row, keepdims=True))
                blocks = [(LOSS, values[k, SERIES:] ** 0.2 * 3), (TOTAL, total), (names, row)]
                found += judge.take(at + k, blocks)
            at += some
        each = (time.process_time() - started) / steps * 1e3
        rules = ", ".join(sorted({one.rule for one in found}))
        many = f"{len(found):3} alerts in {steps:,} steps of {SERIES + 2} series ({rules or '-'})"
        print(f"{kind:24} {many}, {each:.2f} ms a step", flush=True)
    for fault, (spoil, _, _, most) in FAULTS.items():
        first = run(spoil)[0]
        print(f"{fault:42} {first.rule:10} after {first.step - AT:2} steps (at most {most})")
    replicas(steps)


def replicas(steps: int, every: int = 100) -> None:
    """Print alerts of two healthy replicas, and after how many steps a bit of one parameter of one of them is known."""
    from trueup.analysis.monitor.alerts import Alerts

    names, random, found, last = tuple(f"digest/p{k}" for k in range(SERIES)), np.random.default_rng(0), [], steps - 10 * every
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Alerts(Path(folder), rank, 2) for rank in range(2)]
        for rank in range(2):
            (Path(folder) / f"rank-{rank:05d}").mkdir()
        for step in range(0, steps, every):
            digests = random.integers(0, 1 << 52, SERIES).astype(np.float64)
            for rank, judge in enumerate(ranks):
                flipped = digests + (rank if step > last else 0) * (np.arange(SERIES) == 7)
                found += [(step, one) for one in judge.take(step, [(names, flipped)])]
    healthy = sum(step <= last for step, _ in found)
    (step, first) = next(one for one in found if one[0] > last)
    print(f"{'two replicas':24} {healthy:3} alerts in {last:,} steps; digests each {every} steps")
    print(f"{'replicas that part: ' + first.series:42} {first.rule:10} after {step - last} steps (at most {2 * every})")


LOSS, TOTAL = ("loss",), ("gradient_norm",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "part", "alerts", "one"))
    parser.add_argument("--rival", help="Python of an environment with mindstudio-probe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first", type=int, default=LATER, help="the step that `part` begins with")
    parser.add_argument("--tool", choices=("trueup", "msprobe"))
    given = parser.parse_args()
    if given.what == "one":
        measured(given.tool, given.blocks)
    elif given.what == "part":
        part(10 * EVERY, given.first)
    elif given.what == "cost":
        cost(given.rival, given.rounds, given.blocks)
    else:
        alerts(given.steps)


if __name__ == "__main__":
    main()
