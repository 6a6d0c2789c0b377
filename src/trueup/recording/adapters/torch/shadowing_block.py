"""The ``with`` block of a shadow run: `trueup.shadow`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trueup.foundation.model import TrueupError
from trueup.foundation.words.wording import first_line, say
from trueup.recording.adapters.torch.reference import Formula, Reference
from trueup.recording.adapters.torch.session import Session, running
from trueup.recording.adapters.torch.shadowing import ShadowMode
from trueup.recording.engine.session import Capture, root_manifest, roots
from trueup.recording.execution.shadow import ShadowResult, summarise, table
from trueup.recording.recorder import CaptureOptions
from trueup.recording.recorder.options import ShadowOptions


class Shadow(Capture[Session]):
    """A running shadow: `step()` ends a step, leaving the block ends it, and `result` says what was found."""

    def __init__(self, session: Session, mode: ShadowMode, scratch: TemporaryDirectory[str] | None, *, quiet: bool) -> None:
        super().__init__(session, running)
        self._mode, self._scratch, self._quiet = mode, scratch, quiet
        self._result: ShadowResult | None = None

    @property
    def result(self) -> ShadowResult:
        """What was found; inside the block, so far."""
        return self._result or self._summary()

    def tell(self, error: BaseException | None) -> None:  # noqa: ARG002 - what was found until then is as good
        """Say on stderr what was found, unless nobody wants to hear it."""
        self._result = self._summary()
        if self._scratch is not None:
            self._scratch.cleanup()
        if not self._quiet:
            for line in self._result.sentence.splitlines():
                say(line)

    def _summary(self) -> ShadowResult:
        rows = table([*(self._mode.kept or ()), *self._mode.rows])
        failure = self._session.failure.text
        notes = [*self._session.recorder.notes, *([failure] if failure else [])]
        return summarise(rows, self._mode.options.target, notes)


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
    mode.reference = Reference(torch.device(options.reference), getattr(torch, options.dtype), formulas)
    mode.to_disk = scratch is None
    mode.kept = []
    for top in roots(model, torch.nn.Module):
        session.scopes.register(top)
    return Shadow(session, mode, scratch, quiet=quiet)


def _usable(options: ShadowOptions) -> None:
    try:
        torch.zeros(1, device=options.reference, dtype=getattr(torch, options.dtype)).add_(1)
    except (RuntimeError, AssertionError, TypeError) as error:
        where = f"{options.reference} in {options.dtype}"
        raise TrueupError(f"shadow cannot compute on {where}: {first_line(error, 160)}; take cpu:float64") from None
