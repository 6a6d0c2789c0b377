"""Which adapter reads a model, or an optimizer: the one of its framework, if that is imported."""

from __future__ import annotations

import sys
from typing import Any

from trueup.foundation.frameworks.tables import FRAMEWORKS
from trueup.foundation.frameworks.trees import OptimizerFacts, Tree
from trueup.foundation.model import TrueupError


def adapter_of(model: Any) -> Any:
    """Return the module of the adapter that reads a model: ``tree``, ``state``, ``load``, and trains it: ``step``.

    Raises:
        TrueupError: it is no model of a framework that is known.
    """
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    if torch is not None and isinstance(model, torch.nn.Module):
        from trueup.recording.adapters.torch import models

        return models
    if paddle is not None and isinstance(model, paddle.nn.Layer):
        from trueup.recording.adapters.paddle import models as paddle_models

        return paddle_models
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):
        if keras.config.backend() != "tensorflow":
            raise TrueupError(f"Keras runs on {keras.config.backend()} here: models are read where it runs on TensorFlow")
        from trueup.recording.adapters.tensorflow import models as keras_models

        return keras_models
    known = " or ".join(FRAMEWORKS)
    expected = "a torch.nn.Module, a paddle.nn.Layer or a Keras model"
    raise TrueupError(f"{type(model).__name__} is no model of {known}: expected {expected}")


def tree_of(model: Any) -> Tree:
    """Return what a model consists of.

    Raises:
        TrueupError: it is no model of a framework that is known.
    """
    found: Tree = adapter_of(model).tree(model)
    return found


def facts_of(optimizer: Any) -> OptimizerFacts:
    """Return what an optimizer is.

    Raises:
        TrueupError: it is none of torch.optim, paddle.optimizer or keras.optimizers.
    """
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        from trueup.recording.adapters.torch.models import optimizer_facts

        return optimizer_facts(optimizer)
    if paddle is not None and isinstance(optimizer, paddle.optimizer.Optimizer):
        from trueup.recording.adapters.paddle.models import optimizer_facts as paddle_facts

        return paddle_facts(optimizer)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(optimizer, keras.optimizers.Optimizer):
        from trueup.recording.adapters.tensorflow.models import optimizer_facts as keras_facts

        return keras_facts(optimizer)
    expected = "one of torch.optim, paddle.optimizer or keras.optimizers"
    raise TrueupError(f"{type(optimizer).__name__} is no optimizer: expected {expected}")
