"""Calls inside of a module that are its own matter: nobody knows how what they make lies, and of what the module makes it is known.

Keys and values of the whole sequence, gathered by hand; rows that a mask chooses. What the module makes is compared. A call that is
given a weight of the module stays, for its backward makes the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trueup.comparison.layout.calls import Call, Calls, Key
from trueup.comparison.layout.inferring import Apart

MADE = ("output.", "grad_input.")


class Inner:
    """The calls of a step that are left out so; ``calls`` and ``makers`` are by worker and by call."""

    def __init__(self, calls: Mapping[int, Calls], makers: Mapping[Key, Sequence[int]]) -> None:
        self._calls, self._makers = calls, makers
        self._keys: set[Key] = set()
        self._numbers: set[tuple[int, int | None]] = set()  # by worker and number

    def has(self, call: Call, known: Collection[tuple[Key, str]], apart: Sequence[Apart]) -> bool:
        """Tell whether a call is one of them: ``known``, what is put together so far; ``apart``, what is not, of this call."""
        first = self._makers[call.key][0]
        if (first, call.forward) in self._numbers:
            return True
        its = self._calls[first]
        around = its.keys.get(call.parent if call.parent is not None else -1)
        odd = any(one.kind in ("unknown", "misfit") and one.slot.startswith(MADE) for one in apart)
        if not odd or call.key[:2] != ("forward", "api") or around is None or around[1] != "module" or around not in self._makers:
            return False
        module = self._calls[self._makers[around][0]].kept[around].rows
        weights = {its.rows[at]["digest"] for name, at in module.items() if name.startswith("param.")}
        if any(its.rows[at]["digest"] in weights for name, at in call.rows.items() if name.startswith("input.")):
            return False
        made = [name for name in module if name.startswith(MADE)]
        return bool(made) and all((around, name) in known for name in made)

    def leave_out(self, call: Call, slots: dict[tuple[Key, str], Any]) -> None:
        """Forget what is known of a call; nobody was given anything by it, as far as records say."""
        self._keys.add(call.key)
        for worker in self._makers[call.key]:
            its, number = self._calls[worker], self._calls[worker].kept[call.key].seq
            self._numbers.add((worker, number))
            its.outer[number] = call.parent
            its.keys.pop(number, None)
            for name in its.kept[call.key].rows:
                slots.pop((call.key, name), None)

    def without(self, by_call: Mapping[Key, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the rows of the other calls. One of several of a kind stays, and says that nothing is known of it, if a later one
        is compared: that goes by its number."""
        last = {key[:4]: key[4] for key in by_call if key not in self._keys}
        return [row for key, rows in by_call.items() if key not in self._keys or key[4] < last.get(key[:4], -1) for row in rows]
