"""Who made what a slot holds, where a storage remembers the last of several views alone: against a plain reading of the rule."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trueup.foundation.facts.slots import is_output
from trueup.foundation.store import schema
from trueup.foundation.store.call_columns import PASSED_ON, CallColumns
from trueup.foundation.store.columns import Vocabulary

Slots = list[tuple[int, str, int, int, str]]  # call, slot, digest, producer, its slot
NAMES = ["input.0", "input.1", "output.0", "output.1", "grad_output.0", "grad_input.0"]


def drawn(chance: np.random.Generator) -> Slots:
    found: Slots = []
    for call in range(int(chance.integers(2, 8))):
        for name in chance.permutation(NAMES)[: chance.integers(1, len(NAMES))].tolist():
            alike = {digest for c, other, digest, *_ in found if c == call and is_output(other)}
            digest = int(chance.choice([one for one in range(1, 9) if not is_output(name) or one not in alike]))
            found.append((call, name, digest, int(chance.integers(-1, 8)), str(chance.choice(NAMES))))
    return found


def expected(slots: Slots) -> list[tuple[int, str]]:
    """Return the maker of each slot, and which of its results it is, one after the other."""
    calls = {call for call, *_ in slots}
    made = {c: {digest: name for call, name, digest, *_ in slots if call == c and is_output(name)} for c in calls}
    through: dict[int, int] = {}
    for call, name, digest, producer, _ in slots:
        if not is_output(name) and producer in calls and len(made[call]) == 1 and digest in made[call]:
            through[call] = producer
    found = []
    for _, name, digest, producer, slot in slots:
        maker = producer
        for _ in range(0 if is_output(name) or producer not in calls else PASSED_ON):
            maker = through.get(maker, maker)
        asked = not is_output(name) and producer in calls and len(made[maker]) > 1
        told = asked and made[producer].get(digest) == slot
        found.append((maker, made[maker][digest]) if asked and not told and digest in made[maker] else (producer, slot))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_views_are_of_the_call_that_returned_these_bytes(seed: int) -> None:
    chance, changed = np.random.default_rng(seed), 0
    for _ in range(60):
        slots = drawn(chance)
        call, name, digest, producer, slot = zip(*slots, strict=True)
        given = {
            "rank": [0] * len(slots), "step": [0] * len(slots), "seq": call, "slot": name, "producer_seq": producer,
            "digest": [f"{one:016x}" for one in digest], "producer_slot": slot, "shape": [[2]] * len(slots),
        }  # fmt: skip
        columns = {
            one.name: pa.array(given[one.name]).cast(one.type) if one.name in given else pa.nulls(len(slots), one.type)
            for one in schema.RECORDS
        }
        table = pa.table(columns)
        found = CallColumns(table.select, Vocabulary(), Vocabulary())
        makers = list(zip(found.producer.tolist(), [found.names.name(n) for n in found.producer_slot.tolist()], strict=True))
        assert makers == expected(slots)
        changed += makers != list(zip(producer, slot, strict=True))
    assert changed > 10
