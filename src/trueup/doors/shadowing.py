"""`trueup.shadow`: find a wrong operator in one run, with no baseline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.foundation.model import TrueupError
from trueup.recording.execution.shadow_options import LARGEST_MB, ShadowOptions
from trueup.recording.recorder.options import NumberSet

if TYPE_CHECKING:
    from trueup.recording.adapters.torch.shadowing_block import Shadow


def shadow(
    model: Any = None,
    reference: str = "cpu",
    dtype: Any = "float64",
    sample: float = 1.0,
    *,
    directory: str | Path | None = None,
    seed: int = 0,
    time: str | float | None = None,
    largest_mb: float = LARGEST_MB,
    steps: NumberSet = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    phase: str | Sequence[str] | None = None,
    formulas: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], Any]] | None = None,
    quiet: bool = False,
) -> Shadow:
    """Execute each operator as usual and once more on a trusted device, with the same inputs; say which is wrong by itself.

        with trueup.shadow(model) as shadow:
            train_one_step(model)
        print(shadow.result.culprit)        # None, or the first call whose own error is beyond rounding

    The training is not touched: loss, gradients, random numbers and version counters are bitwise what they were. There is no second
    run, no dump, and no accumulated error.

    Args:
        model: the module, or modules, whose paths name the scopes; without it the first module with parameters that runs.
        reference: device that computes each call again.
        dtype: ``torch.float64`` or ``torch.float32``, or its name.
        sample: share of the calls, chosen by ``seed`` and the call's key; the first of each kind always is among them.
        directory: where the rows and the table of errors go, a capture; None keeps the table in memory.
        time: most that a step may take longer: ``"200ms"``, ``"0.5x"`` (of its own time), or milliseconds.
        largest_mb: calls with a larger tensor are left out, and counted.
        steps: steps to shadow, as in `trueup.capture`; so are ``include``, ``exclude`` and ``phase``.
        formulas: references of operators that Trueup does not know, ``{"npu::rms": formula}``: ``formula(arguments, outputs)`` gets
            the arguments by name, widened, and the outputs there were, and returns what they should be, ``{"output.0": tensor}``.
        quiet: print nothing at the end.

    Raises:
        TrueupError: an option is wrong, the reference cannot compute, the directory holds a capture or cannot be written, a capture
            is already running, or PyTorch is not imported.
    """
    name = str(dtype).removeprefix("torch.")
    options = ShadowOptions.of(f"{reference}:{name}", sample=sample, seed=seed, time=time, largest_mb=largest_mb)
    if "torch" not in sys.modules:
        raise TrueupError("shadow found no framework: import torch before you call trueup.shadow")
    from trueup.recording.adapters.torch.shadowing_block import shadow as shadow_torch

    return shadow_torch(
        model, options, directory, formulas, steps=steps, include=include, exclude=exclude, phase=phase, quiet=quiet
    )
