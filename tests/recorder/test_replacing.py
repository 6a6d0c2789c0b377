"""Standing in for attributes of a framework, and around its functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trueup.recording.engine.replacing import Around


class Layer:
    def call(self, x: int, *, bias: int = 0) -> int:
        """Add."""
        return x + bias

    @staticmethod
    def build(x: int) -> int:
        return x


class Derived(Layer):
    pass


def doubled(original: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * original(*args, **kwargs)


@pytest.mark.parametrize("kind", [Layer, Derived])
def test_a_method_is_called_with_its_object_and_bears_its_name(kind: type[Layer]) -> None:
    before = vars(kind).get("call")
    part = Around(kind, "call", doubled)
    part.install()
    assert kind().call(1, bias=2) == 6
    assert (kind.call.__name__, kind.call.__doc__) == ("call", "Add.")
    assert part.remove()
    assert kind().call(1, bias=2) == 3
    assert vars(kind).get("call") is before


def test_a_static_method_stays_one() -> None:
    part = Around(Layer, "build", doubled)
    part.install()
    try:
        assert (Layer.build(2), Layer().build(2)) == (4, 4)
    finally:
        part.remove()
    assert Layer().build(2) == 2


def test_whoever_replaced_it_since_stays() -> None:
    module = SimpleNamespace(run=lambda: 1)
    part = Around(module, "run", doubled)
    part.install()
    module.run = lambda: 5
    assert not part.remove()
    assert module.run() == 5


def test_what_a_version_lacks_is_left_alone() -> None:
    module = SimpleNamespace()
    Around(module, "run", doubled).install()
    assert not hasattr(module, "run")
