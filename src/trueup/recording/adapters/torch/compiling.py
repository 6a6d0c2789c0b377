"""torch.compile under a capture: ``off`` runs the Python code instead, ``through`` follows the compiled run.

A dispatch mode makes Dynamo give up without a word; a function mode, or a replaced ``nn.Module.__call__``, would be traced
into. So with ``through`` everything of ours that Dynamo could meet is out of its sight while a compiled function runs. What it
executes is seen at its boundary (`Region`), by the dispatch mode, which tells Dynamo that it does not care (`FollowingMode`),
and inside the generated code (`inductor`).

Every compiled function, whenever it was compiled, asks ``torch._dynamo.eval_frame._callback_from_stance`` how to run, and
calls what is in its list ``cleanups`` before it returns (PyTorch 2.6 to 2.13). That is how it is met, and left.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trueup.recording.adapters.torch.dispatch import DispatchMode
from trueup.recording.adapters.torch.inductor import Inductor
from trueup.recording.adapters.torch.modes import without
from trueup.recording.adapters.torch.regions import Region
from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.session import Session

OFF = (
    "torch.compile was used: with --compile=off its Python code ran instead of the compiled code during the whole capture, so the "
    "numerics of the compiled run were not observed; --compile=through observes them"
)
THROUGH = (
    "torch.compile was used: with --compile=through the compiled code ran; inside it only library calls and fused kernels were "
    "observed, not the functions and modules they were made of"
)
LOST = "a compiled function could not be followed with this version of PyTorch: its Python code ran instead"


class FollowingMode(DispatchMode):
    """The dispatch mode of ``through``: Dynamo and its compiled code work under it as if it was not there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operator and record it; PyTorch keeps Dynamo off a method that stands in the class itself."""
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile under this mode (PyTorch 2.10 on)."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to older versions of PyTorch."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")


class Compiling:
    """What a session does about compiled functions."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._through = session.options.compile == "through"
        self._here = threading.local()
        self._lock = threading.Lock()
        self._running = 0
        """Compiled functions that run at present, on all threads."""
        self._replacements: list[Replacement] = []
        self._away: list[Callable[[], None]] = []
        """What puts back what was taken out of Dynamo's sight."""
        self._inductor = Inductor(session) if self._through else None
        self._compile = Replacement(torch, "compile", self._compiles)
        self._eager: Any = None

    def start(self) -> None:
        """Meet every compiled function from now on, whether its step is recorded or not."""
        self._compile.install()
        self.look()

    def look(self) -> None:
        """See whether Dynamo was imported, without which nothing is compiled."""
        if not self._replacements and hasattr(sys.modules.get("torch._dynamo"), "eval_frame"):
            self._begin()

    def stop(self) -> None:
        """Leave nothing behind."""
        self._compile.remove()
        for replacement in self._replacements:
            replacement.remove()
        self._replacements = []
        if self._inductor is not None:
            self._inductor.stop()
        if self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None

    def _begin(self) -> None:
        from torch._dynamo import callback, convert_frame, eval_frame

        self._replacements = [
            Replacement(eval_frame, "_callback_from_stance", self._meeting),
            Replacement(eval_frame.OptimizedModule, "_initialize", self._unseen),
            Replacement(convert_frame, "_fullgraph_capture_frame", self._unseen),  # a strict torch.export
            Replacement(callback.CompilationCallbackHandler, "install_callbacks", self._hiding),
        ]
        for replacement in self._replacements:
            replacement.install()
        self._correct_dynamo()
        if not self._through:
            self._eager = torch.compiler.set_stance("force_eager")

    def _compiles(self, original: Any) -> Any:
        """Have Dynamo imported, and what is ours hidden from it, before anything is compiled."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if vars(torch).get("compile") is self._compile.ours:  # else the capture is over
                with self._session.observing(self._session.threads.state, "torch.compile"):
                    import_module("torch._dynamo.eval_frame")
                    self.look()
            return original(*args, **kwargs)

        return compile

    # ---------------------------------------------------------------- what Dynamo calls
    def _meeting(self, original: Any) -> Any:
        def _callback_from_stance(callback: Any) -> Any:
            found = original(callback)
            if callback in (None, False) or not self._replacements:  # nothing compiled, or the capture is over
                return found
            frame = sys._getframe(1)
            exports = bool(getattr(frame.f_locals.get("self"), "export", False))
            if not self._through and not exports:
                self._session.recorder.note(OFF)
                return None
            cleanups = frame.f_locals.get("cleanups")
            if not isinstance(cleanups, list):
                self._session.recorder.note(LOST)
                return None
            if not exports:
                self._session.recorder.note(THROUGH)
            if not getattr(self._here, "inside", False):  # what a compiled function calls belongs to it, compiled or not
                cleanups.append(self._enter(None if exports else Region(self._session, frame)))
            return callback if exports else found

        return _callback_from_stance

    def _enter(self, region: Region | None) -> Callable[[], None]:
        gone = contextlib.ExitStack()
        gone.enter_context(self.out_of_sight())
        gone.enter_context(without(self._session.function_mode))
        self._here.inside = True
        if self._inductor is not None:
            self._inductor.look()

        def leave() -> None:
            self._here.inside = False
            gone.close()
            if self._inductor is not None:
                self._inductor.look()
            if region is not None:
                region.leave(sys._getframe(1))

        return leave

    def _unseen(self, original: Any) -> Any:
        """Make a function of Dynamo's neither bind nor trace what is ours."""

        @functools.wraps(original)
        def work(*args: Any, **kwargs: Any) -> Any:
            with self.out_of_sight(), without(self._session.function_mode):
                return original(*args, **kwargs)

        return work

    def _hiding(self, original: Any) -> Any:
        """Keep what a compilation tries and measures apart from the training; Dynamo begins and ends each with this block."""

        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            state = self._session.threads.state
            before, state.busy = state.busy, True
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                state.busy = before

        return install_callbacks

    # ---------------------------------------------------------------- out of sight
    @contextlib.contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Take our replacements and optimizer hooks away, for all threads."""
        with self._lock:
            self._running += 1
            if self._running == 1:
                ours = [self._compile, *self._session.replacements]
                self._away = [r.install for r in ours if r.remove()] + _hooks_removed(self._session.optimizers.hooks)
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    away, self._away = self._away, []
                    for put_back in away:
                        put_back()

    def _correct_dynamo(self) -> None:
        """Tell Dynamo what ``nn.Module.__call__`` is, if it was imported while ours stood there: it compares by identity."""
        from torch._dynamo import utils
        from torch._dynamo.variables import nn_module

        for module in (utils, nn_module):
            for replacement in self._session.replacements:
                if vars(module).get("unpatched_nn_module_call") is replacement.ours:
                    module.unpatched_nn_module_call = replacement.original


def _hooks_removed(handles: list[Any]) -> list[Callable[[], None]]:
    """Take hooks out of the dictionaries that hold them; return what puts them back."""
    found: list[Callable[[], None]] = []
    for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        for handle in handles:
            if handle.hooks_dict_ref() is hooks and handle.id in hooks:
                found.append(functools.partial(hooks.__setitem__, handle.id, hooks.pop(handle.id)))
    return found
