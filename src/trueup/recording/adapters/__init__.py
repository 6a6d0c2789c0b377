"""One folder per framework, the only code that imports it: each turns what the framework executes into calls of a `Recorder`.

An adapter is imported when the user already imported or named its framework. Nothing outside an adapter, `simdev` and `compat`
may import a framework. `ADAPTERS` is what the rest of Trueup asks which there are and what each of them can do.
"""

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
        self.name = name
        """The module that users import, the folder here, and what manifests say."""
        self.title = title
        """As it is written in messages."""
        self.levels, self.lacks, self.page = levels, lacks, page
        """Levels that it records, options that it has not, and the page that says so."""
        self.executes = executes
        """What to install to have recorded calls executed again, by the adapter's module ``executing``; empty: none are."""
        self._models = models

    @property
    def imported(self) -> bool:
        """Whether the user has imported the framework."""
        return self.name in sys.modules

    def holds(self, model: Any) -> bool:
        """Tell whether a model, or one of several, is of this framework."""
        module, _, name = self._models.rpartition(".")
        kind = getattr(sys.modules.get(module), name, None)
        roots = model if isinstance(model, (list, tuple)) else [model]
        return isinstance(kind, type) and any(isinstance(root, kind) for root in roots)


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
