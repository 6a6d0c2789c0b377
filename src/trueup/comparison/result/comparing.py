"""`trueup.compare`: two captures in, one `Result` out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trueup.comparison.normalise.mapping import Mapping
from trueup.comparison.normalise.mapping import load as load_mapping
from trueup.comparison.result.assembly import Assembly
from trueup.comparison.result.gradients import norms_of
from trueup.comparison.verdict.compare import Comparison
from trueup.comparison.verdict.criteria import load as load_criterion
from trueup.comparison.verdict.judged import Part
from trueup.foundation.model import Result
from trueup.foundation.store import Capture, open_capture


def compare(
    baseline: str | Path | Capture,
    candidate: str | Path | Capture,
    *,
    level: str | Sequence[str] | None = None,
    criterion: str | Path = "default",
    mapping: str | Path | None = None,
    repeat: Sequence[str | Path | Capture] = (),
    reference: str | Path | Capture | None = None,
    see: Callable[[Part], None] | None = None,
) -> Result:
    """Line up two captures and name the first call whose inputs agree and whose outputs do not.

        >>> result = trueup.compare("runs/cpu", "runs/npu")     # doctest: +SKIP
        >>> result.verdict                                      # doctest: +SKIP
        'deviates'
        >>> result.culprit.scope, result.culprit.phase          # doctest: +SKIP
        ('neck.lstm', 'backward')

    Args:
        baseline: the trusted capture.
        candidate: the capture under suspicion.
        level: compare only these levels; all that both captures hold by default.
        criterion: ``default`` (between frameworks ``frameworks``), one of ``bitwise``, ``ptdbg``, ``ptdbg-summary``,
        ``precision-tool``, ``paddle`` and ``msprobe``,
            or the path of a criterion file (docs/criteria.md).
        mapping: path of a file that says which scopes and operators of the candidate are which of the baseline, and which
            calls are not to be compared (docs/alignment.md).
        repeat: captures of the baseline's run made again: what differs no more than a few times as much as they do is explained.
        reference: capture of the same training in float64: both runs are judged by their distance from it.
        see: called with what was measured and judged of each part, a rank and some steps, while it is at hand.

    Raises:
        TrueupError: a path is no capture, the format is newer, or the two cannot be compared at all (other frameworks'
            worlds, no step, rank or level in common).
    """
    given = (baseline, candidate, *repeat, *([] if reference is None else [reference]))
    first, second, *others = (c if isinstance(c, Capture) else open_capture(c) for c in given)
    told = Mapping() if mapping is None else load_mapping(mapping)
    repeats, truth = others[: len(repeat)], None if reference is None else others[-1]
    comparison = Comparison((first, second), level, load_criterion(criterion), told, repeats, truth)
    assembly = Assembly(comparison)
    seeing = [] if see is None else [see]
    comparison.run(*seeing, assembly.add, beside=norms_of, in_full=see is not None)
    return assembly.result()
