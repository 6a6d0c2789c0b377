"""A running capture: what the sessions of all adapters have in common, the one that runs, and the ``with`` block around it.

Between Trueup's own work and the training stands a wall: what fails on our side is reported once, and kept from the training unless
the user asked for the contrary.

What the arguments of a call are called that were given by position, as the framework itself names them.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from trueup.foundation.model import LEVELS, RunStopped, TrueupError
from trueup.foundation.store import claim
from trueup.foundation.version import VERSION
from trueup.foundation.words.wording import first_line, say
from trueup.recording.engine.environment import rank_and_world
from trueup.recording.engine.replacing import Built
from trueup.recording.engine.settings import Settings, live_names, live_wholes
from trueup.recording.engine.steps import Optimizers
from trueup.recording.recorder.options import CaptureOptions, in_ranges, sentence, unused
from trueup.recording.recorder.recorder import Recorder
from trueup.recording.recorder.rows import Statistics
from trueup.recording.registry import Adapter


class Failure:
    """Reports the first thing that goes wrong in the observer, on stderr and in the manifest's notes."""

    def __init__(self, recorder: Recorder, on_error: Literal["continue", "stop"]) -> None:
        self._recorder, self._on_error = recorder, on_error
        self.text: str | None = None  # what went wrong; None while all is well

    def take(self, error: Exception, what: str) -> bool:
        """Report an exception; return whether the training goes on as if there was none, or raise `RunStopped` where the user
        asked for it."""
        if self._on_error == "stop":
            if isinstance(error, RunStopped):
                return False
            raise RunStopped(f"capture stopped, and the run with it, as asked: {_sentence(error, what)}") from error
        if self.text is None:
            self.text = f"capture stopped at step {self._recorder.step}: {_sentence(error, what)}"
            self._recorder.note(f"{self.text}; what ran later is missing")
            say(f"{self.text}. The training goes on without it.")
        return True


def _sentence(error: Exception, what: str) -> str:
    place = "".join(f"in {f.name}, {f.filename}:{f.lineno}, " for f in traceback.extract_tb(error.__traceback__)[-1:])
    return f"{type(error).__name__}: {first_line(error, 1000)} ({place}while recording {what})"


class Busy(Protocol):
    """What an adapter knows of a thread."""

    busy: bool  # true while Trueup itself works: nothing it executes is a call


class Observing:
    """A block of Trueup's own work on one thread: nothing that executes inside is a call. An exception goes to ``failed``, which
    tells whether the training goes on."""

    __slots__ = ("_before", "_failed", "_state", "_what")

    def __init__(self, state: Busy, failed: Callable[[Exception, str], bool], what: str) -> None:
        self._state, self._failed, self._what = state, failed, what

    def __enter__(self) -> None:
        self._before, self._state.busy = self._state.busy, True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._state.busy = self._before
        return isinstance(error, Exception) and self._failed(error, self._what)


Identity = tuple[int, dict[str, Any], dict[str, Any]]


