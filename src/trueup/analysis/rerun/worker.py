"""A process that executes recorded calls one by one: what it crashes on is a finding, and the process beside it goes on.

It reads lines of JSON from its standard input, first the settings, then one call each, and writes one line for each to what was its
standard output; anything that is printed meanwhile goes to standard error. `trueup.analysis.rerun.replay` starts it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from trueup.foundation.model import TrueupError


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    try:
        replayer, calls = prepare(settings)
        print(json.dumps({"ready": True, "notes": replayer.notes()}), file=answers, flush=True)
    except TrueupError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    for line in sys.stdin:
        rank, seq = json.loads(line)
        call = calls.at(rank, seq)
        found = replayer.verify(call) if settings["verify"] else replayer.replay(call)
        print(json.dumps(found.to_json()), file=answers, flush=True)


def prepare(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return what executes calls in this process, and the calls of the capture.

    Raises:
        TrueupError: the framework or the device is not there, or the capture cannot be read.
    """
    from trueup.analysis.rerun.executing import executing, framework_of
    from trueup.foundation.store import open_capture
    from trueup.recording.execution.recorded import RecordedCalls

    capture = open_capture(settings["base"])
    adapter = executing(framework_of(capture))
    adapter.provide(settings["device"], simulated=settings["simulated"])
    if settings["threads"]:
        adapter.limit_threads(settings["threads"])
    calls = RecordedCalls(capture)
    if settings["verify"]:
        return adapter.Verifier(calls, settings["device"]), calls
    return adapter.Replayer(calls, settings["device"], draws=settings["draws"], recorded=settings["recorded"]), calls


if __name__ == "__main__":
    main()
    os._exit(0)  # every answer is flushed, and taking a framework apart lasts a second
