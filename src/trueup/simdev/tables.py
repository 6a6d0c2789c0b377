"""The two tables of the simulated device (`tables.toml`): faults, which a tool has to blame, and noise, which no tool may blame.

Pure data, readable without PyTorch. What a row does to the numbers is in `trueup.simdev.faults` (one function a row,
under the row's name) and `trueup.simdev.injection`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trueup.foundation.model import Phase
from trueup.foundation.toml import packaged

Effect = TypeVar("Effect", bound=Callable[..., dict[int, Any] | None])
"""Returns wrong values by number of the result; None where it leaves the call whole."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a fault and a kind of noise have in common."""

    name: str
    ops: tuple[str, ...]  # dispatcher operators it touches, as a TorchDispatchMode sees them on npu: ``aten::add_.Tensor``
    phase: Phase  # where it shows first
    what: str  # what is different, in one sentence
    blame: str  # which call is to blame, in one sentence

    @property
    def op(self) -> str:
        """The operators in one string."""
        return ", ".join(self.ops)


@dataclass(frozen=True, slots=True)
class Fault(Row):
    """A way in which the device computes a wrong result."""

    gated: bool = False  # the fault acts in its phase only; otherwise wherever the operator runs


@dataclass(frozen=True, slots=True)
class Noise(Row):
    """A legitimate difference between devices: other rounding, the same mathematics."""

    bound: float  # relative L2 error that one call may show against the CPU in float32, on well conditioned inputs


@dataclass(frozen=True, slots=True)
class Defect:
    """What a fault does to the numbers of a framework whose own kernels are broken so."""

    ops: tuple[str, ...]  # as that framework names them
    phase: str
    effect: Callable[..., dict[int, Any] | None]


class Catalogue(dict[str, Defect]):
    """Defects by names of faults; filled by ``@catalogue.fault("softmax-backward", "softmax", phase="backward")``."""

    def fault(self, name: str, *ops: str, phase: str = "forward") -> Callable[[Effect], Effect]:
        """Return what registers an effect on some operators."""

        def register(effect: Effect) -> Effect:
            self[name] = Defect(ops, phase, effect)
            return effect

        return register


def _rows(kind: Any, table: list[dict[str, Any]]) -> dict[str, Any]:
    return {row["name"]: kind(**row | {"ops": tuple(row["ops"])}) for row in table}


_TABLES = packaged("trueup.simdev", "tables.toml")
FAULTS: dict[str, Fault] = _rows(Fault, _TABLES["fault"])
NOISE: dict[str, Noise] = _rows(Noise, _TABLES["noise"])
AUTOCAST: dict[str, list[str]] = {dtype: names.split() for dtype, names in _TABLES["autocast"].items()}
"""Functions of aten by what ``torch.autocast("npu")`` runs them in: ``lower``, ``float32``, or the widest dtype (``promote``)."""
