"""How fast captures are compared: Trueup beside msprobe on the same training step, against targets.

    what                                       Trueup     target      msprobe   peak MB, Trueup / msprobe
    start to verdict, GPT step, statistics    0.643 s        1 s       5.58 s   126 / 369      ALIGNED

`make bench-compare` runs it. README.md says how it measures. Set the machine aside: neighbours make such numbers worse.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare_synthesis import captures, rival_dump
from machine import wait_until_quiet

HERE = Path(__file__).parent
RIVAL = HERE.parent / ".venv-msprobe" / "bin" / "python"
RIVAL_MAIN = "import sys; from msprobe.msprobe import main; sys.exit(main())"
"""As its console script does, which does not survive that its environment is moved."""

SIDES = ("baseline", "candidate")
MEASURES = ["start", "tensors", "rows", "many"]
CACHE = Path(tempfile.gettempdir()) / "trueup-bench-compare"
LEFT_OUT = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Variables that the commands do without: an installed tool has its bytecode, and compiling it took 0.17 s of each run."""
RIVAL_TIMES = 100
"""How often the rival's step is repeated for its rows a second: 57,000 rows take it a third of a minute."""


@dataclass
class Taken:
    """One run of a command: wall time in seconds, peak resident memory in MB (its children's, where larger), what it printed."""

    seconds: float
    memory: float
    printed: str


@dataclass
class Line:
    """One line of the table; None where it was not measured."""

    what: str
    unit: str
    ours: float | None
    target: float
    theirs: float | None
    memory: tuple[float | None, float | None]
    note: str = ""


# ---------------------------------------------------------------- running
def run(command: list[str], expected: tuple[int, ...] = (0,), threads: int = 2) -> Taken:
    """Run a command to its end and measure it.

    Raises:
        RuntimeError: it ended with another code.
    """
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    environment = kept | {"OMP_NUM_THREADS": str(threads)}
    if command[0] == sys.executable:
        environment["PYTHONPATH"] = f"{HERE.parent / 'src'}{os.pathsep}{HERE}"
    with tempfile.TemporaryFile("w+") as said:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        printed = said.read()
    if process.returncode not in expected:
        raise RuntimeError(f"{command[:4]} ended with {process.returncode}:\n{printed[-2000:]}")
    return Taken(seconds, used.ru_maxrss / 1024, printed)


def middle(taken: list[Taken]) -> tuple[float | None, float | None]:
    """Return the median time and the largest memory."""
    if not taken:
        return None, None
    return statistics.median(one.seconds for one in taken), max(one.memory for one in taken)


def record(tool: str, python: str, detail: str, folder: Path) -> None:
    """Record both sides with a tool."""
    for side in SIDES:
        asked = json.dumps({"tool": tool, "side": side, "detail": detail, "folder": str(folder)})
        run([python, str(HERE / "compare_recording.py"), asked], threads=1)


def ours(first: Path, second: Path) -> Taken:
    """Run ``trueup compare``; the verdict is not asked for here."""
    return run([sys.executable, "-m", "trueup", "compare", str(first), str(second)], (0, 1, 2))


def theirs(python: str, first: Path, second: Path, into: Path) -> Taken:
    """Run ``msprobe compare``."""
    sides = ["-gp", str(first), "-tp", str(second), "-o", str(into)]
    return run([python, "-c", RIVAL_MAIN, "compare", "-m", "auto", *sides])


def inside(sides: list[Path], rounds: int) -> tuple[float, float, str]:
    """Time `trueup.compare` alone, imports done and files in the page cache; return seconds, peak MB and the verdict."""
    taken = run([sys.executable, __file__, "--inside", json.dumps([str(s) for s in sides]), "--rounds", str(rounds)])
    told = json.loads(taken.printed.splitlines()[-1])
    return told["seconds"], taken.memory, told["verdict"]


