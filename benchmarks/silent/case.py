"""A silent bug: one small training in a correct and a buggy form, and the place that a right verdict names.

    @case("loss-scaled-twice", "huggingface/accelerate#3533", "Both libraries divide the loss.", Place("div", phase="forward"))
    def loss_scaled_twice(form: Form) -> Training: ...
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from trueup.foundation.model import Finding, Result

Form = Literal["correct", "buggy", "again"]
"""``again`` is correct too: another implementation where the case has one, else the same training once more."""
Word = Literal["right", "other place", "could not tell", "aligned"]


@dataclass(frozen=True)
class Place:
    """Where the first wrong result of a run arises.

    ``ops`` is searched in the names of the call (operator, function around it, operators inside it), ``scope`` is the whole module
    path, ``phase`` holds one or more names between bars, ``step`` counts from 0. An empty pattern fits everything. A finding fits
    as well that names the ``setting`` at fault in its words, or, where wrong data are ``given``, that says which input differs.
    """

    ops: str = ""
    scope: str = ".*"
    phase: str = "forward"
    step: int = 0
    setting: str = ""
    given: bool = False

    def holds(self, finding: Finding) -> bool:
        """Tell whether a finding is this place; of a module's call the path decides alone, and the whole model is no place."""
        if self.setting and re.search(self.setting, f"{finding.sentence} {finding.because} {finding.cause}"):
            return True
        if self.given and finding.kind == "input":
            return finding.step == self.step and finding.phase in self.phase.split("|")
        names = " ".join(filter(None, (finding.op, finding.api, *finding.aten)))
        return self.fits(finding.level, finding.phase, finding.scope, names, finding.step)

    def fits(self, level: str, phase: str, scope: str, names: str, step: int) -> bool:
        """Tell whether a call with these names is this place."""
        whole = level == "module" and phase != "optimizer"  # the update of a parameter is a call of its own
        named = (scope != "" and self.scope != ".*") if whole else re.search(self.ops, names) is not None
        return named and step == self.step and phase in self.phase.split("|") and re.fullmatch(self.scope, scope) is not None

    def __call__(self, result: Result) -> Word:
        """Say what a comparison made of the bug: only a culprit that is named with certainty is right or wrong."""
        if result.verdict == "aligned":
            return "aligned"
        if result.verdict == "inconclusive" or result.culprit is None:
            return "could not tell"
        return "right" if self.holds(result.culprit) else "other place"


@dataclass
class Training:
    """A model and a function that trains one step and returns its loss, run inside ``around``."""

    model: nn.Module
    step: Callable[[], Tensor]
    around: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)


@dataclass(frozen=True)
class Case:
    """A row of the table of silent bugs."""

    name: str
    origin: str
    """``owner/repository#number`` of the public issue or pull request that tells of it."""
    what: str
    """The bug in one sentence."""
    place: Place
    build: Callable[[Form], Training]
    precision: str = "float32"
    steps: int = 2


CASES: dict[str, Case] = {}


def case(
    name: str, origin: str, what: str, place: Place, *, precision: str = "float32", steps: int = 2
) -> Callable[[Callable[[Form], Training]], Callable[[Form], Training]]:
    """Enter the function that builds the training of a silent bug into `CASES`."""

    def enter(build: Callable[[Form], Training]) -> Callable[[Form], Training]:
        CASES[name] = Case(name, origin, what, place, build, precision, steps)
        return build

    return enter
