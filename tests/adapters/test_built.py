"""The objects that a run is set by are known since they were built; the search for older ones must not be felt by other threads."""

from __future__ import annotations

import gc
import importlib
import threading
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trueup.recording.engine import replacing
from trueup.recording.engine.replacing import Built, alive


class Base:
    def __init__(self, *names: str) -> None:
        self.names = names


class Derived(Base):
    pass


class Apart(Base):
    """Does not call its base's constructor."""

    def __init__(self) -> None:
        self.names = ("apart",)


class Above(Base):
    def __init__(self) -> None:
        super().__init__("above")


@dataclass
class Options:
    lr: float = 0.1

    def __post_init__(self) -> None:
        self.half = self.lr / 2


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def watching(notes: list[str]) -> Iterator[Built]:
    before = {kind: dict(vars(kind)) for kind in (Base, Derived, Apart, Above, Options, Namespace)}
    named = [("settings_made_late", "Late"), ("trueup.recording.engine.replacing", "Built")]
    watching = Built((Base, Options), named, notes.append)
    yield watching
    watching.close()
    gc.collect()
    assert all(dict(vars(kind)) == held for kind, held in before.items())  # nothing of ours is left


def ids(found: list[Any]) -> set[int]:
    return {id(one) for one in found}


def test_what_is_built_is_known_and_what_is_gone_is_not(watching: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "alive", None)  # no search any more
    kept = [Base(), Derived("a"), Apart(), Above(), Namespace(lr=1)]
    assert kept[1].names == ("a",)
    assert kept[3].names == ("above",)
    assert ids(watching.of(Base)) == ids(kept[:4])
    assert ids(watching.of(Namespace)) >= {id(kept[4])}
    del kept[0]
    gc.collect()
    assert ids(watching.of(Base)) == ids(kept[:3])


def test_classes_that_are_written_later(watching: Built) -> None:
    class Later(Base):
        def __init__(self) -> None:
            self.names = ()

    @dataclass
    class More(Options):
        steps: int = 1

    kept = [Later(), More(steps=2)]
    assert kept[1].half == 0.05
    assert ids(watching.of(Base, Options)) == ids(kept)


def test_what_is_older_is_searched_for_once(notes: list[str]) -> None:
    kept = [Base(), Apart()]
    watching = Built((Base,), [], notes.append)
    assert ids(watching.of(Base)) == ids(kept)
    watching.close()
    kept.append(Base())
    assert ids(watching.of(Base)) == ids(kept[:2])
    assert notes == []


def test_in_a_process_that_holds_too_much_nothing_is_searched_for(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "MOST_BLOCKS", 0)
    kept = Base()
    watching = Built((Base,), [], notes.append)
    assert watching.of(Base) == []
    watching.close()
    assert notes == [replacing.TOO_MANY]
    assert kept.names == ()


def test_a_class_is_watched_once_its_module_is_loaded(watching: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings_made_late.py").write_text("class Late:\n    def __init__(self):\n        pass\n\nFIRST = Late()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(replacing, "alive", None)
    late = importlib.import_module("settings_made_late")
    second = late.Late()
    assert watching.of(late.Late) == [second]


def test_no_frame_stands_between_constructors(watching: Built) -> None:
    own = vars(Above)["__init__"]
    assert own is Above.__init__
    assert own.__name__ == "__init__"
    assert not hasattr(own, "__wrapped__")
    assert watching.of(Base) == []


def test_objects_of_derived_classes_are_found_and_no_others() -> None:
    kept = [Base(), Derived(), [Base], (Derived,), {"Base": Base}]
    assert {id(one) for one in alive((Base,))} == {id(kept[0]), id(kept[1])}
    assert alive((Derived,)) == [kept[1]]


def test_threads_that_fill_tuples_go_on() -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(50))  # grown as it comes: nobody else may hold it meanwhile
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        alive((Base,))
    over.set()
    for thread in threads:
        thread.join()
    assert errors == []
