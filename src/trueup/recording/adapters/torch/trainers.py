"""`trueup.TrainerCallback` and `trueup.LightningCallback`: a capture that begins and ends with a training run of a trainer.

The class that a callback derives from is the trainer's. So each is made when it is first asked for, and imports its trainer then.
"""

from __future__ import annotations

import atexit
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.session import Session, capture, running
from trueup.recording.engine.session import Capture
from trueup.recording.recorder import CaptureOptions

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The names under which there is a Lightning."""


class TrainingCapture:
    """A capture around one training run of a trainer.

    A process that is captured already (``trueup capture -- ...``) keeps that capture; then only its steps are ended here.

    Args:
        directory: where the capture goes; must not hold one yet.
        options: keywords of `trueup.capture`: ``steps``, ``ranks``, ``level``, ``detail``, ... They are checked at once.

    Raises:
        TrueupError: an option is unknown or selects nothing, or Lightning, where it is asked for, is not installed.
    """

    def __init__(self, directory: str | Path, **options: Any) -> None:
        super().__init__()
        self._directory, self._options = directory, CaptureOptions.of(**options)
        self._capture: Capture[Session] | None = None

    def _begin(self, model: Any) -> None:
        if running.session is None:
            self._capture = capture(self._directory, model, self._options)
            self._capture.__enter__()
            atexit.register(self._end)  # a training that raises tells no callback
        if (session := running.session) is not None:
            session.steps_by_hand()

    def _end(self) -> None:
        begun, self._capture = self._capture, None
        if begun is not None:
            atexit.unregister(self._end)
            begun.__exit__(None, None, None)


class _HuggingFace(TrainingCapture):
    """Record a training run of the Hugging Face Trainer.

        trainer = Trainer(model, arguments, train_dataset=data,
                          callbacks=[trueup.TrainerCallback("runs/gpu", steps=range(0, 3))])

    A step is one step of the optimizer, however many batches it accumulates; an evaluation belongs to the step that follows it.
    Arguments are those of `TrainingCapture`.
    """

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self._begin(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        running.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end()


class _Lightning(TrainingCapture):
    """Record a training run of Lightning, under either of its package names.

        trainer = Trainer(max_steps=100, callbacks=[trueup.LightningCallback("runs/gpu", steps=range(0, 3))])

    A step is one step of the optimizer, however many batches it accumulates; a validation belongs to the step that follows it.
    Arguments are those of `TrainingCapture`.
    """

    _steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self._begin(pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            running.step()

    def on_train_end(self, *_: Any) -> None:
        self._end()

    def on_exception(self, *_: Any) -> None:  # what was recorded so far is kept
        self._end()


def _lightning() -> Any:
    """Return Lightning's module of callbacks: of the package that is in use, or of one that is installed."""
    used = [name for name in LIGHTNING if name in sys.modules]
    found = used or [name for name in LIGHTNING if find_spec(name.partition(".")[0]) is not None]
    if not found:
        raise TrueupError("LightningCallback found no Lightning: expected the package lightning or pytorch-lightning")
    return import_module(f"{found[0]}.callbacks")


def __getattr__(name: str) -> Any:
    """Make the callback that is asked for."""
    events: type[TrainingCapture]
    if name == "TrainerCallback":
        events, base = _HuggingFace, import_module("transformers").TrainerCallback
    elif name == "LightningCallback":
        events, base = _Lightning, _lightning().Callback
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = type(name, (events, base), {"__doc__": events.__doc__, "__module__": __name__})
    return made
