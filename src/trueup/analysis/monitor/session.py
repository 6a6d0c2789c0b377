"""The running monitor of a process: it writes what a probe takes, judges it, obeys the switch, and never gets in the training's
way.

What fails on our side is said once and kept in the rank's manifest; the training goes on without its monitor.

The switch is the file ``control`` in the directory, looked at once a second: ``off``, ``on``, ``every 50`` or ``capture`` (the next
step at full detail). It holds for all ranks.

In a process that ``trueup monitor -- COMMAND`` armed it begins with the framework, or when the process joins others (`armed`).
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trueup.analysis.watch.watcher import Stopper
from trueup.foundation.model import TrueupError, UsageError
from trueup.foundation.redaction import redacted
from trueup.foundation.store.durable import write_json
from trueup.foundation.store.series import SeriesWriter
from trueup.foundation.version import VERSION
from trueup.foundation.words.wording import first_line, say
from trueup.recording.engine.monitoring import ALSO, Block, Probe, Wanted
from trueup.recording.recorder.options import NumberSet, in_ranges, parse_numbers
from trueup.recording.registry import Adapter

if TYPE_CHECKING:
    from trueup.analysis.invariants.relations import Live
    from trueup.analysis.monitor.alerts import Alert, Alerts
    from trueup.recording.engine.armed import BaseArmed

CONTROL = "control"
LOOK_SECONDS = 1.0
ALERTS = "alerts.jsonl"  # in a rank's folder, a line an alert
CAPTURES = "captures"  # folder of the steps that were captured at full detail
MODULES = "modules.json"  # in a rank's folder: what the modules are, and who calls them
MOST_SAID = 20  # alerts that are printed; later ones are only written
ACTIONS = ("message", "stop", "capture")

NAMED = 64  # alerts that a process's report holds


@dataclasses.dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What is taken, and what an alert does."""

    every: int = 10
    digests: int = 100
    ranks: tuple[tuple[int, int | None], ...] | None = None  # half-open ranges; None: all
    alerts: bool = True
    actions: tuple[str, ...] = ("message",)
    command: str | None = None  # run with an alert as JSON on standard input
    invariants: str | None = None  # file of a healthy run's relations that are checked while this one goes
    check: int = 300  # steps between two checks of them
    also: tuple[str, ...] = ()  # of `engine.monitoring.ALSO`

    @classmethod
    def of(
        cls, every: int = 10, digests: int = 100, ranks: NumberSet = None, alerts: bool = True,
        on_alert: str | Sequence[str] = "message", command: str | None = None, invariants: str | Path | None = None,
        check: int = 300, also: str | Sequence[str] = (),
    ) -> MonitorOptions:  # fmt: skip
        """Check the options; raise `UsageError` where a value means nothing, TrueupError where invariants cannot be read."""
        if every < 1 or digests < 0 or check < 1:
            raise UsageError(
                f"every {every}, digests {digests} or check {check} is too small: expected at least 1, and 0 for no digests"
            )
        if invariants is not None:
            from trueup.analysis.invariants.relations import load

            load(Path(invariants))
            invariants = str(Path(invariants).absolute())
        actions = (on_alert,) if isinstance(on_alert, str) else tuple(on_alert)
        for one in actions:
            if one not in ACTIONS:
                raise UsageError(f"on_alert {one!r} is unknown: expected {', '.join(ACTIONS)}")
        more = (also,) if isinstance(also, str) else tuple(also)
        for one in more:
            if one not in ALSO:
                raise UsageError(f"also {one!r} is unknown: expected {', '.join(ALSO)}")
        if command is not None and not shlex.split(command):
            raise UsageError("command is empty: expected a program and its arguments")
        return cls(every, digests, parse_numbers(ranks, "ranks"), alerts, actions, command, invariants, check, more)

    def to_json(self) -> str:
        """Encode for the environment of a child process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MonitorOptions:
        """Decode what `to_json` made."""
        held = json.loads(text)
        spans = held["ranks"]
        held["ranks"] = None if spans is None else tuple((start, stop) for start, stop in spans)
        return cls(**held | {"actions": tuple(held["actions"]), "also": tuple(held["also"])})


def root_manifest(options: MonitorOptions, command: Sequence[str]) -> dict[str, Any]:
    """Return what all ranks' capture says of itself."""
    return {
        "trueup_version": VERSION, "command": list(command), "levels": [], "detail": "series",
        "config": {"ranks": options.ranks}, "monitor": dataclasses.asdict(options),
    }  # fmt: skip


