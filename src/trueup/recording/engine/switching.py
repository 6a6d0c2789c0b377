"""Switching optimisations off in a process that was launched: settings of the framework, made before the user's code runs.

    {"name": "flash attention", "framework": "torch", "call": [["torch.backends.cuda.enable_flash_sdp", false]],
     "set": {"torch._inductor.config.pattern_matcher": false}, "adapter": {"optimizers": ["fused"]}}

`call` is made when the framework was imported, `set` when the module that holds the attribute was (nothing loads a compiler that
the training would not load), and `adapter` names a function of ``adapters.<framework>.switching`` with its argument. What
cannot be done is reported with the reason, and never taken for done: the report is read by `trueup.analysis.triage`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from trueup.recording.arming import WhenImported

Order = Mapping[str, Any]
NOT_USED = "the module that it belongs to was never imported"


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
