"""A monitor in a process that `trueup monitor -- COMMAND` armed: it begins with the framework, or when the process joins others."""

from __future__ import annotations

import atexit
import dataclasses
from pathlib import Path
from typing import Any

from trueup.analysis.monitor.session import Monitor, MonitorOptions, root_manifest
from trueup.foundation.model import TrueupError
from trueup.recording.engine.armed import BaseArmed

NAMED = 64  # alerts that a process's report holds


def armed(base: type[BaseArmed], directory: Path, options: str, root: dict[str, Any], monitor: str) -> BaseArmed:
    """Return what an adapter's armed process is with a monitor in place of a capture; ``monitor`` is an encoded `MonitorOptions`.
    Raises TrueupError where the framework has no probe."""
    if "monitor" in base.adapter.lacks:
        raise TrueupError(f"monitor is not there for {base.adapter.title} yet ({base.adapter.page} says what there is)")
    chosen = MonitorOptions.from_json(monitor)
    said = root_manifest(chosen, root.get("command", ())) | {"run": root.get("run")}

    class Armed(base):  # type: ignore[misc, valid-type]
        monitor: Monitor | None = None

        def _start(self) -> None:
            self.monitor = Monitor(self._directory, chosen, self.adapter, said).start(at_once=False)
            atexit.unregister(self.monitor.close)  # the process's own end says how it ended

        def joined(self) -> None:
            if self.monitor is None:
                self._start()

        def finish(self, ending: str | None) -> None:
            if self.monitor is not None:
                self.monitor.close(ending)

        def report(self) -> dict[str, Any]:
            held = self.monitor
            if held is None:
                return {"process_rank": None, "why": self.no_group}
            found = {"steps": held.count, "series": held.series, "alerts": len(held.alerts), "failure": held.failure}
            some = [dataclasses.asdict(one) for one in held.alerts[:NAMED]]
            why = None if held.count else "no optimizer stepped"
            return {"process_rank": self.rank() or 0, "calls": held.count, "why": why, "monitor": found | {"first": some}}

        def _in_child(self) -> None:
            if self.monitor is not None:
                self.monitor.probe.detach()
                self.monitor = None

    return Armed(directory, options, root)
