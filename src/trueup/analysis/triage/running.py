"""Running the command with some switches off, and reading what came: losses, or a capture.

    DIR/runs/02-as-it-is-again         a capture that holds the loss curve alone
    DIR/runs/02-as-it-is-again.txt     what the command printed
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup.analysis.triage.found import Trial
from trueup.analysis.triage.table import Switch, Table, fusion_file
from trueup.comparison.graph.overview import Overview
from trueup.foundation.facts.operators import named
from trueup.foundation.model import TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store import Capture, open_capture
from trueup.recording.adapters import ADAPTERS
from trueup.recording.recorder import launch, summary
from trueup.recording.recorder.options import CaptureOptions

FUSION_FILE = "TRUEUP_FUSION_SWITCH_FILE"
"""Environment variable that names Ascend's fusion switch file, for scripts that hand it on themselves."""
LAST_WORDS = 4096


class Runner:
    """Runs one command, again and again.

    Args:
        command: the program and its arguments.
        folder: where the runs go.
        table: the switches; those that are held are set in every run.
        steps: after how many a run ends.
        timeout: seconds after which a run is ended, None: never.
        tell: called with each run that was made.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, table: Table, *, steps: int, timeout: float | None,
        tell: Callable[[Trial], None],
    ) -> None:  # fmt: skip
        self.command, self.table, self.steps = tuple(command), table, steps
        self.trials: list[Trial] = []
        self._folder, self._timeout, self._tell = folder, timeout, tell

    # --------------------------------------------------------------------------------------------------- what there is to run
    def losses(self, name: str, off: Iterable[Switch] = (), steps: int | None = None) -> Trial:
        """Run it and read its losses; nothing else is recorded, so that nothing keeps the framework from optimising."""
        return self._run(name, tuple(off), self._of_steps(f"0:{steps or self.steps}", level="api", include=named("loss")))

    def capture(self, name: str, off: Iterable[Switch], steps: str) -> Trial:
        """Run it and record its modules and functions in some steps; no optimizer, which makes much of little rounding."""
        phases = ("forward", "recompute", "backward")
        return self._run(name, tuple(off), self._of_steps(steps, level=("module", "api"), phase=phases))

    def like(self, name: str, options: CaptureOptions) -> Trial:
        """Run it as it is and record what ``options`` say."""
        return self._run(name, (), options)

    def watch(self, name: str, options: CaptureOptions, watch: str) -> Trial:
        """Run it as it is under a watch."""
        return self._run(name, (), replace(options, steps=((0, self.steps),), stop=True), watch=watch)

    def _of_steps(self, steps: str, **more: Any) -> CaptureOptions:
        return CaptureOptions.of(steps=steps, stop=True, **more)

    # ------------------------------------------------------------------------------------------------------------ running it
    def _run(self, name: str, off: tuple[Switch, ...], options: CaptureOptions, **order: Any) -> Trial:
        place = self._folder / f"{len(self.trials) + 1:02d}-{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:60].strip('-')}"
        place.parent.mkdir(parents=True, exist_ok=True)
        switches = (*self.table.held(), *off)
        environment = {key: value for switch in switches for key, value in switch.environment.items()}
        orders = [{"name": one.name, "framework": one.framework, **one.order} for one in switches]
        rules = fusion_file(switches)
        if rules is not None:
            file = place.with_suffix(".fusion_switch.json").absolute()
            file.write_text(rules, encoding="utf-8")
            environment[FUSION_FILE] = str(file)
            hand_on = {"name": "Ascend fusion", "framework": "tensorflow", "adapter": {"fusion_switch_file": str(file)}}
            orders.append(hand_on)
        if order.get("watch") is None:
            through = replace(options, compile="through").to_json()
            able = [adapter.name for adapter in ADAPTERS if "compile" not in adapter.lacks]
            order["options_of"] = dict.fromkeys(able, through)  # else the capture would switch compiled code off itself
        output = place.with_suffix(".txt")
        begun = time.monotonic()
        code = launch.execute(
            place.absolute(), options, self.command, environment=environment, output=output, timeout=self._timeout,
            switches=orders, **order,
        )  # fmt: skip
        trial = self._read(name, off, place, time.monotonic() - begun, code, output, watched="watch" in order)
        self.trials.append(trial)
        self._tell(trial)
        return trial

    def _read(
        self, name: str, off: Sequence[Switch], place: Path, seconds: float, code: int, output: Path, *, watched: bool
    ) -> Trial:
        reports = summary._reports(place)
        frameworks = [report["framework"] for report in reports if report.get("framework") and report.get("calls")]
        frameworks += [report["framework"] for report in reports if report.get("framework")]
        capture = None if watched else _opened(place)
        manifests = [] if capture is None else list(capture.ranks.values())
        failed = self._failure(code, output, reports, watched=watched)
        return Trial(
            name, tuple(one.name for one in off), place, {} if capture is None else losses_of(capture), seconds, failed,
            tuple(_remarks(reports, [one.name for one in off])),
            str(manifests[0].get("framework")) if manifests else next(iter(frameworks), None),
            tuple(dict.fromkeys(str(device) for manifest in manifests for device in manifest.get("devices", ()))),
        )  # fmt: skip

    def _failure(self, code: int, output: Path, reports: Sequence[Mapping[str, Any]], *, watched: bool) -> str:
        failures = [str(report["failure"]) for report in reports if report.get("failure")]
        if code == launch.TIMED_OUT and self._timeout is not None:
            return f"it did not end within {self._timeout:g} s (--timeout) and was ended; it may hang: {output}"
        if code and not (watched and code == 3):  # of a watch that stopped it
            return f"{_ended(code)}{_last_line(output)}" if code < 128 else f"{_ended(code)} ({output})"
        if not reports:
            return "no process of it imported a framework: python -I, -E or -S, or a PYTHONPATH set anew, hides it"
        return f"it could not be observed: {failures[0].splitlines()[0]}" if failures else ""


def losses_of(capture: Capture) -> dict[int, float]:
    """Return the losses of a capture by step, as every report tells them."""
    overview = Overview(capture)
    overview.add_the_rest(())
    return overview.losses


def _opened(place: Path) -> Capture | None:
    try:
        return open_capture(place)
    except TrueupError:
        return None


def _ended(code: int) -> str:
    if code > 128:
        try:
            return f"it was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"it ended with exit code {code}"


def _last_line(output: Path) -> str:
    """Return the last thing that the command said, and where the rest is."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - LAST_WORDS))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f": {redacted(lines[-1])[:200]} ({output})" if lines else ""


def _remarks(reports: Iterable[Mapping[str, Any]], off: Sequence[str]) -> list[str]:
    said: dict[str, None] = {}
    for report in reports:
        for told in (report.get("switches") or {}).values():
            for name in off:
                if name in told.get("failed", {}):
                    said[f"{name} could not be switched off: {told['failed'][name]}"] = None
                for seen in told.get("seen", {}).get(name, ()):
                    said[f"{name}: {seen}"] = None
    return list(said)
