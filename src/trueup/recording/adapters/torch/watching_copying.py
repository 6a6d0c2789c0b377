"""The session and the recorder of what is executed once more: the calls of interest are kept with the bytes of their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from trueup.recording.adapters.torch.session import Session
from trueup.recording.recorder import CaptureOptions, Statistics
from trueup.recording.recorder.keeping import Keeper
from trueup.recording.recorder.rows import Kind

PAYLOAD_BYTES = 1 << 30
"""Copied of the calls of interest, at most."""

Key = tuple[str, str, str, str]
"""Level, phase, scope and operator."""


class _Numbers:
    """Numbers calls from where it is told."""

    def __init__(self) -> None:
        self.value = 0

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> int:
        self.value += 1
        return self.value - 1


class Copier(Keeper):
    """Keeps the rows of a few kinds of calls with the bytes of their tensors, under the numbers that the step gave them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers = _Numbers()
        self._seqs = self.numbers  # type: ignore[assignment]
        self.wanted: set[Key] = set()
        self._start: Callable[[Key], int] = lambda _: 0
        self._room = PAYLOAD_BYTES

    def begin_event(self, first: int, start: Callable[[Key], int]) -> None:
        """Number the calls that follow from ``first`` on, and those of each kind from what ``start`` says."""
        self.numbers.value, self._start = first, start
        for key, kind in self._kinds.items():
            kind.ordinals = count(start(key))

    def keep(self, stats: Statistics, within: Any = None) -> None:  # noqa: ARG002 - each buffer is kept whole
        """Copy the bytes, as long as there is room."""
        size = getattr(stats.data, "nbytes", 0)
        if size > self._room:
            stats.data = None
            return
        self._room -= size
        super().keep(stats)

    def _new_kind(self, level: str, phase: str, scope: str, op: str) -> Kind:
        key = level, phase, scope, op
        known = key in self._kinds
        kind = super()._new_kind(level, phase, scope, op)
        if not known:
            kind.ordinals = count(self._start(key))
        return kind

    def selects(self, level: str, phase: str, scope: str, op: str) -> bool:
        """Tell whether a call is one of those that are to be copied."""
        return (level, phase, scope, op) in self.wanted


class CopyingSession(Session):
    """A capture inside the watched one; it follows no optimizer and no collective."""

    recorder_type = Copier

    def __init__(self, outer: Session, wanted: set[Key]) -> None:
        options = CaptureOptions.of(level=outer.options.levels, detail="tensor", phase=outer.options.phases)
        super().__init__(Path(outer.recorder.directory), options, {}, outer.scopes)
        assert isinstance(self.recorder, Copier)
        self.copier = self.recorder
        self.copier.wanted = wanted

    def enter_model(self, module: torch.nn.Module) -> None:
        """Nothing ends a step here."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record what runs inside."""
        self._thread = threading.get_ident()
        calls = self._always[0]  # of modules; the others are a GradScaler's
        calls.install()
        self.threads.state.observed = True
        self._update_active()
        try:
            yield
        finally:
            self.active = False
            self._switch(on=False)
            calls.remove()
