"""What each series of a monitor is: the rows of ``kinds.toml``."""

from __future__ import annotations

from functools import cache
from typing import Literal

from trueup.foundation import toml

Rule = Literal["spike", "drift", "drift_up", "frozen", "vanishing", "dead", "desync"]
Settled = Literal["", "set", "counted"]


class Kind(toml.Table):
    """A row."""

    name: str
    meaning: str
    msprobe: str = ""
    alerts: tuple[Rule, ...] = ()
    scale: Literal["log", "linear"] = "log"
    moved: float = 3.0
    settled: Settled = ""
    absent: float | None = None
    remembers: int = 0
    share: bool = False
    ranks: Literal["mean", "largest", "sum", "none"] = "mean"


class Kinds(toml.Table):
    """The file."""

    kind: tuple[Kind, ...]


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name, in the order of the file."""
    return {one.name: one for one in toml.checked(toml.packaged("trueup.analysis.monitor", "kinds.toml"), Kinds).kind}


SETTING = "setting"  # the kind of what is set: eps of a module, weight_decay of AdamW
OTHER = Kind("", "a series that this version does not know", scale="linear")


def kind_of(series: str) -> Kind:
    """Return the kind of a series by its name, ``gradient_norm/encoder.0``."""
    return kinds().get(series.partition("/")[0], OTHER)


def spoken(series: str) -> str:
    """Return a series as a sentence names it: ``gradient_norm of encoder.0``."""
    kind, _, scope = series.partition("/")
    if kind == SETTING:
        return scope
    of = "group " if kind == "lr" else ""
    return f"{kind} of {of}{scope}" if scope else kind
