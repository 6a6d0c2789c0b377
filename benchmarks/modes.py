"""The modes of `make bench`: what Trueup records, what msprobe records for the same purpose, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTSIDE = ["forward", "backward"]
"""The phases of a capture that leaves the optimizer out."""


@dataclass(frozen=True)
class Mode:
    """One row of the table.

    Attributes:
        options: arguments of `trueup.capture`.
        rival: msprobe's configuration, None where it has nothing of the kind.
        rival_optimizer: whether msprobe records the optimizer's step.
        targets: largest ratio to the plain step, by model.
        idle: whether no step is recorded.
        watch: whether the options are those of `trueup.watch`.
    """

    options: dict[str, Any]
    rival: dict[str, Any] | None = None
    rival_optimizer: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    idle: bool = False
    watch: bool = False

    @property
    def quiet(self) -> bool:
        """Whether nothing is written."""
        return self.idle or self.watch

    def around(self, into: Path) -> Any:
        """Return what is measured, as a context manager."""
        import trueup  # msprobe's environment, which reads this table too, has none

        return trueup.watch(None, into, **self.options) if self.watch else trueup.capture(into, on_error="stop", **self.options)


def _statistics(level: str, summary: str = "statistics") -> dict[str, Any]:
    return {"task": "statistics", "level": level, "risk_level": "ALL", "statistics": {"summary_mode": summary}}


MODES = {
    "idle": Mode({"steps": "1000000:"}, targets={"gpt": 1.01, "resnet": 1.01}, idle=True),
    "module stats": Mode(
        {"level": "module", "phase": OUTSIDE}, _statistics("L0"), targets={"gpt": 1.10, "resnet": 1.20}
    ),
    "api digest": Mode(
        {"level": "api", "detail": "digest", "phase": OUTSIDE}, _statistics("L1", "md5"), targets={"gpt": 1.2, "resnet": 1.4}
    ),
    "api stats": Mode({"level": "api", "phase": OUTSIDE}, _statistics("L1"), targets={"gpt": 1.25, "resnet": 1.5}),
    "watch": Mode({}, targets={"gpt": 1.25, "resnet": 1.5}, watch=True),
    "aten stats": Mode({"level": "aten"}, _statistics("L1"), rival_optimizer=True, targets={"gpt": 1.7, "resnet": 2.0}),
    "all levels": Mode({}),
    "api tensor": Mode(
        {"level": "api", "detail": "tensor", "phase": OUTSIDE},
        {"task": "tensor", "level": "L1", "risk_level": "ALL"},
        targets={"gpt": 2.2, "resnet": 3.0},
    ),
}  # fmt: skip
"""msprobe's L1 knows about 90 functions of a forward where aten sees 338 operators, so `aten stats` compares unlike amounts."""
