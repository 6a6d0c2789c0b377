"""What writing takes is loaded late, and never in the middle of a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from nursery import LIMIT
from trueup.recording.recorder import recorder

ADAPTER = """
import sys, torch, trueup, trueup.recording.adapters.torch.session
from trueup.recording.recorder import Recorder
trueup.capture, trueup.watch, trueup.monitor, trueup.shadow, trueup.lockstep
late = "pyarrow", "duckdb", "trueup.foundation.store.writer", "trueup.recording.recorder.columns"
print([name for name in late if name in sys.modules])
"""

WHILE_LOADING = """
import os, sys, threading, time
from trueup.recording.recorder import recorder

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow":
            begun.set()
            time.sleep(0.5)

begun = threading.Event()
sys.meta_path.insert(0, Slow())
threading.Thread(target=recorder.load).start()
begun.wait()
child = os.fork()
if not child:
    import pyarrow.parquet
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT).stdout


def test_neither_the_adapter_nor_what_scripts_call_loads_arrow() -> None:
    assert python(ADAPTER) == "[]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_meanwhile_can_import_the_same() -> None:
    assert python(WHILE_LOADING) == "7\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_in_the_loading_thread_itself_goes_on() -> None:
    with recorder._loading:
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threading.Thread(target=recorder.load).start()  # free again
