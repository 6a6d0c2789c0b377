"""What a shadow run is asked to do, from Python, from the command line, or from the environment of an armed process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trueup.foundation.model import TrueupError

DTYPES = ("float64", "float32")
LARGEST_MB = 1024.0
"""Tensors of more megabytes are not shadowed unless asked: the reference holds them widened, on another device perhaps."""

_TIME = re.compile(r"([0-9.]+)\s*(ms|s|x)")


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """Build it with `ShadowOptions.of`, which checks every value."""

    reference: str = "cpu"
    """Device that computes each call again."""
    dtype: str = "float64"
    sample: float = 1.0
    """Share of the calls that is computed again, chosen by seed and the call's key; the first of each kind always is."""
    seed: int = 0
    milliseconds: float | None = None
    """Most that a step may take longer; None: no limit."""
    ratio: float | None = None
    """The same as a multiple of the step's own time."""
    largest_mb: float = LARGEST_MB
    """Megabytes of the largest tensor of a call that is computed again."""

    @classmethod
    def of(
        cls, target: str = "cpu:float64", *, sample: float = 1.0, seed: int = 0, time: str | float | None = None,
        largest_mb: float = LARGEST_MB,
    ) -> ShadowOptions:  # fmt: skip
        """Check the options of a shadow run.

        Args:
            target: device and dtype of the reference: ``cpu:float64``, ``cuda:0:float32``, ``cpu``.
            time: most that a step may take longer: ``200ms``, ``2s``, ``0.5x`` (of the step's own time), or milliseconds.

        Raises:
            TrueupError: a value is none of these.
        """
        device, _, dtype = target.rpartition(":") if target.rpartition(":")[2] in DTYPES else (target, ":", "float64")
        if not device or not re.fullmatch(r"[a-z]+(:[0-9]+)?", device):
            raise TrueupError(
                f"shadow {target!r} is no reference: expected DEVICE or DEVICE:DTYPE with a dtype of {' or '.join(DTYPES)}, "
                "for example cpu:float64"
            )
        if not 0 < sample <= 1:
            raise TrueupError(f"shadow sample {sample!r} is no share of the calls: expected a number above 0 and up to 1")
        if not largest_mb > 0:
            raise TrueupError(f"shadow largest {largest_mb!r} is no size: expected megabytes above 0")
        milliseconds, ratio = _limit(time)
        return cls(device, dtype, float(sample), int(seed), milliseconds, ratio, float(largest_mb))

    @property
    def target(self) -> str:
        """``cpu float64``, as messages say it."""
        return f"{self.reference} {self.dtype}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ShadowOptions:
        """Read what ``dataclasses.asdict`` wrote."""
        return cls(**values)


def _limit(time: str | float | None) -> tuple[float | None, float | None]:
    if time is None:
        return None, None
    if isinstance(time, (int, float)) and time > 0:
        return float(time), None
    match = _TIME.fullmatch(str(time))
    try:
        amount = float(match[1]) if match else 0.0
    except ValueError:
        amount = 0.0
    if match is None or amount <= 0:
        raise TrueupError(f"shadow time {time!r} is no limit: expected e.g. 200ms, 2s or 0.5x (half of the step's own time)")
    if match[2] == "x":
        return None, amount
    return amount * (1000.0 if match[2] == "s" else 1.0), None
