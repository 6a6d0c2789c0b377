"""What a map file says of slots: other names, other layouts; of two runs of one framework."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trueup
from trueup.foundation.frameworks.mapping import load
from trueup.foundation.model import TrueupError

LAYOUT = """
[[slot]]
scope = "conv"
op = "Pool"
slot = "(input|output)\\\\.0"
permute = [0, 3, 1, 2]
"""


class Pool(torch.nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.scale = last, torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1 if self.last else 2) * self.scale


class Net(torch.nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.conv = Pool(last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).sum()


def recorded(path: Path, last: bool, factor: float, detail: str) -> Path:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5)
    model = Net(last)
    with trueup.capture(path, model=model.conv, level="module", detail=detail), torch.no_grad():
        model.conv((x.permute(0, 2, 3, 1).contiguous() if last else x) * factor)
    return path


@pytest.mark.parametrize("detail", ["tensor", "stats"])
def test_a_tensor_in_another_layout(tmp_path: Path, detail: str) -> None:
    (tmp_path / "map.toml").write_text(LAYOUT.replace('"conv"', '""'))
    base = recorded(tmp_path / "a", last=False, factor=1.0, detail=detail)
    same = recorded(tmp_path / "b", last=True, factor=1.0, detail=detail)
    other = recorded(tmp_path / "c", last=True, factor=1.5, detail=detail)
    found = trueup.compare(base, same, mapping=tmp_path / "map.toml")
    assert found.verdict == "aligned", found.sentence
    assert any("lie in another order" in note for note in found.notes) == (detail == "stats")
    assert trueup.compare(base, other, mapping=tmp_path / "map.toml").verdict == "deviates"
    assert trueup.compare(base, same).verdict != "aligned"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[slot]]\nslot = 'input.0'", "says nothing of 'input.0'"),
        ("[[slot]]\nslot = 'input.0'\npermute = [0, 2]", "is no order of axes"),
        ("[[slot]]\npermute = [0, 1]", "slot is missing"),
        ("layer = [{ candidate = 'a', baseline = 'b', kind = 'Lineal' }]", "kind 'Lineal' is unknown"),
        ("layer = [{ candidate = 'a', baseline = 'b' }, { candidate = 'a', baseline = 'c' }]", "is two layers"),
        ("made = { baseline = 3 }", "made: expected a text, got a whole number"),
    ],
)
def test_what_is_no_map(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(TrueupError, match=said):
        load(tmp_path / "map.toml")
