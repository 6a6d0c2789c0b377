"""The look at a step: whether anything is bad, which call it comes from, and what is saved and said of it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trueup.analysis.watch.again import Again, CannotRerun
from trueup.analysis.watch.classify import FOLLOWS, Found, found_in
from trueup.analysis.watch.saving import Reproduced, around, attach, free_directory, save
from trueup.analysis.watch.scale import LossScale
from trueup.analysis.watch.stopping import Stopper
from trueup.analysis.watch.telling import Hit, last_words, message, name_of, reproduction, say
from trueup.foundation.redaction import redacted
from trueup.recording.recorder import Call
from trueup.recording.recorder.keeping import Keeper, last_calls
from trueup.recording.recorder.recent import Recent
from trueup.recording.recorder.rows import FIELDS, Rows
from trueup.recording.recorder.session import BaseSession
from trueup.recording.recorder.watch_options import WatchOptions

CALLS_OF_A_HIT = 4
"""Calls that are saved with their tensors, the first ones."""
LOSS_SCALE = "loss_scale"
"""Kind of a hit in a step that a GradScaler skipped, which alone is none."""
ALIKE = 2
"""Hits with the same first call that are saved; later ones are counted."""
SIGNATURES = 1024
"""Sets of marked slots that are remembered as harmless, so as not to be classified in each step."""
FROM_OUTSIDE = ("input", "parameters", FOLLOWS)
"""Kinds that a bad step before explains: weights, buffers and what the loop carries on hold what it gave."""
MOST_HITS = 10_000
"""Hits of which the report has an entry."""

Signature = tuple[tuple[int, int, str, int], ...]


class Watcher:
    """Looks at the rows of a session.

    Args:
        session: the watched one.
        keeper: its recorder.
        again: executes calls once more.
        options: when to stop, how much to save.
    """

    def __init__(self, session: BaseSession, keeper: Keeper, again: Again, options: WatchOptions) -> None:
        self._session, self._keeper, self._again, self.options = session, keeper, again, options
        self.hits: list[Hit] = []
        self.transients = 0
        self.scale = LossScale()
        self._harmless: Recent[Signature, bool] = Recent(SIGNATURES)
        self._alike: Counter[tuple[str, str]] = Counter()
        self._looked = 0
        self._bad = -2
        """The last step with a hit."""
        self._told: set[tuple[str, int]] = set()
        """Calls that were hits in the present step."""
        self._before: Rows = []
        self._written = 0
        self._count = 0
        self._stopper: Stopper | None = None

    def start(self) -> None:
        """Begin; the rank may be known only later, with the process group."""

    @property
    def stopper(self) -> Stopper:
        """What stops this process, made when the rank is known."""
        rank, world = self._session.rank_and_world()
        if self._stopper is None:
            self._stopper = Stopper(self._keeper.directory, rank or 0, world)
            if self.options.stop_after is not None:
                self._stopper.start()
        return self._stopper

    # ---------------------------------------------------------------- a look
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
        rows = self._keeper.rows()
        rank = self._session.rank_and_world()[0] or 0
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
        """Note the scale of a step, a tensor of one element; the host has waited for that step already."""
        if scale is not None:
            self.scale.add(self._keeper.step, float(scale.item()), skipped=skipped)

    def end_step(self) -> None:
        """Let the rows of the step before go: those of this one tell how weights grow, and are the frames before a hit."""
        self._before = self._keeper.clear()
        self._looked = 0
        self._told.clear()
        self.stopper.step()

    def stop_if_due(self, step: int) -> None:
        """Stop the run where that was asked for; ``step`` is at its look, or has ended.

        Raises:
            WatchStopped: now.
        """
        if self.options.stop_after is not None:
            self.stopper.stop_if_due(step)

    def finish(self) -> None:
        """Write what the run was like, if there was a hit."""
        if self._stopper is not None:
            self._stopper.end()
        if self.hits:
            self._write_report()

    # ---------------------------------------------------------------- a hit
    def _hit(self, found: Sequence[Found], rows: Rows, *, execute: bool) -> None:
        first = found[0]
        self._bad = self._keeper.step
        name = name_of(first.call)
        self._alike[first.kind, name] += 1
        self._count += 1
        step, rank = self._keeper.step, self._session.rank_and_world()[0] or 0
        path, tensors = None, self._why_not(first.kind, name)
        if not tensors:
            path, tensors = self._save(found, rows, execute=execute)
        source, text = self._source(first.call)
        hit = Hit(step, rank, first.kind, name, first.said, source, None if path is None else str(path), tensors)
        if len(self.hits) < MOST_HITS:
            self.hits.append(hit)
        if path is not None:
            say(message(hit, text))
            self._write_report()
        if self.options.stop_after is not None and self._count >= self.options.stop_after:
            self.stopper.ask(step, last_words(self._keeper.directory, self._count, hit))

    def _why_not(self, kind: str, name: str) -> str:
        """Say why a hit is not saved; empty where it is."""
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
            except CannotRerun as reason:
                said = f"not executed again, because {reason}"
        reproduced = Reproduced() if again is None else attach(rows, again.rows, calls)
        if again is not None:
            said = reproduction(again, reproduced)
        rank = self._session.rank_and_world()[0] or 0
        path = free_directory(keeper.directory, keeper.step, rank)
        notes = [*(one.said for one in found), f"tensors of {name_of(found[0].call)}: {said}"]
        kept = last_calls(self._before, self.options.frames) + around(rows, calls, self.options.frames)
        try:
            save(path, session.options, self._describe, kept, keeper.sites, notes)
            self._written += _size(path)
            if again is not None and reproduced.differing:
                other = path.with_name(f"{path.name}.again")
                why = f"what {path.name} gave when it was executed again"
                save(other, session.options, self._describe, again.rows, keeper.sites, [why])
                self._written += _size(other)
                said += f"; what it gave then is in {other}"
        except Exception as error:  # noqa: BLE001 - the training goes on
            return None, f"not saved: {error}"
        return path, said

    def _describe(self) -> tuple[int | None, dict[str, Any], dict[str, Any]]:
        rank, _ = self._session.rank_and_world()
        return rank, self._session._root, self._session.describe()

    def _source(self, call: Call) -> tuple[str | None, str | None]:
        frames, text = self._keeper.sites.known().get(-1 if call.site is None else call.site, ((), None))
        return (frames[0] if frames else None), text

    # ---------------------------------------------------------------- the report
    def report(self) -> dict[str, Any]:
        """Return what became of the run, as JSON."""
        return {
            "steps": self._keeper.step + 1, "hits": self._count, "transients": self.transients,
            "loss_scale": {"said": self.scale.sentence(), "changes": self.scale.changes},
            "stopped": self.options.stop_after is not None and self._count >= self.options.stop_after,
            "first": [dataclasses.asdict(hit) for hit in self.hits[:64]],
        }  # fmt: skip

    def _write_report(self) -> None:
        rank = self._session.rank_and_world()[0] or 0
        directory = self._keeper.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps(redacted(self.report() | {"all": [dataclasses.asdict(hit) for hit in self.hits]}), indent=1)
            temporary = directory / f"watch-rank-{rank:05d}.json.tmp"
            temporary.write_text(text)
            temporary.replace(directory / f"watch-rank-{rank:05d}.json")
        except OSError as error:
            self._keeper.note(f"the report of the watch could not be written: {error}")


def _signature(rows: Rows, counts: NDArray[np.int64], marked: NDArray[np.int64]) -> Signature:
    """Return which slots hold what, not how much of it: what is the same from step to step where masks are at work."""
    flags = ((counts[marked] > 0) @ np.array([1, 2, 4, 8])).tolist()
    return tuple(
        (id(rows[FIELDS * k + 1].kind), rows[FIELDS * k + 1].ordinal, rows[FIELDS * k + 2].name, flag)
        for k, flag in zip(marked.tolist(), flags, strict=True)
    )


def _with_forward(calls: Sequence[Call], rows: Rows) -> list[Call]:
    """Add the forward calls of backward ones: their inputs are what a replay needs."""
    known = {call.seq: call for call in rows[1::FIELDS]}
    found = {call.seq: call for call in calls}
    for call in calls:
        forward = known.get(-1 if call.forward_seq is None else call.forward_seq)
        if forward is not None:
            found[forward.seq] = forward
    return [found[seq] for seq in sorted(found)]


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
