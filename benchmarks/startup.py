"""What it costs to begin: the adapter's import after PyTorch's, and `trueup capture` around a command that does nothing.

Wall time, and processor time in brackets, which says more on a machine that others use. `make bench-startup` runs it.

    import the adapter of torch            87 ms (87); Arrow and the writer come with the first row, on the thread that writes
    trueup capture -- python -c pass       96 ms (96) more than python -c pass
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORT = """
import time, torch
wall, cpu = time.perf_counter(), time.process_time()
import trueup.recording.adapters.torch, trueup.recording.adapters.torch.session
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def importing() -> tuple[float, float]:
    """Return wall and processor milliseconds of the adapter's import, with everything a capture needs."""
    done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return 1000 * wall, 1000 * cpu


def running(*command: str) -> tuple[float, float]:
    """Return wall and processor milliseconds of a command and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * wall, 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main(rounds: int = 9) -> None:
    """Print both figures, medians over rounds."""
    nothing = (sys.executable, "-c", "pass")
    imports, with_it, without = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as work:
            imports.append(importing())
            with_it.append(running(sys.executable, "-m", "trueup", "capture", "-o", str(Path(work) / "c"), "--", *nothing))
            without.append(running(*nothing))
    for name, figures, base in (
        ("import trueup.recording.adapters.torch.session", imports, [(0.0, 0.0)]),
        ("trueup capture -- python -c pass", with_it, without),
    ):
        wall, cpu = (statistics.median(f[k] for f in figures) - statistics.median(b[k] for b in base) for k in (0, 1))
        print(f"{name:38} {wall:4.0f} ms ({cpu:.0f})")


if __name__ == "__main__":
    main()
