"""`trueup.capture`: the one entry to the adapters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import LEVELS, TrueupError
from trueup.recording.adapters import ADAPTERS, listed, meant
from trueup.recording.recorder.options import CaptureOptions, NumberSet

if TYPE_CHECKING:
    from trueup.recording.recorder.running import Capture


def capture(
    directory: str | Path,
    *,
    model: Any = None,
    level: str | Sequence[str] = LEVELS,
    detail: str = "stats",
    steps: NumberSet = None,
    ranks: NumberSet = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    phase: str | Sequence[str] | None = None,
    on_error: str = "continue",
    compile: str = "off",
    inputs_from: str | Path | None = None,
    force: str | None = None,
) -> Capture[Any]:
    """Record what a training run does, in a ``with`` block.

        with trueup.capture("runs/cpu", model=model, steps=range(0, 3)) as cap:
            for batch in loader:
                ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
                cap.step()      # optional: without it optimizers tell where a step ends

    Args:
        directory: where the capture goes; must not hold one yet.
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs is
            the root.
        level: one or more of ``module``, ``api``, ``aten``, or ``all``.
        detail: ``digest``, ``stats`` or ``tensor``.
        steps: steps to record: ``range(0, 3)``, ``[0, 7]``, ``"0:3"``; None records all.
        ranks: ranks to record, in the same forms.
        include: globs (``neck.*``, ``*softmax*``) or ``/regular expressions/`` on scope, operator or ``scope/operator``.
        exclude: the same; wins over ``include``.
        phase: one or more of ``forward``, ``recompute``, ``backward``, ``optimizer``, ``collective``, ``data``.
        compile: ``off`` runs the Python code of what torch.compile compiled, so that every level sees the whole run;
            ``through`` runs the compiled code and sees its modules from outside, library calls and fused kernels. A note in the
            capture tells which.
        inputs_from: a capture of detail ``tensor``: each module of this run computes with what it was given there, and its backward
            with the gradients it got there, so that the capture holds each one's own error. This is the one option that changes the
            training.
        force: what is given them: ``module``, or each call of level ``api`` or ``aten``; else the first of these that the capture
            has.
        on_error: ``continue`` goes on training, loudly, when the capture cannot be written; ``stop`` raises in the training.

    Raises:
        TrueupError: an option is unknown or selects nothing, the directory holds a capture or cannot be written, a capture
            is already running, or no framework is imported.
    """
    options = CaptureOptions.of(
        level=level, detail=detail, steps=steps, ranks=ranks, include=include, exclude=exclude, phase=phase, on_error=on_error,
        compile=compile, inputs_from=None if inputs_from is None else str(inputs_from), force=force,
    )  # fmt: skip
    framework = meant(model)
    if framework is None:
        names = listed([adapter.name for adapter in ADAPTERS])
        raise TrueupError(f"capture found no framework: import {names} before you call trueup.capture")
    begun: Capture[Any] = import_module(f"trueup.recording.adapters.{framework.name}").capture(directory, model, options)
    return begun


def step() -> None:
    """End the present step of the capture that runs in this process; where none runs, do nothing, at next to no cost.

        for batch in loader:
            ...
            trueup.step()       # may stay in the script

    For loops in which no optimizer of the framework steps, or not once per step. Once it was called, only it ends the steps of that
    capture. It works under ``trueup capture -- COMMAND`` and inside ``with trueup.capture(...)`` alike.
    """
    for adapter in ADAPTERS:
        capturing = sys.modules.get(f"trueup.recording.adapters.{adapter.name}.capturing")
        if capturing is not None:
            capturing.running.step()
