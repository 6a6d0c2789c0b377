"""What writing takes is loaded late, and never in the middle of a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import trueup
from nursery import LIMIT
from trueup.recording.adapters.torch import session
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


def test_an_optimizer_says_that_a_training_is_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the writer needs is not loaded beside the first step; a model alone may never be recorded."""
    loaded: list[tuple[str, int]] = []

    def load() -> None:
        loaded.append((threading.current_thread().name, session.running.session.recorder.calls))

    model = torch.nn.Linear(2, 1)
    with trueup.capture(tmp_path / "run"):
        monkeypatch.setattr(recorder, "load", load)
        before = list(loaded)
        torch.optim.SGD(model.parameters())
        assert (before, {*loaded}) == ([], {(threading.current_thread().name, 0)})  # each watched constructor may tell