def execute_module(original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute the body of a module."""
    return original(module, *args, **kwargs)


RUN_MODULE = execute_module.__code__
"""Code of the frame around the body of each module that runs: the call stack up to it is known."""


T = TypeVar("T")


class Threads(threading.local, Generic[T]):
    """Holds what nests on the present thread: ``state``, which ``make`` makes for each."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.state = make()


class BaseSession(ABC):
    """A running capture; each adapter's own adds what sees the calls. One at a time in a process."""

    adapter: Adapter
    recorder_type: type[Recorder] = Recorder
    nothing_ran: str
    """Why there is nothing, where no call was seen at all."""

    options: CaptureOptions
    recorder: Recorder
    failure: Failure
    scopes: Any
    """Gives each module its path."""
    slots: Any
    """Records the tensors of calls."""
    threads: Any
    """Whose ``state`` says what nests on the present thread: ``modules``, ``busy``."""
    optimizers: Optimizers
    active: bool = False
    """Whether what executes now is recorded."""
    over: bool = False
    """Whether the capture has ended."""
    settings: Settings | None = None
    """What the run is set to; None where nobody asks."""
    rank: int | None = None
    _claiming = threading.Lock()  # one session at a time in a process
    """Number of this process's folder, once it is claimed."""
    _thread: int = 0

    def __init__(
        self, directory: Path, options: CaptureOptions, root: dict[str, Any], scopes: Any, *, facts: Callable[[Any], Any],
        modules: Callable[[Any], Any], optimizers: type | None = None, loaders: tuple[type, ...] = (),
        loader: Callable[[Any], Mapping[str, Any]] | None = None, seeds: Callable[[], Mapping[str, int]] = dict,
        autocast: Callable[[Any], str] = lambda _: "", internal: tuple[str, ...],
        resolve: Callable[[list[Statistics]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Begin to record nothing yet (see `Settings` and `Recorder`); raises TrueupError where an option means nothing for the
        framework."""
        check(options, self.adapter)
        self.options, self.scopes, self._root, self._levels = options, scopes, root, set(options.levels)
        self.recorder = self.recorder_type(directory, options, self.identify, resolve, internal)
        self.failure = Failure(self.recorder, options.on_error)
        kinds = loaders if optimizers is None else (optimizers, *loaders)
        self._training = optimizers
        self.built = Built(kinds, live_names(), self.recorder.note, self._met)
        self.scopes.wholes = lambda: self.built.of(*live_wholes())
        self.settings = Settings(
            facts, modules, self.recorder.note, self.built, loaders, loader, seeds, self.scopes.names, autocast,
        )  # fmt: skip
        self.recorder.settings = self.settings.news
        self.signatures = Signatures(self.adapter.name)
        self.recorder.call_names = self.names

    # ------------------------------------------------------------------------------------------------ what an adapter adds
    @abstractmethod
    def start(self) -> None:
        """Begin to see calls on this thread."""

    @abstractmethod
    def take_off(self) -> None:
        """Leave nothing of ours in the framework."""

    def rank_and_world(self) -> tuple[int | None, int]:
        """Return this process's rank (None when nothing says so) and the world size."""
        return rank_and_world()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe this process for its rank's manifest."""

    @abstractmethod
    def forget(self) -> None:
        """Forget what was known of tensors: what ran since was not seen."""

    def settle(self) -> None:  # noqa: B027 - most have nothing under way
        """Complete the calls that are still under way, at the end of the capture."""

    def close_step(self) -> None:  # noqa: B027
        """Do what a framework's own parts do at the end of a step."""

    # ---------------------------------------------------------------------------------------------------- what all share
    def stop(self) -> None:
        """Stop to see calls and finish the capture."""
        self.active = False
        self.take_off()
        self.finish()

    def finish(self) -> None:
        """Write what is left (at the end of an armed process)."""
        self.active, self.over = False, True
        self._settle_settings()
        if self.settings is not None:
            self.settings.close()
        self.built.close()
        self.optimizers.close()
        with self.observing(self.threads.state, "what is under way"):
            self.settle()
        self.recorder.close("complete" if self.failure.text is None else "stopped")

    @property
    def pending(self) -> bool:
        """Whether an optimizer has stepped in a step that did not end yet."""
        return self.optimizers.pending

    def step(self) -> None:
        """End the present step; from now on only this ends steps."""
        with self.observing(self.threads.state, "the end of a step"):
            if self.optimizers.steps.by_hand():
                self.end_step()

    def end_step(self) -> None:
        """Finish the present step."""
        self._settle_settings()
        self.optimizers.ended()
        self.close_step()
        self.recorder.end_step()
        self.update_active()
        if self.options.is_over(self.recorder.step):
            raise SystemExit(0)  # all ranks get here at the end of the same step

    def _settle_settings(self) -> None:
        if self.settings is not None:
            self.settings.step_ended()

    def update_active(self) -> None:
        """Record from now on, or no more, as options, rank and failures say."""
        rank, _ = self.rank_and_world()
        active = self.failure.text is None and self.recorder.active and in_ranges(rank or 0, self.options.ranks) and not self.over
        if active and not self.active:
            self.forget()
        self.active = active

    def observing(self, state: Any, what: str) -> AbstractContextManager[Any]:
        """Return a block for our own work: nothing in it is a call, and its exceptions end the capture, not the training."""
        return Observing(state, self.failed, what)

    def site(self, state: Any) -> int | None:
        """Return the number of the present call stack, walked up to the module that is running on this thread."""
        above = state.modules[-1].call.site if state.modules else None
        return self.recorder.sites.here(above, RUN_MODULE)

    def run_module(
        self, state: Any, original: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        begin: Callable[..., tuple[Any, Any]], end: Callable[..., None], called: Any = None,
    ) -> Any:  # fmt: skip
        """Run ``module``, whose body is ``original``, as a call; ``called`` is the user's where ``module`` is a wrapper that is
        no call. ``begin(session, state, module, args, kwargs)`` begins it, records what it is given and returns what encloses
        whatever runs inside and what ``end`` gets besides; ``end(session, module, enclosing, more, result)`` records what it
        returned."""
        called = module if called is None else called
        begun: tuple[Any, Any] | None = None
        with self.observing(state, type(called).__name__):
            begun = begin(self, state, called, args, kwargs)
        if begun is None:  # the capture has just failed
            return original(module, *args, **kwargs)
        state.modules.append(begun[0])
        state.running.append(called)
        contexts, state.contexts = state.contexts, []  # what runs inside belongs to the module, not to an outer function
        try:
            result = execute_module(original, module, args, kwargs)
        finally:
            state.modules.pop()
            state.running.pop()
            state.contexts = contexts
        if self.active:
            with self.observing(state, type(called).__name__):
                end(self, called, *begun, result)
        return result

    def loss(self, op: str, tensor: Any) -> None:
        """Record the tensor on which the backward is called: the loss curve, kept whatever the filters say."""
        state = self.threads.state
        above, scope = (state.modules[-1].call.seq, state.modules[-1].scope) if state.modules else (None, "")
        call = self.recorder.begin("api", "forward", scope, op, parent=above, site=self.site(state))
        self.slots.inputs(call, [("input.0", tensor)])

    def records(self, level: str) -> bool:
        """Tell whether calls of a level are recorded."""
        return level in self._levels

    def abandon(self) -> None:
        """Drop the capture in a forked child: the parent owns it."""
        self.active, self.over = False, True
        if self.settings is not None:
            self.settings.close()
        self.built.close()
        self.recorder.forked()

    def failed(self, error: Exception, what: str) -> bool:
        """Take an exception of our own; see `Failure.take`."""
        self.active = False
        return self.failure.take(error, what)

    def report(self) -> dict[str, Any]:
        """Say what this process recorded, or why nothing."""
        recorder = self.recorder
        return {
            "rank": self.rank, "calls": recorder.calls, "steps": recorder.step + self.pending,
            "failure": recorder.failure or self.failure.text, "why": None if recorder.calls else self.why_nothing(),
        }  # fmt: skip

    def why_nothing(self) -> str:
        """Explain an empty capture."""
        if not in_ranges(self.rank_and_world()[0] or 0, self.options.ranks):
            return "this rank is not among the ranks selected"
        if said := self.unused():
            return "; ".join(said)
        if not self.recorder.seen().calls:
            return self.nothing_ran
        return "no call matched the level, phase, include and exclude options together"

    def unused(self) -> list[str]:
        """Describe the options that selected nothing, each with what was there to select."""
        return [sentence(*item) for item in unused(self.options, self.recorder.seen()).items()]

    def claim(self) -> int:
        """Take this process's rank folder, once: the writer's thread asks for it, and what is written beside the records does."""
        with self._claiming:
            if self.rank is None:
                rank, _ = self.rank_and_world()
                self.rank = claim(self.recorder.directory, rank, self._root.get("run"))
            return self.rank

    def identify(self) -> Identity:
        """Return the rank's number, and what the manifests of the capture and of the rank say."""
        rank, _ = self.rank_and_world()
        number = self.claim()
        if rank is None and number:
            self.recorder.note(f"no rank was set; this process (pid {os.getpid()}) is rank {number} by order of arrival")
        return number, self._root, self.describe() | {"rank": number}

    def _met(self, one: Any) -> None:
        if self._training is not None and isinstance(one, self._training):  # a training is ahead
            self.recorder.prepare()

    def names(self) -> dict[str, Any]:
        """Return what operators and their arguments are called, for the manifest: of all that were seen so far."""
        return {"signatures": self.signatures.of(op for *_, op in self.recorder.seen().keys)}


def check(options: CaptureOptions, adapter: Adapter) -> None:
    """Refuse options that mean nothing for a framework: raise `TrueupError` where one is given."""
    asked = {
        f"level {'aten' if 'aten' in options.levels else options.levels[0]}": not set(options.levels) & set(adapter.levels),
        "compile=through": options.compile == "through" and "compile" in adapter.lacks,
        "shadow": options.shadow is not None and "shadow" in adapter.lacks,
        "inputs_from": options.inputs_from is not None and "inputs_from" in adapter.lacks,
    }
    for name, given in asked.items():
        if given:
            levels = ", ".join(name for name in LEVELS if name in adapter.levels)
            raise TrueupError(
                f"{name} is not there for {adapter.title}\n"
                f"  expected: level {levels} or all; detail digest, stats or tensor\n"
                f"  got:      {name}\n"
                f"  next:     leave it out ({adapter.page} says what there is)"
            )


S = TypeVar("S", bound=BaseSession)
C = TypeVar("C", bound="Capture[Any]")


class Running(Generic[S]):
    """Holds the capture of one framework that runs in this process, in a ``with`` block or because the process is armed. A forked
    child lets go of it: the parent owns it, and its writer thread did not come along."""

    def __init__(self) -> None:
        self.session: S | None = None
        os.register_at_fork(after_in_child=self.let_go)

    def step(self) -> None:
        """End the present step, if a capture runs."""
        if self.session is not None:
            self.session.step()

    def let_go(self) -> None:
        """Forget the capture and leave nothing of it in the framework."""
        session, self.session = self.session, None
        if session is not None:
            session.abandon()
            session.take_off()

    def refuse_second(self, also: str = "`trueup capture`") -> None:
        """Raise `TrueupError` where a capture runs: there is one at a time."""
        if self.session is not None:
            raise TrueupError(
                f"a capture into {self.session.recorder.directory} is already running in this process; "
                f"end it first (or run the script without {also})"
            )


_running: dict[str, Running[Any]] = {}


def running_of(framework: str) -> Running[Any]:
    """Return the holder of a framework's running capture in this process."""
    if framework not in _running:
        _running[framework] = Running()
    return _running[framework]


class Capture(Generic[S]):
    """A running capture: `step()` ends a step, leaving the ``with`` block ends the capture. Without `step()` a step ends with the
    first forward after its optimizers have stepped; once it was called, only it ends steps."""

    runs_by = "`trueup capture`"  # commands under which a script need not call it

    def __init__(self, session: S, running: Running[S]) -> None:
        self._session, self._running = session, running

    @property
    def path(self) -> Path:
        """The capture directory."""
        return self._session.recorder.directory

    def step(self) -> None:
        """End the present step; from now on nothing else does."""
        self._session.step()

    def __enter__(self: C) -> C:
        try:
            self._running.refuse_second(self.runs_by)
            self.prepare()
        except BaseException:
            self._session.built.close()  # else each refused capture would leave a frame in constructors
            raise
        self._session.start()
        self._running.session = self._session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._running.session is self._session:  # else a forked child leaves the block too
            self._running.session = None
            self.end(error)

    def prepare(self) -> None:
        """Take the rank's folder, before anything is recorded; raise `TrueupError` where it cannot be written."""
        if in_ranges(self._session.rank_and_world()[0] or 0, self._session.options.ranks):
            try:
                self._session.claim()
            except OSError as error:
                said = error.strerror or error
                raise TrueupError(f"cannot write the capture {self.path}: {said}; choose another directory") from None

    def end(self, error: BaseException | None) -> None:
        """End the capture; ``error`` ended the block."""
        if error is not None:
            rank, world = self._session.rank_and_world()
            who = f"rank {rank}: " if world > 1 else ""
            said = f"{who}the capture ended with {type(error).__name__}: {str(error)[:200]}"
            recorder = self._session.recorder
            if isinstance(error, SystemExit) and not error.code:  # the program, or --stop, ended it as it meant to
                recorder.note(said)
            else:
                recorder.cut_off(said)
        self._session.stop()
        if error is None:
            self._session.recorder.stop_if_asked()
        self.tell(error)

    def tell(self, error: BaseException | None) -> None:
        """Say on stderr where nothing was captured, and which options selected nothing; ``error`` ended the block."""
        report = self._session.report()
        if error is not None or report["failure"] is not None:
            return
        if not report["calls"]:
            say(f"nothing was captured into {self.path}: {report['why']}")
            return
        for said in self._session.unused():
            say(f"note: {said}")


def capture(
    make: Callable[[Path, CaptureOptions, dict[str, Any]], S], directory: str | Path, model: Any, options: CaptureOptions
) -> Capture[S]:
    """Make a capture of what runs inside its ``with`` block; see `trueup.capture`. ``model``: a module named before it runs,
    several, or None."""
    session = make(Path(directory), options, root_manifest(options))
    for root in roots(model, session.adapter.kind or object):
        session.scopes.register(root)
    return Capture(session, running_of(session.adapter.name))


def root_manifest(options: CaptureOptions, detail: str | None = None) -> dict[str, Any]:
    """Return the root manifest of a capture made by a ``with`` block."""
    return {
        "trueup_version": VERSION, "command": sys.argv[:64], "levels": list(options.levels),
        "detail": options.detail if detail is None else detail, "config": json.loads(options.to_json()),
    }  # fmt: skip


def roots(model: Any, kind: type[Any]) -> Iterable[Any]:
    """Return the modules that were named: none, one, or several."""
    return [] if model is None else [model] if isinstance(model, kind) else model


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signatures:
    """Knows the names of the operators of one framework, each asked for once. ``root`` is the framework's package: only its own
    functions are looked up. ``schemas`` gives what Python knows no signature of, the names of each overload."""

    def __init__(self, root: str, schemas: Callable[[str], Iterable[Sequence[str]]] = lambda _: ()) -> None:
        self._root, self._schemas = f"{root}.", schemas
        self._known: dict[str, list[str]] = {}

    def of(self, ops: Iterable[str]) -> dict[str, list[str]]:
        """Return the names by operator; a position whose overloads disagree has an empty one, an unknown operator is left out."""
        for op in ops:
            if op not in self._known:
                self._known[op] = self._python(op) or agreed(self._schemas(op))
        return {op: names for op, names in sorted(self._known.items()) if any(names[1:])}

    def _python(self, op: str) -> list[str]:
        words = op.split(".") if op.startswith(self._root) else []
        at = next((n for n in range(len(words) - 1, 0, -1) if ".".join(words[:n]) in sys.modules), 0)
        found: Any = sys.modules[".".join(words[:at])] if at else None
        for word in words[at:]:
            found = getattr(found, word, None)
        try:
            parameters = inspect.signature(found).parameters.values() if callable(found) else ()
        except (TypeError, ValueError):  # written in C
            return []
        return [one.name for one in parameters if one.kind in POSITIONAL]


def agreed(overloads: Iterable[Sequence[str]]) -> list[str]:
    """Return the name of each position that all overloads have alike: ``[self, "", dim]`` of ``split``."""
    lists = list(overloads)
    at = [{names[k] for names in lists if k < len(names)} for k in range(max(map(len, lists), default=0))]
    return [names.pop() if len(names) == 1 else "" for names in at]
