"""``trueup map``, ``trueup compare --map`` and ``trueup convert-weights`` over captures and files of two frameworks."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import framework_pairs as pairs
import trueup
from end_to_end.executing import lines_of
from test_documentation import ROOT
from trueup.analysis.pairing.proposing import read_state
from trueup.doors.cli.app import run


def test_from_captures_to_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands of docs/frameworks.md, but for the two trainings: what they record is recorded here."""
    mapped, compared, *converted = [shlex.split(line) for line in lines_of(ROOT / "docs/frameworks.md") if "capture -o" not in line]
    monkeypatch.chdir(tmp_path)
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    optimizers = pairs.optimizers(twins)
    trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, optimizers=optimizers, output="runs")
    for name, side in (("torch", "baseline"), ("paddle", "candidate")):
        Path("runs", side).rename(f"runs/{name}")
    file = Path("map.toml")
    assert run(mapped) == 0
    assert "3 layers paired" in capsys.readouterr().out
    assert '{ baseline = "lstm", candidate = "encoder", kind = "LSTM" }' in file.read_text()
    assert run(compared) == 0

    torch.save(twins.torch.state_dict(), "model.pt")
    out = Path("model.safetensors")
    assert run(converted[0]) == 0
    found = read_state(out)
    expected = twins.torch.state_dict()
    np.testing.assert_array_equal(found["classifier.weight"], expected["out.weight"].numpy().T)
    np.testing.assert_array_equal(found["encoder.weight_hh_l1_reverse"], expected["lstm.weight_hh_l1_reverse"].numpy())

    paddle.save(twins.paddle.state_dict(), "model.pdparams")
    out.unlink()
    assert run(converted[1]) == 0
    twins.torch.load_state_dict({name: torch.from_numpy(one) for name, one in read_state(out).items()})
    np.testing.assert_array_equal(twins.torch.out.weight.detach().numpy(), twins.paddle.classifier.weight.numpy().T)


def test_without_a_map_other_names_are_found_by_what_runs(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    found = trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, output=tmp_path)
    result = trueup.compare(tmp_path / "baseline", tmp_path / "candidate")
    assert found.verdict == "aligned", found.sentence
    assert result.verdict == "aligned", result.sentence
    assert any("scopes have other names" in note for note in result.notes)
