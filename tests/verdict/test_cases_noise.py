"""Faults under noise, a part of what `make bench-noise` prints: products in HF32 and sums in another order on the candidate too.

Held whatever else is: nothing that only noise has changed is named with more confidence than *could be rounding*.
"""

from __future__ import annotations

import pytest
import torch

import locate
import locate_noise
from locate_noise import Pair, Sound
from trueup import simdev

FAULTS: dict[str, list[str]] = {
    "bert": ["layer-norm-epsilon"],
    "lstm_tagger": ["lstm-backward-cell-gate", "cross-entropy-ignore-index"],
}
"""Such as are found, such as are not, forward, backward and loss; the quick models."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Pair | Sound]:
    torch.set_num_threads(1)
    simdev.install()
    work = tmp_path_factory.mktemp("noise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "STEPS", 1)  # these faults show in the first; the table has three
        return [one for model, faults in FAULTS.items() for one in locate_noise.table([model], faults, work)]


def test_noise_is_never_named_with_certainty(found: list[Pair | Sound]) -> None:
    assert locate_noise.strangers(found) == []
    assert {one.verdict for one in found if isinstance(one, Sound)} == {"aligned"}


def test_the_faults_stand_out_of_the_noise(found: list[Pair | Sound]) -> None:
    """Else there would be nothing to find."""
    counted = [one for one in found if isinstance(one, Pair) and one.word != "uncounted"]
    assert len(counted) >= 5
    assert all(one.local >= locate_noise.ABOVE * one.noise for one in counted)


def test_no_fault_is_blamed_on_another_call(found: list[Pair | Sound]) -> None:
    assert [locate_noise.line(one) for one in found if isinstance(one, Pair) and one.word == "wrong"] == []


@pytest.mark.parametrize("level", ["aten", "api"])
def test_enough_faults_are_found(level: str, found: list[Pair | Sound]) -> None:
    right, counted = locate_noise.shares(found)[level]
    missed = [locate_noise.line(one) for one in found if isinstance(one, Pair) and one.level == level and one.word == "missed"]
    assert right >= locate_noise.TARGET * counted, missed
