"""The look at a step: whether anything is bad, which call it comes from, and what is saved and said of it.

The rows in memory go to the classifier of `trueup.analysis.anomalies`; the loss scale is kept for all steps, where it changes.

A run stops on all ranks without messages of its own and without a hang. The rank with the last allowed hit writes the file ``stop``
into the watch's directory and goes on for one more step. No rank can finish that step before the first has sent its part, after
writing; so all find the file when they look at that step, before its optimizer, and stop. For ranks that never get there (they wait
for one that is gone, or see a file system late) a thread also looks at the file: it ends the process after three steps' time and 30
seconds.

A watch in a ``with`` block, and its session: it looks at a step's rows when the step ends, and when the run does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trueup.analysis.anomalies import Memory, StepAnomalies, classify
from trueup.analysis.anomalies.effects import LEAST, OFTEN, SHARE
from trueup.analysis.watch import saving
from trueup.analysis.watch.saving import CannotRerun, Hit, Rerun
from trueup.foundation.model import TrueupError
from trueup.foundation.redaction import redacted
from trueup.foundation.store.durable import write_json
from trueup.foundation.store.schema import filled
from trueup.foundation.words.wording import say
from trueup.recording.engine.session import BaseSession, Capture, running_of
from trueup.recording.recorder import Call, CaptureOptions
from trueup.recording.recorder.columns import parts
from trueup.recording.recorder.options import STOPPED, WatchOptions, WatchStopped
from trueup.recording.recorder.recorder import Keeper, Recent, last_calls
from trueup.recording.recorder.rows import FIELDS, Rows
from trueup.recording.recorder.sites import Sites

FOLLOWS = "follows"  # kind of a hit that a hit of the step before explains: its weights hold what that step gave


@dataclass(frozen=True, slots=True)
class Found:
    """A call that matters."""

    kind: str  # kind of the anomaly, or `FOLLOWS`
    call: Call
    said: str  # one sentence, with the name of the call
    counted: bool  # whether it is a hit: not where all that read it healed it, nor in a step that a GradScaler skipped


def found_in(rows: Rows, before: Rows, rank: int, sites: Sites, *, skipped: bool) -> list[Found]:
    """Judge the rows of a step; those ``before`` tell how weights grew. ``skipped``: a GradScaler skips the optimizer's step."""
    memory = Memory()
    stacks = sites.known()
    if before:
        classify(_table(before, rank), memory, sites=stacks)
    judged = classify(_table(rows, rank), memory, sites=stacks)
    calls = {call.seq: call for call in rows[1::FIELDS]} | {call.seq: call for call in before[1::FIELDS]}
    found = [
        Found(one.kind, calls[one.place.seq], one.sentence, not one.transient and not skipped)
        for one in judged.anomalies
        if one.place.seq in calls
    ]
    return found or _following(judged, rows, skipped=skipped)


def _following(judged: StepAnomalies, rows: Rows, *, skipped: bool) -> list[Found]:
    """Return the hit of a step whose weights the step before left bad."""
    if not judged.follows or skipped:
        return []
    first: Call = rows[1]
    step = judged.follows[0][0]
    said = f"step {judged.step}, rank {judged.rank}: bad from its first call on, because of step {step}"
    return [Found(FOLLOWS, first, said, True)]


