from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trueup.foundation.frameworks.trees import OptimizerFacts
from trueup.recording.engine import settings as room
from trueup.recording.engine.replacing import Built
from trueup.recording.engine.scopes import Scopes, walk
from trueup.recording.engine.settings import TIED, Settings


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


class Module:
    """A module that holds others by name."""

    def __init__(self, **held: Module) -> None:
        self.held = held


class _Scopes(Scopes):
    def below(self, root: Module, prefix: str) -> Iterator[tuple[str, Any]]:
        return walk(root, prefix, self.children)

    def children(self, module: Module) -> Iterator[tuple[str, Any]]:
        yield from module.held.items()

    def is_model(self, root: Module) -> bool:
        return True


def test_a_model_that_runs_inside_another_is_named_as_its_calls_are() -> None:
    scopes, model = _Scopes(), Module(words=Module(), head=Module())
    scopes.register(model)
    around = Module(model=model, loss=Module())
    assert scopes.names(around) == {
        "": "Module", "model": "", "model.words": "words", "model.head": "head", "loss": "Module.loss",
    }  # fmt: skip
    built = Built((), (), pytest.fail)
    held = {"": {}, "model.words": {}, "model.head": {f"weight{TIED}": "model.words.weight"}}
    settings = Settings(lambda _: None, lambda _: held, pytest.fail, built, names=scopes.names)
    settings.entered(around)
    settings.step_ended()
    found = settings.news()
    assert found is not None
    assert found["modules"] == {"Module": {}, "words": {}, "head": {f"weight{TIED}": "words.weight"}}
    settings.close()
    built.close()
