"""Fuzz for as long as you like: `make fuzz MINUTES=10`, or ``python tests/fuzz/run.py --minutes 10 [--first 0]``.

A worker tries one seed after the other. A watchdog stops it where a seed takes more than 20 s or more than 1 GB, notes what a
dying process or an exception other than TrueupError says, and goes on with the next seed. Exit code 1 where anything was found;
``--only SEED`` runs a single one, with its traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from fuzz.exercising import exercise, place, record_bases  # noqa: E402

SECONDS, MEGABYTES = 20.0, 1000.0


def work(bases: Path, first: int) -> None:
    """Try seeds from ``first`` on until killed, saying each before it is tried."""
    os.nice(10)
    with tempfile.TemporaryDirectory() as folder:
        seed = first
        while True:
            print(f"seed {seed}", flush=True)
            try:
                exercise(seed, bases, Path(folder) / "work")
            except Exception as error:  # noqa: BLE001 - every one is a finding
                print("found", json.dumps([seed, place(error), traceback.format_exc()]), flush=True)
            seed += 1


def resident(process: subprocess.Popen[str]) -> float:
    """Return a process' resident memory in MB, 0 where it has ended."""
    try:
        with Path(f"/proc/{process.pid}/status").open() as status:
            return next((int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS")), 0.0)
    except OSError:
        return 0.0


def watch(minutes: float, first: int, bases: Path) -> int:
    """Keep a worker at work for that long; print each kind of finding once and return how many there are."""
    ends = time.monotonic() + 60 * minutes
    seed, tried, largest = first, 0, 0.0
    found: Counter[str] = Counter()
    while time.monotonic() < ends:
        command = [sys.executable, __file__, "--work", str(bases), "--first", str(seed)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
        assert worker.stdout is not None
        assert worker.stderr is not None
        since, why = time.monotonic() + 30, ""  # it imports first
        while time.monotonic() < ends and not why:
            ready, _, _ = select.select([worker.stdout], [], [], 0.2)
            memory = resident(worker)
            largest = max(largest, memory)
            if ready:
                line = worker.stdout.readline()
                if line.startswith("seed "):
                    seed, since, tried = int(line.split()[1]), time.monotonic(), tried + 1
                elif line.startswith("found "):
                    _, where, said = json.loads(line[6:])
                    if not found[where]:
                        print(f"\nseed {seed}: {where}\n{said}", flush=True)
                    found[where] += 1
                elif not line:
                    why = f"the process died with {worker.wait()}: {worker.stderr.read()[-2000:]}"
            if memory > MEGABYTES:
                why = f"{memory:.0f} MB"
            elif time.monotonic() - since > SECONDS:
                why = f"no answer for {SECONDS:.0f} s"
        worker.kill()
        worker.wait()
        if why:
            found[f"{why.splitlines()[0]} (seed {seed})"] += 1
            print(f"\nseed {seed}: {why}", flush=True)
        seed += 1
    for where, times in found.most_common():
        print(f"{times:6} x {where}")
    print(f"{tried} damaged captures, seeds {first} to {seed - 1}: {len(found)} findings; at most {largest:.0f} MB")
    return len(found)


def main() -> int:
    """Parse, and watch a worker or be one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", type=int, help="run this seed alone, in this process")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.first)
    with tempfile.TemporaryDirectory() as folder:
        record_bases(Path(folder))
        if options.only is not None:
            print("\n".join(exercise(options.only, Path(folder), Path(folder) / "work")))
            return 0
        return min(1, watch(options.minutes, options.first, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
