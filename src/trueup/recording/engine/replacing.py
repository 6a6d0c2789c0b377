"""What Trueup stands in the place of for the time of a capture: attributes, and functions wherever somebody holds them by name. And
optimisations that are switched off in a process that was launched: settings of the framework, made before the user's code runs.

    {"name": "flash attention", "framework": "torch", "call": [["torch.backends.cuda.enable_flash_sdp", false]],
     "set": {"torch._inductor.config.pattern_matcher": false}, "adapter": {"optimizers": ["fused"]}}

`call` is made when the framework was imported, `set` when the module that holds the attribute was (nothing loads a compiler that
the training would not load), and `adapter` names a function of ``adapters.<framework>.switching`` with its argument. What
cannot be done is reported with the reason, and never taken for done: the report is read by `trueup.analysis.triage`.

Objects of a few classes are known since they were built: what a training is set by is never searched for while it runs. The
constructors of these classes add their objects, weakly, to a list. A constructor of a class that derives from one calls that of
its base; where it does not (``ReduceLROnPlateau``), it is watched itself. A class whose module is not loaded yet is watched once it
is. Objects that are older than the capture are searched for once, before its first step (`alive`), unless the process holds so much
that this would take seconds. No attribute of any object is read.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

from trueup.recording.arming import WhenImported

Order = Mapping[str, Any]
NOT_USED = "the module that it belongs to was never imported"


MOST_BLOCKS = 20_000_000
"""Blocks of memory that Python holds where older objects are still searched for: some two seconds."""
TOO_MANY = (
    "arguments, data loaders and schedules that were made before the capture began were not searched for: the process holds too "
    "many objects; begin the capture earlier, or run the script under `trueup capture`"
)


class Replacement:
    """An attribute of a class or module in whose place stands, between `install` and `remove`, what ``make`` makes of it. That
    passes through when the capture is over, for others may hold a reference to it, and is taken back only where it still
    stands."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._make = owner, name, make
        self.original: Any = None
        self.ours: Any = None
        self._inherited = False

    def install(self) -> None:
        """Replace the attribute; where this version of the framework has none of that name, do nothing."""
        self._inherited = self._name not in vars(self._owner)
        original = getattr(self._owner, self._name, None) if self._inherited else vars(self._owner)[self._name]
        if original is not None:
            if self.ours is None or original is not self.original:
                self.original, self.ours = original, self._make(original)
            setattr(self._owner, self._name, self.ours)

    def remove(self) -> bool:
        """Put the original back; return whether ours stood there."""
        stands = self.ours is not None and vars(self._owner).get(self._name) is self.ours
        if stands and self._inherited:
            delattr(self._owner, self._name)
        elif stands:
            setattr(self._owner, self._name, self.original)
        return stands