def _table(rows: Rows, rank: int) -> pa.Table:
    ((step, table),) = parts(rows, [None] * (len(rows) // FIELDS)).items()
    return filled(table, step=step, rank=rank).sort_by("seq")


CALLS_OF_A_HIT = 4  # calls that are saved with their tensors, the first ones
LOSS_SCALE = "loss_scale"  # kind of a hit in a step that a GradScaler skipped, which alone is none
ALIKE = 2  # hits with the same first call that are saved; later ones are counted
SIGNATURES = 1024  # sets of marked slots that are remembered as harmless, so as not to be classified in each step
FROM_OUTSIDE = ("input", "parameters", FOLLOWS)  # a bad step before explains these: weights, buffers, loop values
MOST_HITS = 10_000  # hits of which the report has an entry

Signature = tuple[tuple[int, int, str, int], ...]


class Watcher:
    """Looks at the rows of a watched session; ``keeper`` is its recorder, ``again`` executes calls once more."""

    def __init__(self, session: BaseSession, keeper: Keeper, again: saving.Again, options: WatchOptions) -> None:
        self._session, self._keeper, self._again, self.options = session, keeper, again, options
        self.hits: list[saving.Hit] = []
        self.transients = 0
        self.scale = LossScale()
        self._harmless: Recent[Signature, bool] = Recent(SIGNATURES)
        self._alike: Counter[tuple[str, str]] = Counter()
        self._looked = 0
        self._bad = -2  # the last step with a hit
        self._told: set[tuple[str, int]] = set()  # calls that were hits in the present step
        self._before: Rows = []
        self._written = 0
        self._count = 0
        self._stopper: Stopper | None = None

    @property
    def _rank(self) -> int:
        return self._session.rank_and_world()[0] or 0

    @property
    def stopper(self) -> Stopper:
        """What stops this process, made when the rank is known."""
        rank, world = self._session.rank_and_world()
        if self._stopper is None:
            self._stopper = Stopper(self._keeper.directory, rank or 0, world)
            if self.options.stop_after is not None:
                self._stopper.start()
        return self._stopper

    def look(self, *, scaler_skips: bool, execute: bool) -> None:
        """Look at the rows since the last look; ``execute``: calls may be executed again."""
        new = self._keeper.rows(self._looked)
        counts = self._keeper.counts(new)
        marked = np.flatnonzero(counts.any(axis=1))
        self._looked += len(new) // FIELDS
        if not len(marked):
            return
        signature = _signature(new, counts, marked)
        if self._harmless.get(signature) and not scaler_skips:
            return
        rows, rank = self._keeper.rows(), self._rank
        found = found_in(rows, self._before, rank, self._keeper.sites, skipped=scaler_skips)
        if scaler_skips and found and self.scale.failing:
            scale = f"the loss scale falls often, or to 1 ({self.scale.sentence()})"
            said = f"step {self._keeper.step}, rank {rank}: {scale}; what overflowed: "
            found[0] = dataclasses.replace(found[0], kind=LOSS_SCALE, said=said + found[0].said, counted=True)
        if self._bad == self._keeper.step - 1 and all(one.kind in FROM_OUTSIDE for one in found if one.counted):
            found = [dataclasses.replace(one, kind=FOLLOWS) for one in found]
        told = [one for one in found if one.counted and (one.kind, one.call.seq) not in self._told]
        self._told.update((one.kind, one.call.seq) for one in told)
        if told:
            self._hit(told, rows, execute=execute)
        elif not any(one.counted for one in found):
            self._harmless.put(signature, True)
            self.transients += scaler_skips and bool(found)

    def scaled(self, scale: Any, *, skipped: bool) -> None:
        """Note a step's scale, a tensor of one element; the host has waited for that step already."""
        if scale is not None:
            self.scale.add(self._keeper.step, float(scale.item()), skipped=skipped)

    def end_step(self) -> None:
        """Let the rows of the step before go; those of this step tell how weights grow, and are the frames before a hit."""
        self._before = self._keeper.clear()
        self._looked = 0
        self._told.clear()
        self.stopper.step()

    def stop_if_due(self, step: int) -> None:
        """Stop the run, by WatchStopped, if that was asked for; ``step`` is at its look, or has ended."""
        if self.options.stop_after is not None:
            self.stopper.stop_if_due(step)

    def finish(self) -> None:
        """Write what the run was like, if there was a hit."""
        if self._stopper is not None:
            self._stopper.end()
        if self.hits:
            self._write_report()

    def _hit(self, found: Sequence[Found], rows: Rows, *, execute: bool) -> None:
        first = found[0]
        self._bad = self._keeper.step
        name = saving.name_of(first.call)
        self._alike[first.kind, name] += 1
        self._count += 1
        step, rank = self._keeper.step, self._rank
        path, tensors = None, self._why_not(first.kind, name)
        if not tensors:
            path, tensors = self._save(found, rows, execute=execute)
        site = first.call.site
        frames, text = self._keeper.sites.known().get(-1 if site is None else site, ((), None))
        source = frames[0] if frames else None
        hit = saving.Hit(step, rank, first.kind, name, first.said, source, None if path is None else str(path), tensors)
        if len(self.hits) < MOST_HITS:
            self.hits.append(hit)
        if path is not None:
            say(saving.message(hit, text))
            self._write_report()
        if self.options.stop_after is not None and self._count >= self.options.stop_after:
            self.stopper.ask(step, saving.last_words(self._keeper.directory, self._count, hit))

    def _why_not(self, kind: str, name: str) -> str:
        """Say why a hit is not saved; empty if it is."""
        if kind == FOLLOWS:
            return "not saved: the step that it follows from is"
        if self._alike[kind, name] > ALIKE:
            return f"not saved: {ALIKE} hits of the same call are"
        if self._written >= self.options.budget:
            return f"not saved: the budget of {self.options.budget / 2**20:,.0f} MB is spent"
        return ""

    def _save(self, found: Sequence[Found], rows: Rows, *, execute: bool) -> tuple[Path | None, str]:
        keeper, session = self._keeper, self._session
        calls = _with_forward([one.call for one in found[:CALLS_OF_A_HIT]], rows)
        again, said = None, "not executed again: the run was ending"
        if execute:
            try:
                again = self._again(calls, rows[1::FIELDS])
            except saving.CannotRerun as reason:
                said = f"not executed again, because {reason}"
        reproduced = saving.Reproduced() if again is None else saving.attach(rows, again.rows, calls)
        if again is not None:
            said = saving.reproduction(again, reproduced)
        path = saving.free_directory(keeper.directory, keeper.step, self._rank)
        notes = [*(one.said for one in found), f"tensors of {saving.name_of(found[0].call)}: {said}"]
        kept = last_calls(self._before, self.options.frames) + saving.around(rows, calls, self.options.frames)
        try:
            saving.save(path, session.options, self._describe, kept, keeper.sites, notes)
            self._written += _size(path)
            if again is not None and reproduced.differing:
                other = path.with_name(f"{path.name}.again")
                why = f"what {path.name} gave when it was executed again"
                saving.save(other, session.options, self._describe, again.rows, keeper.sites, [why])
                self._written += _size(other)
                said += f"; what it gave then is in {other}"
        except Exception as error:  # noqa: BLE001 - the training goes on
            return None, f"not saved: {error}"
        return path, said

    def _describe(self) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
        rank, _ = self._session.rank_and_world()
        return rank, self._session._root, self._session.describe()

    def report(self) -> dict[str, Any]:
        """Return what became of the run, as JSON."""
        return {
            "steps": self._keeper.step + 1, "hits": self._count, "transients": self.transients,
            "loss_scale": {"said": self.scale.sentence(), "changes": self.scale.changes},
            "stopped": self.options.stop_after is not None and self._count >= self.options.stop_after,
            "first": [dataclasses.asdict(hit) for hit in self.hits[:64]],
        }  # fmt: skip

    def _write_report(self) -> None:
        directory = self._keeper.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            report = redacted(self.report() | {"all": [dataclasses.asdict(hit) for hit in self.hits]})
            write_json(directory / f"watch-rank-{self._rank:05d}.json", report)
        except OSError as error:
            self._keeper.note(f"the report of the watch could not be written: {error}")


def _signature(rows: Rows, counts: NDArray[np.int64], marked: NDArray[np.int64]) -> Signature:
    """Return the kinds of bad numbers of each slot, without counts; masks give the same ones in each step."""
    flags = ((counts[marked] > 0) @ np.array([1, 2, 4, 8])).tolist()
    return tuple(
        (id(rows[FIELDS * k + 1].kind), rows[FIELDS * k + 1].ordinal, rows[FIELDS * k + 2].name, flag)
        for k, flag in zip(marked.tolist(), flags, strict=True)
    )


def _with_forward(calls: Sequence[Call], rows: Rows) -> list[Call]:
    """Add the forward calls of backward ones, whose inputs a replay needs."""
    known = {call.seq: call for call in rows[1::FIELDS]}
    found = {call.seq: call for call in calls}
    for call in calls:
        forward = known.get(-1 if call.forward_seq is None else call.forward_seq)
        if forward is not None:
            found[forward.seq] = forward
    return [found[seq] for seq in sorted(found)]


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


MOST = 10_000  # entries that are kept; of a run that has more the first and the last half


@dataclass(slots=True)
class LossScale:
    """``changes`` are ``(step, its scale, whether its optimizer step was skipped)``, of steps that were skipped or changed it."""

    changes: list[tuple[int, float, bool]] = field(default_factory=list)
    skipped: int = 0
    steps: int = 0
    lowest: float = float("inf")
    since_good: int = 0  # steps from the first one on that was not skipped: until then a scale is looking for its size
    late: int = 0  # skipped ones among those

    @property
    def failing(self) -> bool:
        """Whether the scale fell often or to 1, by the rule of `trueup.analysis.anomalies.effects`."""
        often = self.late >= OFTEN and self.late > SHARE * self.since_good
        return often or (self.lowest <= LEAST and self.skipped > 0)

    def add(self, step: int, scale: float, *, skipped: bool) -> None:
        """Note a step of a scaler."""
        self.steps += 1
        self.skipped += skipped
        self.lowest = min(self.lowest, scale)
        if self.since_good or not skipped:
            self.since_good += 1
            self.late += skipped
        if skipped or not self.changes or self.changes[-1][1] != scale:
            self.changes.append((step, scale, skipped))
            if len(self.changes) > MOST:
                del self.changes[MOST // 2]

    def sentence(self) -> str:
        """Say what became of it."""
        if not self.changes:
            return ""
        first, last = self.changes[0], self.changes[-1]
        lowest = min(self.changes, key=lambda entry: entry[1])
        return (
            f"loss scale {first[1]:g} at step {first[0]}, {last[1]:g} at step {last[0]}, lowest {lowest[1]:g} at step {lowest[0]}; "
            f"{self.skipped} of {self.steps} steps skipped"
        )


FILE = "stop"
LOOK_SECONDS = 2.0
GRACE = 30.0


class Stopper:
    """Stops this process when the directory of the watch tells all ranks to."""

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self._file = directory / FILE
        self._rank, self._world = rank, world
        self._longest, self._began = 0.0, time.monotonic()
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to look for ranks that stopped without this one."""
        if self._world > 1:
            threading.Thread(target=self._guard, name="trueup-stop", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._over.set()

    def step(self) -> None:
        """Note that a step is over; steps' time tells how long to wait for one."""
        now = time.monotonic()
        self._longest, self._began = max(self._longest, now - self._began), now

    def ask(self, step: int, said: str) -> None:
        """Ask all ranks to stop: this one at once if it is alone, else all when they look at the next step."""
        at = step + (self._world > 1)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # the first one counts
            write_json(self._file, redacted({"rank": self._rank, "step": step, "at": at, "said": said}), replace=False)

    def stop_if_due(self, step: int) -> None:
        """Stop, by WatchStopped, if any rank asked for it."""
        order = self._order()
        if order is None or step < int(order["at"]):
            return
        self._over.set()
        if int(order["rank"]) == self._rank:
            who = ""
        else:
            who = f"rank {self._rank} stops because rank {order['rank']} had its last hit in step {order['step']}: "
        say(f"{who}{order['said']}")
        raise WatchStopped(STOPPED)

    def _order(self) -> dict[str, str | int] | None:
        try:
            order = json.loads(self._file.read_text())
            return order if {"rank", "step", "at", "said"} <= order.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _guard(self) -> None:
        asked = None
        while not self._over.wait(LOOK_SECONDS):
            if asked is None and self._order() is not None:
                asked = time.monotonic()
            if asked is not None and time.monotonic() - asked > GRACE + 3 * self._longest:
                say(f"rank {self._rank} was asked to stop and reached no optimizer's step since: ended")
                os._exit(STOPPED)


NO_RERUN = (
    "that is not there for {title}; for its tensors run `trueup capture --steps {step}:{following} --detail tensor --stop` "
    "with the same command"
)

W = TypeVar("W", bound="WatchedSession")


class WatchedSession(BaseSession):
    """Stands before an adapter's own session among the bases of its watched one; ``directory`` is made with the first hit."""

    recorder_type = Keeper

    def __init__(self, directory: Path, options: CaptureOptions, watch: WatchOptions, root: dict[str, Any]) -> None:
        super().__init__(directory, options, root)  # type: ignore[call-arg]
        assert isinstance(self.recorder, Keeper)
        self.keeper = self.recorder
        self.watcher = Watcher(self, self.keeper, self.again, watch)

    @classmethod
    def armed(cls: type[W], directory: Path, options: CaptureOptions, watch: str, root: dict[str, Any]) -> W:
        """Make the session of a process that `trueup watch` armed; ``watch`` is an encoded `WatchOptions`."""
        return cls(directory, options, WatchOptions(**json.loads(watch)), root)

    def again(self, calls: Sequence[Call], numbered: Sequence[Call]) -> Rerun:  # noqa: ARG002
        """Execute calls of the step once more; raises CannotRerun unless the adapter keeps what led to them."""
        step = self.keeper.step
        raise CannotRerun(NO_RERUN.format(title=self.adapter.title, step=step, following=step + 1))

    def stop(self) -> None:
        """Look at the last rows and stop watching."""
        self.look("the last step")
        super().stop()

    def finish(self) -> None:
        """Look at the last rows of a process that ends, and write the report."""
        if self.active:
            self.look("the last step", execute=False)
        super().finish()
        self.watcher.finish()

    def end_step(self) -> None:
        """Look at the step, then finish it."""
        self.look("the end of the step")
        ended = self.keeper.step
        super().end_step()
        self.watcher.end_step()
        self.watcher.stop_if_due(ended)

    def report(self) -> dict[str, Any]:
        """Say what this process saw."""
        return super().report() | {"calls": self.keeper.next_seq(), "why": None, "watch": self.watcher.report()}

    def look_before_update(self, *, scaler_skips: bool) -> None:
        """Look before the parameters change, and stop if that is due."""
        self.look("the step", scaler_skips=scaler_skips)
        self.watcher.stop_if_due(self.keeper.step)

    def look(self, when: str, *, scaler_skips: bool = False, execute: bool = True) -> None:
        """Look at the rows since the last look; nothing of it is a call. ``when`` is for messages, ``scaler_skips`` tells whether a
        GradScaler skips the optimizer's step, ``execute`` whether calls may be executed again."""
        if not self.active:
            return
        with self.observing(self.threads.state, f"a look at {when}"):
            self.watcher.look(scaler_skips=scaler_skips, execute=execute)


class Watch(Capture[WatchedSession]):
    """A running watch: leaving the ``with`` block ends it; `hits` are what it found, saved below `path`.

    Steps end as in a capture: by the optimizers, or by `step()` once it was called.
    """

    runs_by = "`trueup capture` or `trueup watch`"

    def __init__(self, session: WatchedSession, models: Iterable[Any]) -> None:
        super().__init__(session, running_of(session.adapter.name))
        for model in models:
            session.scopes.register(model)

    @property
    def hits(self) -> list[Hit]:
        """What was found so far, in order."""
        return list(self._session.watcher.hits)

    def prepare(self) -> None:
        """Refuse, by TrueupError, a directory that holds what another run left; it is made with the first hit."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("step-*")) or (self.path / "stop").exists()):
            raise TrueupError(f"{self.path} is not empty: it holds what another run left; name another directory, or remove it")

    def end(self, error: BaseException | None) -> None:
        """End the watch, and the run if that is due."""
        if error is None:
            self._session.stop()
            self._session.watcher.stop_if_due(self._session.keeper.step)
        else:
            self._session.take_off()
            self._session.finish()
