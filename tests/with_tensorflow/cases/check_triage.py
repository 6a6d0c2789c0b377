"""Step 2 of a triage on the example's network in TensorFlow 2, each run in this process; `test_cases` triages wrong networks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import pytest
import tensorflow as tf

import trueup
from trueup.analysis.triage.running import Switch, Trial, load, losses_of
from trueup.analysis.triage.triaging import Search
from trueup.foundation.facts.operators import named
from trueup.recording.adapters.tensorflow import switching
from trueup.recording.engine.replacing import Switching

EXAMPLE = Path(__file__).parents[3] / "examples" / "tensorflow_classifier"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Return the example's training; once, for TensorFlow keeps the implementations of a function by the name it gave them."""
    sys.path.insert(0, str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("train_of_the_example", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLE))
    for name in ("activations", "digits"):
        sys.modules.pop(name, None)


def train(example: ModuleType, steps: int) -> None:
    """Train as the example does."""
    keras.utils.set_random_seed(0)
    model = example.Network("right", "right")
    criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = criterion(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for x, y in example.batches(steps, 16):
        step(tf.constant(x), tf.constant(y))


class InProcess:
    """A runner whose runs are calls of a function, with the settings of switches made and taken back around them."""

    def __init__(self, folder: Path, run: Any) -> None:
        self.table, self.steps = load(only=["implementation_selector"]), 1
        self.trials: list[Trial] = []
        self._folder, self._run = folder, run

    def losses(self, name: str, off: Iterable[Switch] = (), steps: int | None = None) -> Trial:
        return self._captured(name, off, level="api", include=named("loss"))

    def capture(self, name: str, off: Iterable[Switch], steps: str) -> Trial:
        return self._captured(name, off, level=("module", "api"), phase=("forward", "backward"))

    def _captured(self, name: str, off: Iterable[Switch], **options: Any) -> Trial:
        into = self._folder / f"{len(self.trials)}"
        names = tuple(one.name for one in off)
        Switching("tensorflow", [{"name": one.name, "framework": one.framework, **one.order} for one in off])
        tf.config.optimizer.set_experimental_options({})  # functions read their settings anew
        try:
            with trueup.capture(into, **options):
                self._run()
        finally:
            for forced in (switching._rewrites, switching._optimizer):
                forced.clear()
            while switching._standing:
                switching._standing.pop().remove()
            tf.config.optimizer.set_experimental_options({})
        losses = losses_of(trueup.open_capture(into))
        self.trials.append(Trial(name, names, into, losses, framework="tensorflow", devices=("cpu",)))
        return self.trials[-1]


def test_nothing_is_found_where_nothing_is_wrong(example: ModuleType, tmp_path: Path) -> None:
    runner: Any = InProcess(tmp_path / "runs", lambda: train(example, 1))
    found = Search(runner, tmp_path / "out", runner.losses("as it is"), None).look()
    assert (found.status, found.guilty) == ("pass", ()), found
