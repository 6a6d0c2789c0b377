from __future__ import annotations

import pytest

from trueup.foundation.frameworks.trees import OptimizerFacts
from trueup.recording.engine import settings as room
from trueup.recording.engine.built import Built
from trueup.recording.engine.settings import Settings


class SGD:
    """An optimizer."""


def test_what_the_writer_reads_does_not_change_under_its_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built((), (), pytest.fail)
    settings = Settings(lambda _: OptimizerFacts("torch", ("SGD",), {"lr": 0.1}, held=([],)), lambda _: {}, pytest.fail, built)
    monkeypatch.setattr(room, "redacted", lambda held: held)  # which goes through all of it, on the writer's thread
    settings.stepping(0, SGD(), 0)
    found = settings.news()
    assert found is not None
    settings._optimizers[0]["parameters"] = []  # as when the first step ends, on the training's thread
    assert found["optimizers"][0].keys() == {"class", "groups", "changes"}
    settings.close()
    built.close()
