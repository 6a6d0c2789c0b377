"""A process that leaves its group while it is captured: threads of the backend still let go of our mode, and need Python for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from nursery import LIMIT

LEAVING = """
import sys, threading, torch, trueup
from torch import distributed

class Mode:  # what a thread of gloo's lets go of, when it has the lock
    def __del__(self):
        left.append(True)

def let_go(held):
    begun.set()
    asked.wait()
    held.clear()

left, begun, asked = [], threading.Event(), threading.Event()
distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
with trueup.capture(sys.argv[2], level="api"):
    distributed.all_reduce(torch.ones(3))
    threading.Thread(target=let_go, args=([Mode()],)).start()
    begun.wait()
    sys.setswitchinterval(1000)  # from now on nobody is asked for the lock
    asked.set()
    distributed.distributed_c10d._update_default_pg(None)
    print(left, flush=True)
    sys.setswitchinterval(0.005)
"""


def test_threads_that_wait_for_python_run_before_a_group_is_destroyed(tmp_path: Path, warm: str) -> None:
    """Its destructor holds the interpreter's lock, and waits for gloo's thread, which waits for the lock."""
    command = [warm, "-c", LEAVING, str(tmp_path / "store"), str(tmp_path / "capture")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert made.stdout == "[True]\n", made.stderr
