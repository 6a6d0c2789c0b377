"""`trueup.TrainerCallback`: a capture around `transformers.Trainer.train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from trueup.recording.adapters.torch.trainers import TrainingCapture


class TrainerCallback(transformers.TrainerCallback):
    """Record a training run of the Hugging Face Trainer.

        trainer = Trainer(model, arguments, train_dataset=data,
                          callbacks=[trueup.TrainerCallback("runs/gpu", steps=range(0, 3))])

    A step is one step of the optimizer, however many batches it accumulates; an evaluation belongs to the step that follows it.

    Args:
        directory: where the capture goes; must not hold one yet.
        options: keywords of `trueup.capture`: ``steps``, ``ranks``, ``level``, ``detail``, ...

    Raises:
        TrueupError: an option is unknown or selects nothing.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        self._capture = TrainingCapture(directory, options)

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Begin the capture."""
        self._capture.begin(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step."""
        self._capture.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the capture."""
        self._capture.end()
