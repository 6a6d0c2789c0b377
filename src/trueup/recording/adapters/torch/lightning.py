"""`trueup.LightningCallback`: a capture around `Trainer.fit` of Lightning, under either of its package names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.trainers import TrainingCapture

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback() -> Any:
    """Return the base class of callbacks of the package that is in use, or of one that is installed."""
    used = [name for name in PACKAGES if name in sys.modules]
    found = used or [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    if not found:
        raise TrueupError("LightningCallback found no Lightning: expected the package lightning or pytorch-lightning")
    return import_module(f"{found[0]}.callbacks").Callback


class LightningCallback(_callback()):  # type: ignore[misc]
    """Record a training run of Lightning.

        trainer = Trainer(max_steps=100, callbacks=[trueup.LightningCallback("runs/gpu", steps=range(0, 3))])

    A step is one step of the optimizer, however many batches it accumulates; a validation belongs to the step that follows it.

    Args:
        directory: where the capture goes; must not hold one yet.
        options: keywords of `trueup.capture`: ``steps``, ``ranks``, ``level``, ``detail``, ...

    Raises:
        TrueupError: an option is unknown or selects nothing, or Lightning is not installed.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self._capture = TrainingCapture(directory, options)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the capture."""
        self._steps = trainer.global_step
        self._capture.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """End a step, if the optimizer has stepped since the last batch."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._capture.step()

    def on_train_end(self, *_: Any) -> None:
        """End the capture."""
        self._capture.end()

    def on_exception(self, *_: Any) -> None:
        """End the capture: what was recorded so far is kept."""
        self._capture.end()
