"""What is said of a run with another's inputs, also where its manifest is damaged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trueup.foundation.facts.why import Why
from trueup.foundation.store.declared import forced
from trueup.foundation.words.reasons import in_words


@pytest.mark.parametrize(("recorded", "blind"), [
    (["module", "api"], False), (["module"], True), ([["module"], {}, 3], True), ([["api"], "api"], False), ("api", True),
    (None, True),
])  # fmt: skip
def test_agreement_proves_nothing_where_only_modules_were_recorded(recorded: Any, blind: bool) -> None:
    capture: Any = SimpleNamespace(root={"config": {"inputs_from": "base"}, "levels": recorded}, ranks={0: {"notes": None}})
    notes, found = forced(capture, ["module", "api"])
    assert found == blind
    assert (notes[0] == Why.BLIND()) == blind
    assert "those of base" in in_words(notes[-1])
