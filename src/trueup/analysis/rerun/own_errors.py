"""Which calls of a capture are wrong by themselves: as its shadow run says, else each computed again from its own inputs.

    >>> own = OwnErrors(open_capture("runs/cpu"), open_capture("runs/npu"), seconds=60)     # doctest: +SKIP
    >>> own(0, [(814, 814), (822, 822)])                                        # doctest: +SKIP
    {814: None, 822: Reason(why=<Why.RECOMPUTED>, facts=(0.31, 2.1e-06))}

A comparison asks this of calls behind a culprit: their inputs are off already, so the size of an error does not tell whose it is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trueup.analysis.rerun.processes import executing, framework_of
from trueup.foundation.facts.operators import has
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import DETAILS, TrueupError
from trueup.foundation.store import Capture
from trueup.recording.execution import shadow
from trueup.recording.execution.judging import Arrays, same_bytes
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls

TOLD = {"accurate": False, "ill-conditioned": False, "wrong": True}  # by the verdict on a call; others are unknown


class OwnErrors:
    """Tells which of a candidate's calls are wrong by themselves (`comparison.verdict.judged.OwnErrors`), within ``seconds``. If
    the baseline kept tensors too, a call that is as wrong there is not: its operator computes that way."""

    def __init__(self, baseline: Capture, candidate: Capture, seconds: float) -> None:
        self._captures, self._left = (baseline, candidate), seconds
        self._judges: dict[int, tuple[Any, RecordedCalls] | None] = {}
        self._shadow: dict[tuple[int, int], Reason | None] | None = None

    def __call__(self, rank: int, calls: Sequence[tuple[int, int]]) -> Mapping[int, Reason | None]:
        """Return, by number in the candidate, why a call is wrong by itself, or None if it is not."""
        if found := self._of_shadow():
            return {seq: found[rank, seq] for _, seq in calls if (rank, seq) in found}
        told: dict[int, Reason | None] = {}
        for before, after in self._in_turn(rank, calls):
            started = time.monotonic()
            if self._left <= 0:
                break
            judged = self._judged(1, rank, after)
            if judged is not None and judged[0] and (its := self._judged(0, rank, before)) is not None and its[0]:
                judged = False, None
            if judged is not None:
                told[after] = judged[1]
            self._left -= time.monotonic() - started
        return told

    def _in_turn(self, rank: int, calls: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Put the first call of each kind first, then the second ones, so that each kind is looked at before time runs out."""
        judge = self._judge(1)
        if judge is None:
            return []
        order: list[tuple[int, int, tuple[int, int]]] = []
        count = Counter[tuple[str, str, str]]()
        for before, after in calls:
            call = _call(judge[1], rank, after)
            if call is not None:
                kind = call.key.level, call.key.phase, call.key.op
                order.append((count[kind], len(order), (before, after)))
                count[kind] += 1
        return [pair for *_, pair in sorted(order)]

    def _judged(self, side: int, rank: int, seq: int) -> tuple[bool, Reason | None] | None:
        """Return whether a call is wrong from its own inputs, and by how much; None if unknown."""
        judge = self._judge(side)
        call = None if judge is None else _call(judge[1], rank, seq)
        if judge is None or call is None:
            return None
        replayer = judge[0]
        with replayer.undisturbed():
            try:
                result = replayer.execute(call, replayer.target)
                if _is_as_recorded(call, result.arrays):  # no float64 is needed to see it
                    return False, None
            except (NotReplayable, TrueupError):
                return None
            outcome = replayer.replay(call, result)
        wrong = TOLD.get(outcome.verdict)
        return None if wrong is None else (wrong, _reason(outcome.error, outcome.explained) if wrong else None)

    def _judge(self, side: int) -> tuple[Any, RecordedCalls] | None:
        """Return what computes the calls of a side again, on the CPU; None if nothing can."""
        if side not in self._judges:
            capture = self._captures[side]
            self._judges[side] = None
            if capture.root.get("detail") == DETAILS[-1]:
                try:
                    adapter = executing(framework_of(capture))
                    adapter.provide("cpu", simulated=False)
                except TrueupError:
                    return None
                calls = RecordedCalls(capture)
                self._judges[side] = adapter.Replayer(calls, "cpu", draws=False, recorded=True), calls
        return self._judges[side]

    def _of_shadow(self) -> dict[tuple[int, int], Reason | None]:
        """Return what the candidate's table of errors says, by rank and number; nothing if it is no shadow run."""
        if self._shadow is None:
            table, _ = shadow.read(self._captures[1].path, self._captures[1].ranks)
            found: dict[tuple[int, int], Reason | None] = {}
            unknown = set()
            for row in table.select(["rank", "seq", "state", "error", "explained"]).to_pylist():
                key, wrong = (row["rank"], row["seq"]), TOLD.get(row["state"])
                if wrong:
                    found[key] = _reason(row["error"], row["explained"])
                elif wrong is None:
                    unknown.add(key)
                else:
                    found.setdefault(key, None)
            for key in self._views() if found else ():  # which a shadow does not judge, for they compute nothing
                found.setdefault(key, None)
            self._shadow = {key: why for key, why in found.items() if why is not None or key not in unknown}
        return self._shadow

    def _views(self) -> Iterator[tuple[int, int]]:
        """Yield rank and number of the candidate's calls that only show what they were given."""
        rows = self._captures[1].records(columns=["rank", "seq", "op"])
        shown = [op for op in pc.unique(rows["op"]).to_pylist() if op is not None and has(op, "view")]
        for row in rows.filter(pc.is_in(rows["op"], pa.array(shown, pa.string()))).to_pylist():
            yield row["rank"], row["seq"]


def _call(calls: RecordedCalls, rank: int, seq: int) -> RecordedCall | None:
    """Return a call that can be computed again."""
    try:
        call = calls.at(rank, seq)
    except TrueupError:
        return None
    return call if call.computed and call.key.level != "module" and call.key.phase != "collective" else None


def _is_as_recorded(call: RecordedCall, arrays: Arrays) -> bool:
    """Tell whether computing a call again gave all its recorded results to the bit."""
    return all(slot in arrays and t.kept and same_bytes(arrays[slot], t.array()) for slot, t in call.outputs.items())


def _reason(error: float | None, explained: float | None) -> Reason:
    numbers = (math.nan if number is None else float(number) for number in (error, explained))
    return Why.RECOMPUTED(*numbers)
