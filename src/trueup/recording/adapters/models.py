"""Which adapter reads a model, or an optimizer: the one of its framework, if that is imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from trueup.foundation.frameworks.tables import FRAMEWORKS
from trueup.foundation.frameworks.trees import OptimizerFacts, Tree
from trueup.foundation.model import TrueupError

MODELS = {"torch": "nn.Module", "paddle": "nn.Layer", "keras": "layers.Layer"}
OPTIMIZERS = {"torch": "optim.Optimizer", "paddle": "optimizer.Optimizer", "keras": "optimizers.Optimizer"}


def adapter_of(model: Any) -> Any:
    """Return the module that reads a model (``tree``, ``state``, ``load``) and trains it (``step``); raise `TrueupError` for no
    known model."""
    library = _library_of(model, MODELS)
    if library is None:
        known = " or ".join(FRAMEWORKS)
        expected = "a torch.nn.Module, a paddle.nn.Layer or a Keras model"
        raise TrueupError(f"{type(model).__name__} is no model of {known}: expected {expected}")
    if library == "keras" and (backend := sys.modules["keras"].config.backend()) != "tensorflow":
        raise TrueupError(f"Keras runs on {backend} here: models are read where it runs on TensorFlow")
    return _reader(library)


def tree_of(model: Any) -> Tree:
    """Return what a model consists of; raise `TrueupError` where it is no model of a framework that is known."""
    found: Tree = adapter_of(model).tree(model)
    return found


def facts_of(optimizer: Any) -> OptimizerFacts:
    """Return what an optimizer is; raise `TrueupError` where it is none of torch.optim, paddle.optimizer or keras.optimizers."""
    library = _library_of(optimizer, OPTIMIZERS)
    if library is None:
        expected = "one of torch.optim, paddle.optimizer or keras.optimizers"
        raise TrueupError(f"{type(optimizer).__name__} is no optimizer: expected {expected}")
    found: OptimizerFacts = _reader(library).optimizer_facts(optimizer)
    return found


def _library_of(value: Any, kinds: Mapping[str, str]) -> str | None:
    """Return the imported library of whose kind a value is, None where there is none."""
    imported = {library: sys.modules[library] for library in kinds if library in sys.modules}
    return next((name for name, library in imported.items() if isinstance(value, attrgetter(kinds[name])(library))), None)


def _reader(library: str) -> Any:
    """Return the module that reads models and optimizers of a library; it imports the framework."""
    if library == "torch":
        from trueup.recording.adapters.torch import models

        return models
    if library == "paddle":
        from trueup.recording.adapters.paddle import models as paddle_models

        return paddle_models
    from trueup.recording.adapters.tensorflow import models as keras_models

    return keras_models
