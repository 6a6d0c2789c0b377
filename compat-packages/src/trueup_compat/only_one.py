"""The debugger of a process, of which there is one: msprobe and ptdbg_ascend both switch theirs by class methods."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

D = TypeVar("D", bound="OnlyOne")


class OnlyOne:
    """What each of the tools' debuggers is; ``_made`` is set by the first ``__init__`` that succeeds."""

    _instance: ClassVar[Any] = None
    _made: ClassVar[bool] = False
    _error: ClassVar[Any]
    """Makes an exception of the tool's of a text."""

    def __new__(cls: type[D], *_: Any, **__: Any) -> D:
        """Return the one there is."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance  # type: ignore[no-any-return]

    @classmethod
    def stop(cls) -> None:
        """Dump, or look, no more, and write the files."""
        cls._the()._stop()

    @classmethod
    def step(cls) -> None:
        """End the present step; numbers of calls begin anew."""
        cls._the()._step()

    @classmethod
    def end(cls) -> None:
        """End the capture; another debugger may be made after it. The end of the process does the same."""
        instance, cls._instance = cls._instance, None
        made, cls._made = cls._made, False
        if instance is not None and made:
            instance._finish()

    @classmethod
    def _the(cls: type[D]) -> D:
        if cls._instance is None or not cls._made:
            raise cls._error("there is no PrecisionDebugger yet: make one first")
        return cls._instance  # type: ignore[no-any-return]

    def _stop(self) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError
