"""The ``with`` block of a shadow run: `trueup.shadow`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import torch

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.capturing import running
from trueup.recording.adapters.torch.golden import Golden
from trueup.recording.adapters.torch.golden_formulas import Formula
from trueup.recording.adapters.torch.session import Session
from trueup.recording.adapters.torch.shadowing import ShadowMode
from trueup.recording.execution import shadow_table
from trueup.recording.execution.shadow_options import ShadowOptions
from trueup.recording.execution.shadow_result import ShadowResult, summarise
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.running import root_manifest, roots


class Shadow:
    """A running shadow: `step()` ends a step, leaving the block ends it, and `result` says what was found."""

    def __init__(self, session: Session, mode: ShadowMode, scratch: TemporaryDirectory[str] | None, *, quiet: bool) -> None:
        self._session, self._mode, self._scratch, self._quiet = session, mode, scratch, quiet
        self._result: ShadowResult | None = None

    @property
    def result(self) -> ShadowResult:
        """What was found; inside the block, so far."""
        return self._result or self._summary()

    def step(self) -> None:
        """End the present step; from now on nothing else does."""
        self._session.step()

    def __enter__(self) -> Shadow:
        if running.session is not None:
            raise TrueupError("a capture is already running in this process: end it before you shadow")
        try:
            self._session.claim()
        except OSError as error:
            where = self._session.recorder.directory
            raise TrueupError(f"cannot write the capture {where}: {error.strerror or error}; choose another directory") from None
        self._session.start()
        running.session = self._session
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if running.session is not self._session:  # a forked child leaves the block too
            return
        running.session = None
        self._session.stop()
        self._result = self._summary()
        if self._scratch is not None:
            self._scratch.cleanup()
        if not self._quiet:
            print("\n".join(f"trueup: {line}" for line in self._result.sentence.splitlines()), file=sys.stderr, flush=True)

    def _summary(self) -> ShadowResult:
        rows = [*(self._mode.kept or ()), *self._mode.rows]
        table = shadow_table.table(rows)
        failure = self._session.failure.text
        notes = [*self._session.recorder.notes, *([failure] if failure else [])]
        return summarise(table, self._mode.options.target, notes)


def shadow(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None, options: ShadowOptions, directory: str | Path | None,
    formulas: Mapping[str, Formula] | None = None, *,
    steps: object, include: object, exclude: object, phase: object, quiet: bool,
) -> Shadow:  # fmt: skip
    """Make a shadow of what runs inside its ``with`` block; see `trueup.shadow`."""
    captured = CaptureOptions.of(
        steps=steps, include=include, exclude=exclude, phase=phase, shadow=asdict(options),  # type: ignore[arg-type]
    )  # fmt: skip
    _usable(options)
    scratch = TemporaryDirectory(prefix="trueup-shadow-") if directory is None else None  # the loss is recorded whatever is asked
    session = Session(Path(directory or ".") if scratch is None else Path(scratch.name), captured, root_manifest(captured))
    mode = session.shadow
    assert mode is not None
    mode.golden = Golden(torch.device(options.reference), getattr(torch, options.dtype), formulas)
    mode.to_disk = scratch is None
    mode.kept = []
    for top in roots(model, torch.nn.Module):
        session.scopes.register(top)
    return Shadow(session, mode, scratch, quiet=quiet)


def _usable(options: ShadowOptions) -> None:
    try:
        torch.zeros(1, device=options.reference, dtype=getattr(torch, options.dtype)).add_(1)
    except (RuntimeError, AssertionError, TypeError) as error:
        said = str(error).splitlines()[0][:160]
        raise TrueupError(f"shadow cannot compute on {options.reference} in {options.dtype}: {said}; take cpu:float64") from None