class Monitor:
    """A running monitor; `close`, the end of a ``with`` block or of the process ends it.

    >>> monitor = trueup.monitor(model, optimizer, "runs/monitor")      # doctest: +SKIP
    >>> monitor.alerts                                                  # doctest: +SKIP
    []
    """

    def __init__(
        self, directory: Path, options: MonitorOptions, framework: Adapter, root: dict[str, Any],
        models: Sequence[Any] = (), optimizers: Sequence[Any] = (), step: int | None = None,
    ) -> None:  # fmt: skip
        self.path, self.options, self._framework, self._root = Path(directory).absolute(), options, framework, root
        self.step, self.paused = step or 0, False
        self._off = self._over = False  # by the switch; for good
        self._given_step = step
        self.failure: str | None = None
        self.alerts: list[Alert] = []
        self.count = 0  # steps that were taken
        beside = import_module(f"trueup.recording.adapters.{framework.name}.monitoring")
        self._optimizers = optimizers
        self._steps_made: Callable[[Any], int | None] = beside.steps_made
        self.wanted = Wanted(options.every, options.digests, frozenset(options.also))
        self.probe: Probe = beside.probe(self, self.wanted, models, optimizers)
        self._writer: SeriesWriter | None = None
        self._judge: Alerts | None = None
        self._stopper: Stopper | None = None
        self._looked = time.monotonic()
        self._control: tuple[float, int] | None = None
        self._capture: Any = None
        self._captured, self._capture_next = 0, False  # the last step of a capture
        self._live: Live | None = None
        self._window: int | None = None  # first step of the window of invariants that is recorded
        self._closed, self._seen = False, 0  # modules that were written
        self._told = False  # what the training is set to
        self._pid = os.getpid()

    # ---------------------------------------------------------------- life
    def start(self, *, at_once: bool = True) -> Monitor:
        """Begin; raises TrueupError where nothing can be written. ``at_once`` False: nothing is written before a step has ended:
        the framework may be imported and not train."""
        rank, world = self.probe.rank_and_world()
        if at_once and (world <= 1 or rank is not None):
            self._open()
        self.probe.attach()
        atexit.register(self.close)
        return self

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(None if error is None else f"the run ended with {type(error).__name__}: {first_line(error)}")

    @property
    def series(self) -> int:
        """How many series were taken so far."""
        return 0 if self._writer is None else self._writer.series

    def end_step(self) -> None:
        """End the present step, in a loop in which no optimizer of the framework does."""
        self.probe.end_step()

    def close(self, ending: str | None = None) -> None:
        """Write what is left."""
        if self._closed or os.getpid() != self._pid:  # a forked worker's exit is not the training's
            return
        self._closed = True
        atexit.unregister(self.close)
        with suppress(Exception):
            self.probe.drain()
        self._end_capture()
        if self._live is not None:
            self._live.close()
        self.probe.detach()
        if self._stopper is not None:
            self._stopper.end()
        if self._writer is not None:
            try:
                self._write_modules(self._writer)
                status = "interrupted" if ending else "complete" if self.failure is None else "stopped"
                self._writer.close(status, **self.probe.describe(), notes=[one for one in (ending, self.failure) if one])
            except OSError as error:
                say(f"what the monitor took last could not be written to {self.path}: {error}")

    def _open(self, made_now: int = 0) -> SeriesWriter | None:
        """Take the rank's folder; ``made_now``: steps that the optimizer has made of those that are not numbered yet."""
        rank, world = self.probe.rank_and_world()
        if not in_ranges(rank or 0, self.options.ranks):
            self.paused = self._over = True
            return None
        self._writer = writer = SeriesWriter(self.path, rank or 0, self._root, self.probe.describe())
        if writer.resumed:
            stepping = self._optimizers or [one for one in [self.probe.optimizer] if one is not None]
            made = next((n - made_now for one in stepping if (n := self._steps_made(one)) is not None), None)
            known = made if self._given_step is None else self._given_step
            self.step = writer.last_step + 1 if known is None else known
        self._stopper = Stopper(self.path, rank or 0, world)
        with suppress(OSError):
            (self.path / "stop").unlink()  # of the run before
        if "stop" in self.options.actions:
            self._stopper.start()
        if self.options.alerts:
            from trueup.analysis.monitor.alerts import Alerts

            self._judge = Alerts(self.path, rank or 0, world)
        if self.options.invariants is not None:
            from trueup.analysis.invariants.relations import Live, load

            self._live = Live(load(Path(self.options.invariants)), self.path, rank or 0, self.options.check)
        return writer

    # ---------------------------------------------------------------- what a probe tells
    def failed(self, error: Exception, what: str) -> None:
        """Say once that the monitor failed, and end it; the training goes on."""
        if self.failure is None:
            self.failure = f"the monitor stopped at step {self.step}: {type(error).__name__}: {first_line(error)} (in {what})"
            say(f"{self.failure}. The training goes on without it.")
            if os.environ.get("TRUEUP_TRACEBACK"):
                import traceback

                traceback.print_exception(error)
        self.paused = self._over = True

    def arrived(self, blocks: Sequence[Block], step: int | None = None) -> None:
        """Take the numbers of the present step, or of an earlier one."""
        writer = self._ready()
        if writer is None:
            return
        of = self.step if step is None else step
        try:
            writer.append(of, blocks)
            self._write_modules(writer)
        except OSError as error:
            self.failed(error, f"writing to {self.path}")
        self.count += 1
        for alert in self._judge.take(of, blocks) if self._judge is not None else ():
            self._act(alert)

    def _ready(self) -> SeriesWriter | None:
        return None if self._over else self._writer or self._open(made_now=1)

    def ended(self) -> None:
        """The present step is over."""
        writer = self._ready()  # which numbers it, where that is not known yet
        if writer is not None and not self.paused and not self._told:
            self._told = True
            with suppress(OSError):
                writer.write_manifest("recording", settings=self.probe.settings(), dtypes=self.probe.dtypes())
        ended, self.step = self.step, self.step + 1
        self._look()
        if self._stopper is not None:
            self._stopper.step()
            if "stop" in self.options.actions:
                self._stopper.stop_if_due(ended)

    def begins(self, model: Any) -> None:
        """A model begins to run: a step's capture begins or ends here, between two steps."""
        if self._capture is not None and self.step > self._captured:
            self._end_capture(whole=True)
        if self._capture is None and self._capture_next:
            self._capture_next = False
            directory = self.path / CAPTURES / f"step-{self.step:06d}"
            if self._begin_capture(model, directory, self.step, detail="tensor"):
                say(f"step {self.step} is captured at full detail into {directory}")
        elif self._capture is None and self._live is not None and not self.paused and self._live.due(self.step):
            from trueup.analysis.invariants.relations import WINDOW

            self._window, levels = self.step, self._live.levels
            if not self._begin_capture(
                model, self._live.folder(self.step), self.step + WINDOW - 1, detail="digest", level=levels, steps=f"0:{WINDOW}"
            ):
                self._live = None

    def _write_modules(self, writer: SeriesWriter) -> None:
        seen = self.probe.modules
        if len(seen) > self._seen:
            write_json(writer.folder / MODULES, redacted(seen))
            self._seen = len(seen)

    # ---------------------------------------------------------------- alerts
    def _act(self, alert: Alert) -> None:
        self.alerts.append(alert)
        assert self._writer is not None
        with suppress(OSError), (self._writer.folder / ALERTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(redacted(dataclasses.asdict(alert))) + "\n")
        if len(self.alerts) <= MOST_SAID:
            say(f"{alert.said}" + ("; later alerts are only written" if len(self.alerts) == MOST_SAID else ""))
        if "capture" in self.options.actions and self._capture is None:
            self._capture_next = True
        if self.options.command is not None:
            _run(self.options.command, json.dumps(redacted(dataclasses.asdict(alert) | {"directory": str(self.path)})))
        if "stop" in self.options.actions and self._stopper is not None:
            self._writer.flush()
            self._stopper.ask(self.step, f"the run was stopped by an alert, as asked: {alert.said} (exit code 3)")

    # ---------------------------------------------------------------- the switch, and a step at full detail
    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        file = self.path / CONTROL
        try:
            stat = file.stat()
            if (stat.st_mtime, stat.st_size) == self._control or stat.st_size > 1000:
                return
            self._control = stat.st_mtime, stat.st_size
            words = file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return
        self.obey(words)

    def obey(self, words: Sequence[str]) -> None:
        """Do what the file `CONTROL` says."""
        if words[:1] == ["capture"]:
            self._capture_next = True
        elif len(words) == 2 and words[0] == "every" and words[1].isdecimal() and int(words[1]):
            self.wanted.every = int(words[1])
        elif words in (["off"], ["on"]):
            self._off = words == ["off"]
            self.paused = self._off or self._over or self._capture is not None
        elif words:
            say(f"{self.path / CONTROL} says {' '.join(words)[:80]!r}: expected off, on, every N or capture")

    def _begin_capture(self, model: Any, directory: Path, last: int, **options: Any) -> bool:
        """Begin to capture until the end of step ``last``; say so and return False where that cannot be."""
        from trueup.recording.engine.session import capture
        from trueup.recording.recorder.options import CaptureOptions

        session: Any = import_module(f"trueup.recording.adapters.{self._framework.name}.session")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            begun = capture(session.Session, directory, model, CaptureOptions.of(**options))
            begun.__enter__()
        except (TrueupError, OSError) as error:
            say(f"step {self.step} is not captured: {first_line(error)}")
            return False
        self._capture, self._captured, self.paused = begun, last, True
        return True

    def _end_capture(self, *, whole: bool = False) -> None:
        """End a capture; ``whole``: the next step has begun, so its last one holds all that followed."""
        if self._capture is not None:
            with suppress(Exception):
                self._capture.__exit__(None, None, None)
            self._capture = None
            self.paused = self._off or self._over
            if self._window is not None and whole:
                self._check(self._window)
            self._window = None

    def _check(self, first: int) -> None:
        """Judge a window of invariants."""
        if self._live is None or self._writer is None or self._over:
            return
        from trueup.analysis.monitor.alerts import Alert

        try:
            found = self._live.judge(first)
        except Exception as error:  # noqa: BLE001 - the training goes on
            say(f"the invariants of step {first} were not checked: {first_line(error)}")
            return
        if found:
            one = found[0]
            more = f"; so do {len(found) - 1:,} relations after it" if found[1:] else ""
            names = tuple(f"{other.relation}/{other.scope}" for other in found[1:17])
            said = f"{one.said}{more}"
            self._act(Alert(one.step, one.rank, "invariant", f"{one.relation}/{one.scope}", "", said, names))


def _run(command: str, alert: str) -> None:
    """Run a command without a shell and without waiting for it, with an alert on its standard input."""
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(alert.encode())
    except OSError as error:
        say(f"the command for alerts did not start: {error}")


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
