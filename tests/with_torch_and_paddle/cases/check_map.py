"""``trueup map``, ``trueup compare --map`` and ``trueup convert-weights`` over captures and files of two frameworks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
import torch

import framework_pairs as pairs
import trueup
from trueup.analysis.pairing.weights import read_state
from trueup.doors.cli.app import run


def test_from_captures_to_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    optimizers = pairs.optimizers(twins)
    trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, optimizers=optimizers, output=tmp_path / "a")
    file, captures = tmp_path / "map.toml", [str(tmp_path / "a" / name) for name in ("baseline", "candidate")]
    assert run(["map", *captures, "-o", str(file)]) == 0
    assert "3 layers paired" in capsys.readouterr().out
    assert '{ baseline = "lstm", candidate = "encoder", kind = "LSTM" }' in file.read_text()
    assert run(["compare", *captures, "--map", str(file)]) == 0

    torch.save(twins.torch.state_dict(), tmp_path / "w.pt")
    out = tmp_path / "w.safetensors"
    assert run(["convert-weights", str(tmp_path / "w.pt"), str(out), "--map", str(file), "--to", "paddle"]) == 0
    found = read_state(out)
    expected = twins.torch.state_dict()
    np.testing.assert_array_equal(found["classifier.weight"], expected["out.weight"].numpy().T)
    np.testing.assert_array_equal(found["encoder.weight_hh_l1_reverse"], expected["lstm.weight_hh_l1_reverse"].numpy())

    paddle.save(twins.paddle.state_dict(), str(tmp_path / "w.pdparams"))
    back = tmp_path / "back.npz"
    assert run(["convert-weights", str(tmp_path / "w.pdparams"), str(back), "--map", str(file), "--to", "torch"]) == 0
    twins.torch.load_state_dict({name: torch.from_numpy(one) for name, one in read_state(back).items()})
    np.testing.assert_array_equal(twins.torch.out.weight.detach().numpy(), twins.paddle.classifier.weight.numpy().T)


def test_without_a_map_other_names_are_found_by_what_runs(tmp_path: Path) -> None:
    pairs.seeded()
    twins = pairs.PAIRS["lstm tagger"]("")
    found = trueup.align(twins.torch, twins.paddle, twins.batch, loss=twins.losses, output=tmp_path)
    result = trueup.compare(tmp_path / "baseline", tmp_path / "candidate")
    assert found.verdict == "aligned", found.sentence
    assert result.verdict == "aligned", result.sentence
    assert any("scopes have other names" in note for note in result.notes)
