"""Who makes each call, and in which order one process would have made the calls of all ranks.

Where all ranks make the same calls it is the first rank's order, and its numbers. Where stages of a pipeline or experts make calls
that others do not, the ranks' orders are merged: a call waits for those before it on each rank that makes it, and for the call on
another rank that made what it is given, which is told by equal bytes: what was sent is what came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trueup.comparison.layout.calls import Call, Calls, Key
from trueup.comparison.layout.standing import Standing
from trueup.comparison.layout.updates import is_update

Made = tuple[int, int, str]  # rank, number of the call, slot


def made_by(calls: Mapping[int, Calls], standing: Standing, other: Collection[Key]) -> tuple[dict[Key, list[int]], int]:
    """Return which workers make each call, and how many calls some make alone that belong to no stage, no expert and no call of the
    ``other`` run: nobody knows what they are to the others."""
    makers: dict[Key, list[int]] = {}
    scopes = {worker: {key[2] for key in its.kept if key[1] == "module"} for worker, its in calls.items()}
    for worker, its in calls.items():
        for key in its.kept:
            makers.setdefault(key, []).append(worker)
    alone = 0
    kept: dict[Key, list[int]] = {}
    for key, workers in makers.items():
        all_of_them = len(workers) == len(calls) or _of_one_pass(workers, standing)
        if all_of_them or (_is_grid(workers, standing) and (is_update(key) or _belongs(key, workers, standing, scopes, other))):
            kept[key] = workers
        else:  # what is given nothing makes constants, and shows in what reads them
            alone += any(name.startswith(("input.", "grad_output.")) for name in calls[workers[0]].kept[key].rows)
    return kept, alone


def _of_one_pass(workers: Collection[int], standing: Standing) -> bool:
    return len(workers) == len(standing.ranks.coordinates) and all(worker % standing.passes == 0 for worker in workers)


def _is_grid(workers: Collection[int], standing: Standing) -> bool:
    """Tell whether along each axis all ranks make a call, or as many of each group."""
    for axis in standing.workers.axes:
        sizes = {sum(one in workers for one in group) for group in standing.workers.along(axis)} - {0}
        if len(sizes) != 1:
            return False
    return True


def _belongs(
    key: Key, workers: Collection[int], standing: Standing, scopes: Mapping[int, set[str]], other: Collection[Key]
) -> bool:
    places = [standing.workers.coordinates[worker] for worker in workers]
    axes = standing.workers.axes
    alone = [axis for n, axis in enumerate(axes) if len({place[n] for place in places}) == 1 < standing.workers.size(axis)]
    if (alone and all(axis in standing.stages for axis in alone)) or key in other:
        return True
    return bool(key[2]) and all(key[2] not in held for worker, held in scopes.items() if worker not in workers)


class Order:
    """``keys`` in the order of one process; `number` is what a call of a rank is numbered there; ``numbers``: those of earlier
    steps, which this step adds to."""

    def __init__(
        self, calls: Mapping[int, Calls], makers: Mapping[Key, list[int]], passes: int, numbers: dict[tuple[int, int], int]
    ) -> None:
        self._calls, self._passes, self._numbers = calls, passes, numbers
        self._sent: dict[tuple[str, str | None], list[tuple[int, Call, str]]] = {}
        first = min(calls)
        lists = {worker: [key for key in its.kept if key in makers] for worker, its in calls.items()}
        updates = {key: place for its in calls.values() for key, place in its.updates.items()}
        places = [updates[key] for key in lists[first] if key in updates]
        if all(workers[0] == first for workers in makers.values()) and places == sorted(places):
            self.keys = lists[first]
            self._merged = False
            return
        self._merged = True
        self._know_sent(makers)
        self.keys = self._merge({w: held for w, held in lists.items() if w % passes == 0}, makers)
        seen = set(self.keys)
        self.keys += [key for key in dict.fromkeys(key for held in lists.values() for key in held) if key not in seen]
        at = [n for n, key in enumerate(self.keys) if key in updates]
        for n, key in zip(at, sorted((self.keys[n] for n in at), key=lambda key: updates[key]), strict=True):
            self.keys[n] = key
        base = sum(min(its.keys, default=0) for worker, its in calls.items() if worker % passes == 0)
        for place, key in enumerate(self.keys):
            for worker in makers[key]:
                self._numbers[worker // passes, calls[worker].kept[key].seq] = base + place

    def number(self, rank: int, seq: int | None) -> int | None:
        """Return the number of a rank's call, None of one that was not joined."""
        if seq is None or not self._merged:
            return seq
        return self._numbers.get((rank, seq))

    def sent(self, worker: int, call: Call, name: str) -> Made | None:
        """Return the call of another rank that made what a call is given."""
        if not self._merged:
            return None
        digest = self._digest(worker, call, name)
        for other, its, slot in self._sent.get((call.key[0], digest), ()):
            if other // self._passes != worker // self._passes:
                return other // self._passes, its.seq, slot
        return None

    def _digest(self, worker: int, call: Call, name: str) -> str | None:
        told: str | None = self._calls[worker].rows[call.rows[name]]["digest"] if name in call.rows else None
        return told

    def _know_sent(self, makers: Mapping[Key, list[int]]) -> None:
        for worker, its in self._calls.items():
            if worker % self._passes:
                continue
            for key, call in its.kept.items():
                if key not in makers or len(makers[key]) == len(self._calls):
                    continue
                for name in call.rows:
                    if name.startswith(("output.", "grad_input.")) and (digest := self._digest(worker, call, name)) is not None:
                        self._sent.setdefault((key[0], digest), []).append((worker, call, name))

    def _merge(self, lists: Mapping[int, list[Key]], makers: Mapping[Key, list[int]]) -> list[Key]:
        at = dict.fromkeys(lists, 0)
        done: dict[Key, None] = {}
        while any(at[worker] < len(held) for worker, held in lists.items()):
            moved = False
            for worker, held in lists.items():
                while at[worker] < len(held):
                    key = held[at[worker]]
                    if key not in done and not self._is_free(worker, key, lists, at, makers, done):
                        break
                    done[key] = None
                    at[worker] += 1
                    moved = True
            if not moved:  # ranks wait for each other: what is sent is not told by its bytes
                worker = min(one for one, held in lists.items() if at[one] < len(held))
                done[lists[worker][at[worker]]] = None
                at[worker] += 1
        return list(done)

    def _is_free(
        self, worker: int, key: Key, lists: Mapping[int, list[Key]], at: Mapping[int, int],
        makers: Mapping[Key, list[int]], done: Mapping[Key, None],
    ) -> bool:  # fmt: skip
        if any(other in lists and (at[other] >= len(lists[other]) or lists[other][at[other]] != key) for other in makers[key]):
            return False
        if len(makers[key]) == len(self._calls):
            return True
        call = self._calls[worker].kept[key]
        for name in call.rows:
            if name.startswith(("input.", "grad_output.")):
                its = self._calls[worker].rows[call.rows[name]]
                if its["producer_seq"] in self._calls[worker].keys:
                    continue
                sent = self._sent.get((key[0], its["digest"]), ())
                if any(other != worker and there.key not in done for other, there, _ in sent):
                    return False
        return True
