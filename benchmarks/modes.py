"""The modes of `make bench`: what Trueup records, what msprobe records for the same purpose, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
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
        steps: whether steps are recorded at all.
    """

    options: dict[str, Any]
    rival: dict[str, Any] | None = None
    rival_optimizer: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    idle: bool = False


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
    "aten stats": Mode({"level": "aten"}, _statistics("L1"), rival_optimizer=True, targets={"gpt": 1.7, "resnet": 2.0}),
    "all levels": Mode({}),
    "api tensor": Mode(
        {"level": "api", "detail": "tensor", "phase": OUTSIDE},
        {"task": "tensor", "level": "L1", "risk_level": "ALL"},
        targets={"gpt": 2.2, "resnet": 3.0},
    ),
}  # fmt: skip
"""msprobe's L1 knows about 90 functions of a forward where aten sees 338 operators, so `aten stats` compares unlike amounts."""