def time_inside(sides: list[str], rounds: int) -> None:
    """Be the process that `inside` starts."""
    import trueup

    for side in sides:
        for file in Path(side).rglob("*"):
            if file.is_file():
                file.read_bytes()
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = trueup.compare(*sides)
        taken.append(time.perf_counter() - started)
    print(json.dumps({"seconds": statistics.median(taken), "verdict": result.verdict}))


# ---------------------------------------------------------------- what is measured
def dump_of(side: Path) -> Path:
    """Return the one dump.json below a folder."""
    return next(iter(sorted(side.rglob("dump.json"))))


def differing_bytes(sides: list[Path]) -> int:
    """Return the bytes of tensors that have to be read: those whose digest the other side has not, once each."""
    import numpy as np

    import trueup

    held: list[dict[str, int]] = []
    for side in sides:
        columns = ["digest", "dtype", "numel", "payload_key"]
        rows = trueup.open_capture(side).records(columns=columns).to_pylist()
        sizes = {"bfloat16": 2}
        held.append({
            r["digest"]: r["numel"] * (sizes.get(r["dtype"]) or np.dtype(r["dtype"]).itemsize) for r in rows if r["payload_key"]
        })  # fmt: skip
    return sum(size for own, other in (held, held[::-1]) for digest, size in own.items() if digest not in other)


def start_to_verdict(work: Path, rival: str | None, rounds: int) -> Line:
    """Time both commands on one step of the GPT, in turn."""
    sides = [work / "trueup-stats" / side for side in SIDES]
    dumps = [dump_of(work / "msprobe-stats" / side) for side in SIDES] if rival else []
    mine, other = [], []
    for k in range(rounds + 1):
        one = ours(*sides)
        two = theirs(rival, *dumps, work / f"out-{k}") if rival else None
        if k:  # the first run of each finds its modules
            mine.append(one)
            other += [two] if two else []
    (seconds, memory), (rival_seconds, rival_memory) = middle(mine), middle(other)
    both = memory, rival_memory
    return Line("start to verdict, GPT step, statistics", "s", seconds, 1.0, rival_seconds, both, verdict(mine[0]))


def tensors(work: Path, rival: str | None, rounds: int, start: Line) -> Line:
    """Time the comparison of tensors: ours inside one process, theirs beyond the time of its statistics' command."""
    sides = [work / "trueup-tensor" / side for side in SIDES]
    seconds, memory, said = inside(sides, rounds + 1)
    read = differing_bytes(sides)
    rate = rival_memory = None
    if rival:
        dumps = [dump_of(work / "msprobe-tensor" / side) for side in SIDES]
        held = sum(f.stat().st_size for d in dumps for f in d.parent.rglob("*.pt"))
        taken, rival_memory = middle([theirs(rival, *dumps, work / f"tensor-{k}") for k in range(rounds + 1)][1:])
        rate = held / max(1e-9, (taken or 0) - (start.theirs or 0)) / 1e9
    note = f"{said}; {read / 1e6:.0f} MB in {seconds:.2f} s"
    return Line("tensor compare, from the page cache", "GB/s", read / seconds / 1e9, 2.0, rate, (memory, rival_memory), note)


def rows(work: Path, cache: Path, rival: str | None, slots: int, start: Line) -> list[Line]:
    """Time the comparison of statistics, rows a second: in one step, as the rival has them, and in many small steps."""
    source = work / "trueup-stats" / "baseline"
    large, large_held = captures(source, slots, cache / f"step-{slots}", one_step=True)
    large_seconds, large_memory, large_said = inside(large, 3)
    sides, held = captures(source, slots, cache / f"rows-{slots}")
    seconds, memory, said = inside(sides, 3)
    rate = rival_memory = None
    if rival:
        dumps = [rival_dump(dump_of(work / "msprobe-stats" / s), RIVAL_TIMES, work / "msprobe-rows" / s) for s in SIDES]
        taken = theirs(rival, *dumps, work / "rows-out")
        rival_memory = taken.memory
        lines = sum(1 for file in (work / "rows-out").glob("*.csv") for _ in file.open()) - 1
        rate = lines / max(1e-9, taken.seconds - (start.theirs or 0))
    note = f"{said}; {held:,} slots a side in {seconds:.2f} s"
    large_note = f"{large_said}; {large_held:,} slots a side in {large_seconds:.2f} s"
    both = large_memory, rival_memory
    return [
        Line("statistics, one step", "rows/s", large_held / large_seconds, 500_000.0, rate, both, large_note),
        Line("statistics, steps of 1,012 rows", "rows/s", held / seconds, 500_000.0, None, (memory, None), note),
    ]


