"""What ``paddle.jit.to_static`` compiles: a program is one call; what is compiled by looking at bytecode runs as Python instead.

Without ``full_graph`` (Paddle's default) the code is compiled as it executes, through whatever it calls: it would compile the
functions that a capture puts in the operators' places, and fails at that (Paddle 3.3). So the Python code runs as long as there is
a capture, in steps that are not recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from paddle.jit.dy2static import program_translator

from trueup.recording.recorder.replacing import Replacement

if TYPE_CHECKING:
    from trueup.recording.adapters.paddle.session import Session

PROGRAM = (
    "{what} runs as a program that to_static made: what goes into and out of it is recorded, the operators and Layers inside are "
    "not; paddle.jit.enable_to_static(False) runs the Python code"
)

SYMBOLIC = (
    "{what} was given to to_static without full_graph: Paddle does not compile through what a capture stands in for, so the "
    "Python code ran, and the compiled program may round otherwise"
)


def replacements(session: Session) -> list[Replacement]:
    """Return what stands around the calls of compiled functions."""
    names = {"ASTStaticFunction": _programs, "SymbolicStaticFunction": _symbolic}
    return [
        Replacement(kind, "_perform_call", partial(around, session))
        for name, around in names.items() if (kind := getattr(program_translator, name, None)) is not None
    ]  # fmt: skip


def _programs(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(static: Any, *args: Any, **kwargs: Any) -> Any:
        if session.active and not session.threads.state.busy:
            session.recorder.note(PROGRAM.format(what=_what(session, static)))
        return original(static, *args, **kwargs)

    return call


def _symbolic(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(static: Any, *args: Any, **kwargs: Any) -> Any:
        if session.over:
            return original(static, *args, **kwargs)
        if not session.threads.state.busy:
            session.recorder.note(SYMBOLIC.format(what=_what(session, static)))
        return static._call_dygraph_function(*args, **kwargs)

    return call


def _what(session: Session, static: Any) -> str:
    """Name a Layer by its scope, a function by its name."""
    state = session.threads.state
    running = state.running[-1] if state.running else None
    if running is not None and static.class_instance is running:
        return f"Layer {state.modules[-1].scope or type(running).__name__}"
    return f"function {getattr(static._dygraph_function, '__qualname__', static)}"