class Around(Replacement):
    """A function or method around which another is called: with the original, then with what the original is given."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        def make(original: Callable[..., Any]) -> Any:
            @wraps(original)
            def around(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            return staticmethod(around) if isinstance(original, staticmethod) else around

        super().__init__(owner, name, make)


class Sweep:
    """Functions replaced wherever a module holds them: ``from paddle._C_ops import matmul`` binds the original for good. A module
    that takes one by name while they are replaced keeps the replacement, which hands on to the original afterwards. Modules whose
    names begin with one of ``left_alone`` keep theirs."""

    def __init__(self, replaced: Iterable[tuple[Any, Any]], left_alone: tuple[str, ...] = ()) -> None:
        self._left_alone = left_alone
        self._by_id = {id(original): (original, new) for original, new in replaced}
        self._done: list[tuple[dict[str, Any], str, Any]] = []

    def install(self) -> int:
        """Replace; return in how many places."""
        for name, module in list(sys.modules.items()):
            if type(module) is not ModuleType or name.startswith(self._left_alone):
                continue
            names = vars(module)
            for key, value in list(names.items()):
                found = self._by_id.get(id(value))
                if found is not None and found[0] is value:
                    names[key] = found[1]
                    self._done.append((names, key, found[1]))
        return len(self._done)

    def remove(self) -> None:
        """Restore every place that still holds the replacement."""
        originals = {id(new): original for original, new in self._by_id.values()}
        done, self._done = self._done, []
        for names, key, new in done:
            if names.get(key) is new:
                names[key] = originals[id(new)]


@contextlib.contextmanager
def attributes_set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[int]:
    """Set attributes of objects for a while; gives how many objects."""
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    try:
        for one, name, value in changes:
            setattr(one, name, value)
        yield len({id(one) for one, _, _ in changes})
    finally:
        for one, name, value in before:
            setattr(one, name, value)


def without_dropout(modules: Iterable[Any]) -> contextlib.AbstractContextManager[int]:
    """Turn dropout (``p`` of a Dropout, a number ``dropout`` of any other module) off for a while; gives how many had any."""
    found: list[tuple[Any, str, Any]] = []
    for module in modules:
        if re.fullmatch(r"(Feature)?(Alpha)?Dropout([123][dD])?", type(module).__name__):
            found += [(module, "p", 0.0)] if module.p else []
        elif isinstance(getattr(module, "dropout", None), float) and module.dropout:
            found.append((module, "dropout", 0.0))
    return attributes_set(found)


class Switching:
    """What was switched off in this process, in one framework."""

    def __init__(self, framework: str, orders: Iterable[Order]) -> None:
        self._failed: dict[str, str] = {}
        self._waiting: dict[str, WhenLoaded] = {}  # by the name of the switch, of settings whose module was not imported yet
        self._told: dict[str, Callable[[], Any]] = {}
        self._names = [order["name"] for order in orders if order["framework"] in (framework, "any")]
        for order in orders:
            if order["framework"] in (framework, "any"):
                self._apply(framework, order)

    def report(self) -> dict[str, Any]:
        """Return the switches that are off, those that are not and why, and what the adapter saw of each."""
        idle = {name: NOT_USED for name, one in self._waiting.items() if not one.done}
        off = [name for name in self._names if name not in self._failed and name not in idle]
        return {"off": off, "failed": self._failed, "idle": idle, "seen": {name: told() for name, told in self._told.items()}}

    def _apply(self, framework: str, order: Order) -> None:
        name = order["name"]
        try:
            for target, *arguments in order.get("call", ()):
                _attribute(target)(*arguments)
            for action, argument in order.get("adapter", {}).items():
                told = _attribute(f"trueup.recording.adapters.{framework}.switching.{action}")(argument)
                if told is not None:
                    self._told[name] = told
            for target, value in order.get("set", {}).items():
                self._set(name, target, value)
        except Exception as error:  # noqa: BLE001 - of another version of the framework; said, and never fatal to the training
            self._failed[name] = f"{type(error).__name__}: {error}"

    def _set(self, name: str, target: str, value: Any) -> None:
        module = _module_of(target)

        def work() -> None:
            try:
                owner, _, last = target.rpartition(".")
                holder = _attribute(owner)
                getattr(holder, last)  # one that this version has not is said, not made
                setattr(holder, last, value)
            except Exception as error:  # noqa: BLE001 - likewise
                self._failed[name] = f"{type(error).__name__}: {error}"

        waiting = self._waiting[name] = WhenLoaded(module, work)
        waiting.install()


def _module_of(target: str) -> str:
    """Return the part of a dotted name that is a module: all but the last word, or up to the ``config`` in it."""
    words = target.split(".")[:-1]
    if "config" in words:
        words = words[: words.index("config") + 1]
    return ".".join(words)


def _attribute(target: str) -> Any:
    """Return the object of a dotted name: a module that is loaded, or can be, or an attribute below one."""
    words = target.split(".")
    for count in range(len(words), 0, -1):
        name = ".".join(words[:count])
        try:
            found: Any = sys.modules.get(name) or import_module(name)
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            found = getattr(found, word)
        return found
    raise AttributeError(f"there is no {target}")


class WhenLoaded(WhenImported):
    """Calls a function now, or right after a module was imported, unless it was removed before."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name, "")
        self._work = work
        self.done = False

    def install(self) -> None:
        """Call it, or wait."""
        if self._name in sys.modules:
            self.loaded()
        else:
            sys.meta_path.insert(0, self)

    def loaded(self) -> None:
        """Call it, once."""
        self.remove()
        if not self.done:
            self.done = True
            self._work()


class Built:
    """Knows the living objects of ``kinds``, and of the classes named by ``(module, class)`` in ``names``; ``met`` is told each."""

    def __init__(
        self, kinds: Iterable[type], names: Iterable[tuple[str, str]], note: Callable[[str], None],
        met: Callable[[Any], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._note, self._met, self._open = note, met, True
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
        self._met(one)


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