def many(work: Path, cache: Path, slots: int) -> list[Line]:
    """Time the command on a pair that is as large as a long run's; msprobe has no number here (its rows would take it hours)."""
    sides, held = captures(work / "trueup-stats" / "baseline", slots, cache / f"many-{slots}")
    taken = ours(*sides)
    note = f"{verdict(taken)}; {held:,} slots a side"
    return [
        Line(f"{slots / 1e6:g} million slots a side", "s", taken.seconds, 30.0 * slots / 5e6, None, (taken.memory, None), note),
        Line(f"{slots / 1e6:g} million slots a side, memory", "GB", taken.memory / 1024, 4.0, None, (taken.memory, None)),
    ]


def verdict(taken: Taken) -> str:
    """Return the first word or two of what ``trueup compare`` printed."""
    first = next((line.strip() for line in taken.printed.splitlines() if line.strip()), "")
    return first.split("  ")[0][:40]


# ---------------------------------------------------------------- printing
def show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def print_lines(lines: list[Line]) -> None:
    """Print the table."""
    print(f"\n{'what':42}{'Trueup':>16}{'target':>16}{'msprobe':>16}   peak MB, Trueup / msprobe")
    for one in lines:
        memory = " / ".join("-" if m is None else f"{m:.0f}" for m in one.memory)
        figures = "".join(f"{show(value, one.unit):>16}" for value in (one.ours, one.target, one.theirs))
        print(f"{one.what:42}{figures}   {memory:14} {one.note}", flush=True)


def main() -> None:
    """Record, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each short command, after one that does not count")
    parser.add_argument("--slots", type=int, default=5_000_000, help="of the large pair, a side; 0 leaves it out")
    parser.add_argument("--rows", type=int, default=200_000, help="slots a side for the rows a second; 0 leaves them out")
    parser.add_argument("--only", nargs="*", choices=MEASURES, default=MEASURES)
    parser.add_argument("--cache", type=Path, default=CACHE, help="large pairs stay there")
    parser.add_argument("--rival", type=Path, default=RIVAL, help="the Python of msprobe's environment")
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        time_inside(json.loads(options.inside), options.rounds)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d %H:%M')}")
    rival = None if options.no_rival or not options.rival.exists() else str(options.rival.absolute())
    if rival is None:
        print(f"without msprobe: it would run in {options.rival} (make bench-compare installs it where it can)")
    if wait_until_quiet(options.patience) >= options.patience:
        print("the machine did not get quiet: expect worse numbers and more spread")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for detail in ("stats", "tensor") if "tensors" in options.only else ("stats",):
            record("trueup", sys.executable, detail, work / f"trueup-{detail}")
            if rival is not None:
                record("msprobe", rival, detail, work / f"msprobe-{detail}")
        start = start_to_verdict(work, rival, options.rounds)
        measures: dict[str, Callable[[], list[Line]]] = {
            "start": lambda: [start],
            "tensors": lambda: [tensors(work, rival, options.rounds, start)],
            "rows": lambda: rows(work, options.cache, rival, options.rows, start) if options.rows else [],
            "many": lambda: many(work, options.cache, options.slots) if options.slots else [],
        }
        for name in options.only:
            print(f"{name} ...", flush=True)
            lines += measures[name]()
    print_lines(lines)
    if options.json:
        figures: list[dict[str, Any]] = [asdict(line) for line in lines]
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
