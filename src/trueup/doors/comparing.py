"""`trueup.compare`: a comparison of two captures, with what the candidate's tensors or its shadow say of single calls; and
`trueup.curves`: a verdict over whole trainings by one of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trueup.comparison.result import comparing
from trueup.comparison.verdict.judged import OwnErrors, Part
from trueup.foundation.facts.why import Reason
from trueup.foundation.model import DETAILS, Result
from trueup.foundation.store import Capture, layout, open_capture
from trueup.foundation.store.layout import MONITOR

if TYPE_CHECKING:
    from trueup.analysis.curves.judging import Verdict

SECONDS = 60.0
"""That computing calls again may take: what a person waits for who has a culprit already. A small model's takes one."""


def curves(
    baseline: Sequence[str | Path], candidate: Sequence[str | Path], series: str | None = None, *, pattern: Sequence[str] = (),
    **options: Any,
) -> Verdict:  # fmt: skip
    """Judge whole trainings by one of their numbers, with an error bar.

        >>> found = trueup.curves(["base-seed1.csv", "base-seed2.csv"], ["cand-seed1.csv", "cand-seed2.csv"])  # doctest: +SKIP
        >>> found.word, found.exit_code                                                                       # doctest: +SKIP
        ('could not tell', 2)

    Args:
        baseline: the trusted runs, repeats of one training: captures, logs, tables, folders of trackers (docs/curves.md).
        candidate: the runs under suspicion.
        series: which number; else the loss.
        pattern: regular expressions with named groups that read a log's lines.
        options: ``margin``, ``paired``, ``better``, ``window``, ``spread``, ``shift``, as of
            `trueup.analysis.curves.judging.judge`.

    Raises:
        TrueupError: a run cannot be read or lacks the series, or no step is in all runs.
    """
    from trueup.analysis.curves.judging import judge
    from trueup.exchange.curves import read

    first, second = ([run for one in side for run in read(Path(one), pattern)] for side in (baseline, candidate))
    return judge(first, second, series, **options)


def are_monitored(baseline: Path, candidate: Path) -> bool:
    """Tell whether two runs are both of a monitor; raises TrueupError if one is no capture."""
    return all(one.is_dir() and MONITOR in layout.read_root(one) for one in (baseline, candidate))


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
    recompute: float = SECONDS,
    shards: str | Path | None = None,
    jobs: int | None = 1,
    engine: str = "local",
) -> Result:
    """Line up two captures and name the first call whose inputs agree and whose outputs do not; of two monitored runs the first
    series that leaves (a `trueup.analysis.monitor.comparing.Compared`, which has ``verdict``, ``sentence``, ``exit_code``,
    ``left`` and ``notes``).

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
            ``precision-tool``, ``paddle`` and ``msprobe``, or the path of a criterion file (docs/criteria.md).
        mapping: path of a file that says which scopes and operators of the candidate are which of the baseline, and which
            calls are not to be compared (docs/alignment.md).
        repeat: captures of the baseline's run made again: what differs no more than a few times as much as they do is explained.
        reference: capture of the same training in float64: both runs are judged by their distance from it.
        see: called with what was measured and judged of each part, a rank and some steps, while it is at hand.
        recompute: seconds in which calls behind a culprit are computed again on the CPU, each from its own recorded inputs, where
            the candidate holds tensors (of a shadow run its own table is read): which of them are wrong by themselves. 0: none.
        shards: path of a file that says how tensors lie on the ranks of runs of different layouts (docs/layouts.md).
        jobs: processes among which the ranks are shared out; None: one for each processor where there are many ranks. A script
            that asks for more than one needs ``if __name__ == "__main__":``, for each of them imports it.
        engine: ``local``, or ``ray``, ``dask``, ``ray:ADDRESS``, ``dask:ADDRESS``: where they run (docs/cluster.md).

    Raises:
        TrueupError: a path is no capture, the format is newer, or the two cannot be compared at all (other frameworks'
            worlds, no step, rank or level in common).
    """
    first, second = map(open_capture, (baseline, candidate))
    if MONITOR in first.root and MONITOR in second.root:
        from trueup.analysis.monitor.comparing import compare_series

        return cast("Result", compare_series(first, second, repeat))
    return comparing.compare(
        first, second, level=level, criterion=criterion, mapping=mapping, repeat=repeat, reference=reference, see=see,
        own_errors=_own_errors(first, second, recompute) if recompute else None, shards=shards, jobs=jobs, engine=engine,
    )  # fmt: skip


def _own_errors(baseline: Capture, candidate: Capture, seconds: float) -> OwnErrors | None:
    """Return what tells which calls are wrong by themselves, None where the candidate does not hold it."""
    config = candidate.root.get("config")
    is_shadow = isinstance(config, dict) and isinstance(config.get("shadow"), dict)
    if candidate.imported or not (is_shadow or candidate.root.get("detail") == DETAILS[-1]):
        return None
    return _Executed(baseline, candidate, seconds)


class _Executed:
    """Computes calls again when it is first asked: a framework is imported for it, and most comparisons never ask."""

    def __init__(self, baseline: Capture, candidate: Capture, seconds: float) -> None:
        self._given = baseline, candidate, seconds
        self._loaded: OwnErrors | None = None

    def __reduce__(self) -> tuple[Any, ...]:  # a worker has the seconds to itself
        return _Executed, self._given

    def __call__(self, rank: int, calls: Sequence[tuple[int, int]]) -> Mapping[int, Reason | None]:
        if self._loaded is None:
            from trueup.analysis.rerun.replay import OwnErrors as Executed

            self._loaded = Executed(*self._given)
        return self._loaded(rank, calls)
