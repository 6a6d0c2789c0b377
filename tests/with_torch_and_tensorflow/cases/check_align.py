"""Three models align with their ports to Keras within the noise of float32, and differences that a port plants are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import keras_pairs as pairs
import trueup
from trueup.analysis.pairing.models import compare_optimizers
from trueup.doors.cli.app import run
from trueup.doors.comparing import Alignment
from trueup.recording.adapters.models import facts_of


def aligned(name: str, difference: str, into: Path, *, steps: int = 1, detail: str = "tensor") -> Alignment:
    pairs.seeded()
    twins = pairs.PAIRS[name](difference)
    optimizers = pairs.optimizers(twins, difference)
    return trueup.align(
        twins.torch, twins.port, twins.batch, loss=twins.losses, optimizers=optimizers, steps=steps, detail=detail, output=into
    )


@pytest.mark.parametrize(("name", "steps", "calls"), [("narrow resnet18", 1, 130), ("transformer", 1, 60), ("gru reader", 2, 25)])
def test_a_faithful_port_is_aligned(name: str, steps: int, calls: int, tmp_path: Path) -> None:
    found = aligned(name, "", tmp_path / "a", steps=steps)
    assert found.verdict == "aligned", found.sentence
    assert not [one for one in found.findings if "with momentum Keras keeps" not in one.kind]  # which SGD does not say of itself
    assert not found.proposal.unsure
    assert not found.proposal.only_baseline
    assert found.conversion is not None
    assert found.conversion.is_whole
    assert found.result.counts["compared"] >= calls
    assert any("optimizer.step" in call["op"] for call in found.result.calls.select(["op"]).to_pylist())
    if name == "gru reader":
        captures = [str(tmp_path / "a" / side) for side in ("baseline", "candidate")]
        assert run(["map", *captures, "-o", str(tmp_path / "map.toml")]) == 2  # a Bidirectional holds its weights in cells
        assert '{ baseline = "embed", candidate = "letters", kind = "Embedding" }' in (tmp_path / "map.toml").read_text()


@pytest.mark.parametrize(
    ("difference", "detail"),
    [("epsilon of a norm", "stats"), ("momentum of a batch norm", "tensor"), ("nesterov momentum", "stats")],
)  # fmt: skip
def test_a_difference_of_the_port_is_named(difference: str, detail: str, tmp_path: Path) -> None:
    name, layer, setting = pairs.DIFFERENCES[difference]
    found = aligned(name, difference, tmp_path, detail=detail)
    assert found.verdict == "deviates", found.sentence
    culprit = found.result.culprit
    assert culprit is not None
    if layer == "optimizer":
        assert (culprit.phase, culprit.step) == ("optimizer", 0)
    else:
        assert (found.proposal.modules.get(culprit.scope), culprit.phase, culprit.step) == (layer, "forward", 0)
    assert any(setting in str(one) for one in found.findings), found.findings


def test_what_optimizers_do_in_other_ways_is_said() -> None:
    import keras
    import torch

    weights = [torch.nn.Parameter(torch.zeros(2))]
    facts = facts_of(torch.optim.Adam(weights)), facts_of(keras.optimizers.Adam(clipnorm=1.0))
    said = "\n".join(map(str, compare_optimizers(*facts)))
    assert "eps is 1e-08 in torch, 1e-07 in tensorflow" in said
    assert "epsilon before it corrects the bias" in said
    assert "clipnorm of each gradient at 1.0 in tensorflow" in said
    assert "lr is" not in said
    scheduled = facts_of(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
    assert (scheduled.schedule, scheduled.settings["lr"]) == ("CosineDecay", 0.1)
    assert tf.executing_eagerly()
