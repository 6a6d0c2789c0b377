"""What Trueup costs before it does anything: the least of several starts, for more is what neighbours cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .running import PYTHON, TRUEUP, environment

FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax")


def seconds(*command: str, count: int = 5) -> float:
    """Return the least processor time of a command, in seconds."""
    return min(_once(command) for _ in range(count))


def _once(command: tuple[str, ...]) -> float:
    script = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, *command], env=environment(), capture_output=True, check=True)
    return float(run.stdout)


def test_import_is_light() -> None:
    code = f"import sys, trueup; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    run = subprocess.run([PYTHON, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
    assert seconds(PYTHON, "-c", "import trueup") - seconds(PYTHON, "-c", "pass") < 0.1


def test_help_comes_at_once() -> None:
    assert seconds(*TRUEUP, "--help") < 0.3


def test_capture_adds_little(tmp_path: Path) -> None:
    """To a command that trains nothing: neither the readers of captures nor a framework are loaded."""
    command = (PYTHON, "-c", "pass")
    added = seconds(*TRUEUP, "capture", "-o", str(tmp_path / "c"), "--", *command) - seconds(*command)
    print(f"`trueup capture` adds {1000 * added:.0f} ms")
    assert added < 0.3  # 0.2, and what a loaded machine adds
