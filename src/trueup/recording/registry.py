"""Which frameworks have an adapter, and what each can do; the rest of Trueup asks `ADAPTERS`."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # this file is loaded at every start-up, and typing takes longer to load than all of it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


class Adapter:
    """What there is for one framework."""

    def __init__(
        self, name: str, title: str, *, models: str, levels: Sequence[str], lacks: Sequence[str] = (), page: str = "",
        executes: str = "",
    ) -> None:
        self.name = name  # the module that users import, the folder here, and what manifests say
        self.title = title  # as it is written in messages
        self.levels, self.lacks, self.page = levels, lacks, page
        """Levels that it records, options that it has not, and the page that says so."""
        self.executes = executes
        """What to install to have recorded calls executed again, by the adapter's module ``executing``; empty: none are."""
        self._models = models

    @property
    def imported(self) -> bool:
        """Whether the user has imported the framework."""
        return self.name in sys.modules

    @property
    def kind(self) -> type[Any] | None:
        """The class of the framework's modules; None where it is not loaded."""
        module, _, name = self._models.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        return found if isinstance(found, type) else None

    def holds(self, model: Any) -> bool:
        """Tell whether a model, or one of several, is of this framework."""
        kind, roots = self.kind, model if isinstance(model, (list, tuple)) else [model]
        return kind is not None and any(isinstance(root, kind) for root in roots)


ADAPTERS = (
    Adapter(
        "torch", "PyTorch", models="torch.nn.Module", levels=("module", "api", "aten"), page="docs/limits.md", executes="torch"
    ),
    Adapter(
        "paddle", "PaddlePaddle", models="paddle.nn.Layer", levels=("module", "api"), page="docs/paddle.md",
        lacks=("compile", "shadow", "inputs_from"), executes="paddlepaddle",
    ),
    Adapter(
        "tensorflow", "TensorFlow", models="keras.src.layers.layer.Layer", levels=("module", "api"), page="docs/tensorflow.md",
        lacks=("policy", "compile", "shadow", "inputs_from"),
    ),
)  # fmt: skip
"""In the order in which they are asked: where several frameworks are imported and no model tells, the first is meant."""


def adapter(name: str) -> Adapter:
    """Return the adapter of a framework."""
    return next(found for found in ADAPTERS if found.name == name)


def meant(model: Any) -> Adapter | None:
    """Return the adapter of a model's framework, else of the first framework that is imported; None where none is."""
    of_model = (found for found in ADAPTERS if found.holds(model))
    return next(of_model, None) or next((found for found in ADAPTERS if found.imported), None)


def listed(names: Sequence[str], last: str = "or") -> str:
    """Write names as a sentence does: ``a, b or c``."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
