"""Finding the objects that a run is set by must not be felt by its other threads."""

from __future__ import annotations

import threading

from trueup.recording.engine.live_objects import alive


class Base:
    pass


class Derived(Base):
    pass


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
