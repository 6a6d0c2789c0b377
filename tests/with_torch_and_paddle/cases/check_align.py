"""Five pairs of models align within the noise of float32, and differences that a port plants are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import framework_pairs as pairs
import trueup

STEPS = {"resnet18": 1}


@pytest.mark.parametrize("name", pairs.PAIRS)
def test_a_faithful_port_is_aligned(name: str, tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS[name]("")
    optimizers = pairs.optimizers(twins)
    steps = STEPS.get(name, 2)
    both = twins.torch, twins.paddle
    found = trueup.align(*both, twins.batch, loss=twins.losses, optimizers=optimizers, steps=steps, output=tmp_path)
    assert found.verdict == "aligned", found.sentence
    assert not found.findings
    assert not found.proposal.unsure
    assert not found.proposal.only_baseline
    assert found.conversion is not None
    assert found.conversion.is_whole
    assert found.result.counts["compared"] > 20
    assert any("optimizer.step" in call["op"] for call in found.result.calls.select(["op"]).to_pylist())
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize("difference", pairs.DIFFERENCES)
def test_a_difference_of_the_port_is_named(difference: str, tmp_path: Path) -> None:
    name, layer, setting = pairs.DIFFERENCES[difference]
    pairs.seeded()
    twins = pairs.PAIRS[name](difference)
    optimizers = pairs.optimizers(twins, difference)
    found = trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, optimizers=optimizers, output=tmp_path)
    assert found.verdict == "deviates", found.sentence
    culprit = found.result.culprit
    assert culprit is not None
    if layer == "optimizer":
        assert culprit.phase == "optimizer"
        assert culprit.step == 0
    else:
        assert (culprit.scope, culprit.phase, culprit.step) == (layer, "forward", 0) or culprit.scope in found.proposal.modules
        assert found.proposal.modules.get(culprit.scope, culprit.scope) == layer
    said = [str(one) for one in found.findings]
    if difference != "kind of a gelu":  # a function of the module's code is no setting: the call's argument says it
        assert any(setting in one for one in said), said
    else:
        assert setting in culprit.sentence


def test_statistics_alone_tell_what_no_order_changes(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    both, optimizers = (twins.torch, twins.paddle), pairs.optimizers(twins)
    found = trueup.align(*both, twins.batch, loss=twins.losses, optimizers=optimizers, detail="stats", output=tmp_path)
    assert found.verdict == "aligned", found.sentence
    assert any("lie in another order" in note and "--detail tensor" in note for note in found.result.notes)


def test_arguments_that_a_call_leaves_out_are_its_defaults(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["transformer"]("kind of a gelu")
    found = trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, detail="stats", output=tmp_path / "a")
    assert 'approximate differs: "none" in the baseline, "tanh" in the candidate' in found.sentence
    twins = pairs.PAIRS["transformer"]("")
    found = trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, detail="stats", output=tmp_path / "b")
    assert found.result.culprit is None
    assert not any("differs" in note for note in found.result.notes), found.result.notes
    assert found.verdict == "inconclusive"  # gradients of packed projections have no counterpart, and no optimizer shows them
    assert any("weights were not compared" in note for note in found.result.notes), found.result.notes


def test_another_weight_is_found_by_statistics(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    trueup.convert_weights(twins.torch, twins.paddle)
    weight = twins.paddle.classifier.weight.numpy()
    weight[0] *= 1.5
    twins.paddle.classifier.weight.set_value(weight)
    found = trueup.align(
        twins.torch, twins.paddle, twins.batch, loss=twins.losses, convert=False, detail="stats", output=tmp_path
    )
    assert found.verdict == "deviates"
    assert found.result.culprit is not None
    assert found.result.culprit.kind == "input"
    assert found.result.culprit.scope == "classifier"


def test_what_the_last_optimizer_wrote_is_not_taken_for_compared(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    trueup.convert_weights(twins.torch, twins.paddle)
    for name, model, optimizer, n in zip(("a", "b"), (twins.torch, twins.paddle), pairs.optimizers(twins), (0, 1), strict=True):
        from trueup.recording.adapters.models import adapter_of

        given = [adapter_of(model).tensor(one) for one in twins.batch]
        with trueup.capture(tmp_path / name, model=model, level=["module", "api"]) as running:
            twins.losses[n](model, *given).backward()
            optimizer.step()
            running.step()
    result = trueup.compare(tmp_path / "a", tmp_path / "b", mapping=_map(twins, tmp_path))
    assert result.verdict == "inconclusive"
    assert "record one forward more" in result.sentence


def test_the_other_way_round(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["unet"]("")
    found = trueup.align(twins.paddle, twins.torch, twins.batch, loss=twins.losses[::-1], steps=1, output=tmp_path)
    assert found.verdict == "aligned", found.sentence


def _map(twins: pairs.Twins, into: Path) -> Path:
    from trueup.analysis.pairing.proposing import write_map

    return write_map(trueup.map_models(twins.torch, twins.paddle), into / "map.toml")


def test_default_loss_and_no_optimizer(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["unet"]("")
    found = trueup.align(twins.torch, twins.paddle, np.array(twins.batch[0]), output=tmp_path)
    assert found.verdict == "aligned", found.sentence
