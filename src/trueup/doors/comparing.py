"""`trueup.compare`: a comparison of two captures, with what the candidate's tensors or its shadow say of single calls;
`trueup.curves`: a verdict over whole trainings by one of their numbers; and `trueup.align`: two models of one design, of two
frameworks, trained side by side for a few steps and compared.

>>> found = trueup.align(torch_model, paddle_model, batch, optimizers=(torch_adam, paddle_adam), steps=3)    # doctest: +SKIP
>>> print(found)                                                                                              # doctest: +SKIP
DEVIATES  first culprit: encoder.norm1, forward, step 0, rank 0  (paddle._C_ops.layer_norm)
          ...
before any number: encoder.norm1 (LayerNorm): eps is 1e-05 in torch, 1e-06 in paddle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trueup.comparison.result import comparing
from trueup.comparison.verdict.judged import OwnErrors, Part
from trueup.foundation.facts.why import Reason
from trueup.foundation.model import DETAILS, Result, TrueupError
from trueup.foundation.store import Capture, layout, open_capture
from trueup.foundation.store.layout import MONITOR

if TYPE_CHECKING:
    from trueup.analysis.curves.judging import Verdict
    from trueup.analysis.pairing.models import Difference
    from trueup.analysis.pairing.proposing import Conversion, Proposal

SECONDS = 60.0
"""That computing calls again may take: what a person waits for who has a culprit already. A small model's takes one."""

Loss = Callable[..., Any]  # takes the model and the batch's tensors, returns a scalar tensor


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


@dataclass(frozen=True)
class Alignment:
    """What `align` returns."""

    result: Result  # of the comparison
    findings: Sequence[Difference]  # settings of layers and optimizers that differ: known before any number is computed
    proposal: Proposal
    conversion: Conversion | None  # what became of the weights; None where they were left alone
    notes: Sequence[str]
    directory: Path  # holds both captures, ``map.toml`` and the report

    @property
    def verdict(self) -> str:
        """``aligned``, ``deviates`` or ``inconclusive``; settings that differ are no verdict of their own."""
        return self.result.verdict

    @property
    def sentence(self) -> str:
        """What a tired engineer reads."""
        lines = [self.result.sentence]
        lines += [f"before any number: {found}" for found in self.findings]
        lines += [f"note: {note}" for note in self.notes]
        if self.conversion is not None:
            lines += [f"weights copied as they are: {said}" for said in self.conversion.unsure]
        lines += [f"unsure: {pair.candidate} as {pair.baseline}: {pair.unsure}" for pair in self.proposal.unsure]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.sentence


def align(
    baseline: Any,
    candidate: Any,
    batch: Any,
    *,
    loss: Loss | tuple[Loss, Loss] | None = None,
    optimizers: tuple[Any, Any] | None = None,
    steps: int = 1,
    convert: bool = True,
    mapping: str | Path | None = None,
    detail: str = "tensor",
    output: str | Path | None = None,
) -> Alignment:
    """Run forward, backward and some optimizer steps of two models on the same batch, and name the first layer that differs.

    The candidate gets the baseline's weights first, and both are trained: pass copies where that matters. Dropout is turned off
    meanwhile, for no two frameworks draw the same masks. Where optimizers are given one forward more is run, to read what they
    wrote.

    Args:
        baseline: the trusted model, a ``torch.nn.Module``, a ``paddle.nn.Layer`` or a Keras model, in the mode (train or eval)
            to be compared; Keras is told the mode by ``training=`` in the loss.
        candidate: the model under suspicion, of the other framework or of the same.
        batch: NumPy arrays: one, or a sequence or mapping of them, given to both models as tensors; what a Keras model takes with
            its channels last, its loss transposes.
        loss: ``loss(model, *batch)``, or a pair of them; without it the models take the whole batch and the mean of the squares
            of the first tensor that they return is differentiated.
        optimizers: one for each model; without them only gradients are compared.
        steps: forwards and backwards, at least 1.
        convert: whether to write the baseline's weights into the candidate.
        mapping: which module is which; without it as `trueup.map_models` proposes.
        detail: of both captures; ``stats`` compares tensors that lie in another order by less.
        output: directory for the captures, ``map.toml`` and the report; a new temporary one by default.

    Raises:
        TrueupError: a model is of no known framework, weights cannot be converted, or a capture cannot be written.
    """
    import tempfile

    from trueup.recording.adapters.models import adapter_of

    if steps < 1:
        raise TrueupError(f"align runs at least 1 step, not {steps}")
    into = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="trueup-align-"))
    told, findings, proposal, done = _paired((baseline, candidate), optimizers, mapping, into, convert=convert)
    losses = loss if isinstance(loss, tuple) else (loss, loss)
    notes: list[str] = []
    for n, (name, model) in enumerate((("baseline", baseline), ("candidate", candidate))):
        optimizer = None if optimizers is None else optimizers[n]
        with adapter_of(model).without_dropout(model) as off:
            if off:
                notes.append(f"dropout of {off} layers of the {name} was off: frameworks draw other masks")
            _train(model, into / name, batch, losses[n], optimizer, steps, detail)

    result = compare(into / "baseline", into / "candidate", mapping=told)
    result.save(into / "report")
    return Alignment(result, tuple(findings), proposal, done, tuple(notes), into)


def _paired(
    models: tuple[Any, Any], optimizers: tuple[Any, Any] | None, mapping: str | Path | None, into: Path, *, convert: bool
) -> tuple[Path, list[Difference], Proposal, Conversion | None]:
    """Return the map file of two models, settings that differ, the proposal, and what became of the weights."""
    # Here: a comparison of captures needs nothing of what pairs models.
    from trueup.analysis.pairing.models import compare_optimizers, compare_settings, convert_weights
    from trueup.analysis.pairing.proposing import propose, write_map
    from trueup.recording.adapters.models import facts_of, tree_of

    trees = tree_of(models[0]), tree_of(models[1])
    proposal = propose(*trees)
    told = Path(mapping) if mapping is not None else write_map(proposal, into / "map.toml")
    findings = compare_settings(*trees, proposal.pairs)
    findings += compare_optimizers(*(facts_of(one) for one in optimizers)) if optimizers is not None else []
    done = convert_weights(*models, mapping=told if mapping is not None else proposal) if convert else None
    return told, findings, proposal, done


def _train(model: Any, into: Path, batch: Any, loss: Loss | None, optimizer: Any, steps: int, detail: str) -> None:
    from trueup.doors.training import capture
    from trueup.recording.adapters.models import adapter_of

    adapter = adapter_of(model)
    given = [adapter.tensor(array) for array in _arrays(batch)]
    names = list(batch) if isinstance(batch, Mapping) else None
    with capture(into, model=model, level=("module", "api"), detail=detail) as running:
        for _ in range(steps):
            adapter.step(model, lambda: _loss(adapter, model, given, names, loss), optimizer)
            running.step()
        if optimizer is not None:
            with adapter.no_gradients():
                _loss(adapter, model, given, names, loss)
            running.step()


def _loss(adapter: Any, model: Any, given: list[Any], names: list[str] | None, loss: Loss | None) -> Any:
    if loss is not None:
        return loss(model, *given)
    result = model(**dict(zip(names, given, strict=True))) if names is not None else model(*given)
    first = next(_tensors(adapter, result), None)
    if first is None:
        raise TrueupError(f"{type(model).__name__} returns no tensor of floating point: pass loss=(baseline's, candidate's)")
    return adapter.mean_square(first)


def _arrays(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _tensors(adapter: Any, value: Any) -> Iterator[Any]:
    if adapter.is_floating(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(adapter, one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(adapter, one)
