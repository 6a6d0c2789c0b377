"""Objects of a few classes, known since they were built: what a training is set by is never searched for while it runs.

The constructors of these classes add their objects, weakly, to a list. A constructor of a class that derives from one calls that of
its base; where it does not (``ReduceLROnPlateau``), it is watched itself. A class whose module is not loaded yet is watched once it
is. Objects that are older than the capture are searched for once, before its first step (`alive`), unless the process holds so much
that this would take seconds. No attribute of any object is read.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from trueup.recording.engine.replacing import Around, Replacement, WhenLoaded

MOST_BLOCKS = 20_000_000
"""Blocks of memory that Python holds where older objects are still searched for: some two seconds."""
TOO_MANY = (
    "arguments, data loaders and schedules that were made before the capture began were not searched for: the process holds too "
    "many objects; begin the capture earlier, or run the script under `trueup capture`"
)


class Built:
    """Knows the living objects of ``kinds``, and of the classes named by ``(module, class)`` in ``names``."""

    def __init__(self, kinds: Iterable[type], names: Iterable[tuple[str, str]], note: Callable[[str], None]) -> None:
        self._note, self._open = note, True
        self._known: dict[int, weakref.ref[Any]] = {}
        self._watched: dict[type, None] = {}
        self._replaced: list[Replacement] = []
        self._waiting = {name: WhenLoaded(name[0], partial(self._loaded, name)) for name in dict.fromkeys(names)}
        self._begin((Namespace, *kinds))

    def of(self, *kinds: type) -> list[Any]:
        """Return the living objects of some of the classes that are watched, and of classes that derive from them."""
        late = {name: kind for name in self._waiting if (kind := _class(name)) is not None}
        if late and self._open:  # their module was half loaded when the capture began, so nothing said when it was complete
            self._begin(late.values())
            for name in late:
                self._waiting.pop(name).remove()
        found = [ref() for ref in list(self._known.values())]
        return [one for one in found if isinstance(one, kinds)]

    def close(self) -> None:
        """Leave nothing of ours in any class."""
        self._open = False
        for replaced in reversed(self._replaced):
            replaced.remove()
        for waiting in self._waiting.values():
            waiting.remove()

    def _begin(self, kinds: Iterable[type]) -> None:
        """Watch classes, and those that are loaded among the named; search for what they have made already."""
        loaded = {name: kind for name in self._waiting if (kind := _class(name)) is not None}
        found = tuple(dict.fromkeys((*kinds, *loaded.values())))
        for name in loaded:
            del self._waiting[name]
        for (module, _), waiting in self._waiting.items():
            if module not in sys.modules:
                waiting.install()
        for kind in found:
            self._watch(kind)
        if sys.getallocatedblocks() > MOST_BLOCKS:
            self._note(TOO_MANY)
            return
        for one in alive(found):
            self._add(one)

    def _loaded(self, name: tuple[str, str]) -> None:
        """The module of a class was loaded: what it made meanwhile is the library's own."""
        kind = _class(name)
        if kind is not None and self._waiting.pop(name, None) is not None:
            self._watch(kind)

    def _watch(self, kind: type) -> None:
        if kind in self._watched:
            return
        self._watched[kind] = None
        for name in ("__init__", "__post_init__"):  # a dataclass that derives from another has a constructor of its own
            if name in vars(kind):
                self._replace(Around(kind, name, self._built))
        self._replace(_Deriving(kind, self._derived))
        for below in {*kinds_below(kind)}:
            self._derived(below)

    def _derived(self, kind: type) -> None:
        """Watch the constructor of a class that derives from one that is watched, if it does not call its base's: a frame between
        two constructors would be seen by those that walk the stack (Lightning's ``save_hyperparameters``)."""
        if kind not in self._watched and not _calls_base(kind):
            self._watched[kind] = None
            self._replace(Around(kind, "__init__", self._built))

    def _replace(self, replacement: Replacement) -> None:
        replacement.install()
        self._replaced.append(replacement)

    def _built(self, original: Callable[..., Any], one: Any, /, *args: Any, **kwargs: Any) -> None:
        original(one, *args, **kwargs)
        if self._open:
            self._add(one)

    def _add(self, one: Any) -> None:
        key = id(one)

        def gone(ref: weakref.ref[Any]) -> None:
            if self._known.get(key) is ref:  # else another object has its address
                del self._known[key]

        self._known[key] = weakref.ref(one, gone)


class _Deriving(Replacement):
    """Hears of each class that derives from one while it is watched."""

    def __init__(self, owner: Any, derived: Callable[[type], None]) -> None:
        def make(original: Any) -> Any:
            own = isinstance(original, classmethod)

            def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
                (original.__get__(None, cls) if own else super(owner, cls).__init_subclass__)(**kwargs)
                derived(cls)

            return classmethod(__init_subclass__)

        super().__init__(owner, "__init_subclass__", make)


def _class(name: tuple[str, str]) -> type | None:
    """Return a class where its module is loaded; nothing is imported."""
    kind = getattr(sys.modules.get(name[0]), name[1], None)
    return kind if isinstance(kind, type) else None


def _calls_base(kind: type) -> bool:
    """Tell whether building an object of a class calls the constructor of its base, for all that its code says."""
    own = vars(kind).get("__init__")
    code = getattr(inspect.unwrap(own), "__code__", None) if callable(own) else None
    return code is None or "__init__" in code.co_names


def kinds_below(kind: type) -> Iterator[type]:
    """Yield the classes that derive from one."""
    below: type
    for below in type.__subclasses__(kind):
        yield below
        yield from kinds_below(below)


def alive(wanted: tuple[type, ...]) -> list[Any]:
    """Return the objects of some classes, or of classes that derive from them, by a walk through all objects of the process.

    An object of a class that is written in Python refers to its class, so they are found by that. ``gc.get_objects()`` would hand
    out all objects, with the tuples that other threads are just filling (``tuple(x for x in y)``): CPython raises SystemError there
    if anybody holds one.
    """
    classes = {id(kind): kind for one in wanted for kind in (one, *kinds_below(one))}
    return [one for one in gc.get_referrers(*classes.values()) if id(type(one)) in classes] if classes else []
