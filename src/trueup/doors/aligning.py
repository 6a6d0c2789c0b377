"""`trueup.align`: two models of one design, of two frameworks, trained side by side for a few steps and compared.

>>> found = trueup.align(torch_model, paddle_model, batch, optimizers=(torch_adam, paddle_adam), steps=3)    # doctest: +SKIP
>>> print(found)                                                                                              # doctest: +SKIP
DEVIATES  first culprit: encoder.norm1, forward, step 0, rank 0  (paddle._C_ops.layer_norm)
          ...
before any number: encoder.norm1 (LayerNorm): eps is 1e-05 in torch, 1e-06 in paddle
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trueup.analysis.pairing.models import Difference, compare_optimizers, compare_settings, convert_weights
from trueup.analysis.pairing.proposing import Conversion, Proposal, propose, write_map
from trueup.foundation.model import Result, TrueupError
from trueup.recording.adapters.models import adapter_of, facts_of, tree_of

Loss = Callable[..., Any]  # takes the model and the batch's tensors, returns a scalar tensor


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
    if steps < 1:
        raise TrueupError(f"align runs at least 1 step, not {steps}")
    into = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="trueup-align-"))
    trees = tree_of(baseline), tree_of(candidate)
    proposal = propose(*trees)
    told = Path(mapping) if mapping is not None else write_map(proposal, into / "map.toml")
    findings = compare_settings(*trees, proposal.pairs)
    findings += compare_optimizers(*(facts_of(one) for one in optimizers)) if optimizers is not None else []
    done = convert_weights(baseline, candidate, mapping=told if mapping is not None else proposal) if convert else None
    losses = loss if isinstance(loss, tuple) else (loss, loss)
    notes: list[str] = []
    for n, (name, model) in enumerate((("baseline", baseline), ("candidate", candidate))):
        optimizer = None if optimizers is None else optimizers[n]
        with adapter_of(model).without_dropout(model) as off:
            if off:
                notes.append(f"dropout of {off} layers of the {name} was off: frameworks draw other masks")
            _train(model, into / name, batch, losses[n], optimizer, steps, detail)
    from trueup.doors.comparing import compare

    result = compare(into / "baseline", into / "candidate", mapping=told)
    result.save(into / "report")
    return Alignment(result, tuple(findings), proposal, done, tuple(notes), into)


def _train(model: Any, into: Path, batch: Any, loss: Loss | None, optimizer: Any, steps: int, detail: str) -> None:
    from trueup.doors.training import capture

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
