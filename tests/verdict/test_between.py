"""At level module alone: who is blamed for arithmetic that no module of its own does, and for what HF32 may not explain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import trueup
from trueup import simdev
from trueup.foundation.model import Result

torch = pytest.importorskip("torch")
nn = torch.nn


class Attention(nn.Module):  # type: ignore[misc]
    """One head: the product of query and key, the softmax and the product with the values are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        return self.out(weights @ self.value(x))


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(24), Attention(), nn.LayerNorm(24)

    def forward(self, x: Any) -> Any:
        return self.last(x + self.attention(self.norm(x)))


class Network(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(24, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(x))


def convolutions() -> Any:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(144, 3))


class Packed(nn.Module):  # type: ignore[misc]
    """A bias that begins at zero, with many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(24, 400), nn.Linear(400, 3)
        nn.init.zeros_(self.wide.bias)

    def forward(self, x: Any) -> Any:
        return self.head(self.wide(x))


def train(
    into: Path, make: Callable[[], Any], device: str, *, noise: tuple[str, ...] = (), fault: str = "", flipped: int = 0,
    of: str = "", level: tuple[str, ...] = ("module",),
) -> Path:  # fmt: skip
    """Train three steps; ``flipped`` elements of a bias' gradient get the other sign, ``of`` that part of an attention."""
    simdev.install()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        for name in noise:
            stack.enter_context(simdev.noise(name))
        if fault:
            stack.enter_context(simdev.inject(fault))
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        shape = (8, 1, 6, 6) if make is convolutions else (8, 5, 24)
        with trueup.capture(into, model=model, level=level):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(shape).to(device)).square().mean().backward()
                if flipped:
                    bias = model.wide.bias if make is Packed else model.get_parameter(f"blocks.0.attention.{of}.bias")
                    bias.grad[:flipped].neg_()
                optimizer.step()
    return into


def compared(folder: Path, make: Callable[[], Any], **candidate: Any) -> Result:
    return trueup.compare(train(folder / "cpu", make, "cpu"), train(folder / "npu", make, "npu", **candidate))


@pytest.mark.parametrize(("fault", "scope", "op", "phase"), [
    ("matmul", "blocks.0.attention", "Attention", "forward"),
    ("softmax-backward", "blocks.1.attention", "Attention", "backward"),
    ("stale-buffer-reuse", "blocks.1", "Block", "forward"),
])  # fmt: skip
def test_a_module_is_blamed_for_what_it_does_between_its_modules(
    fault: str, scope: str, op: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong softmax or residual addition comes in at a module that only passes it on."""
    if fault == "matmul":
        baseline, softmax = train(tmp_path / "cpu", Network, "cpu"), torch.softmax
        monkeypatch.setattr(torch, "softmax", lambda x, dim: softmax(x * 1.5, dim))
        result = trueup.compare(baseline, train(tmp_path / "npu", Network, "npu"))
    else:
        result = compared(tmp_path, Network, fault=fault, noise=("reordered-reductions",))
    assert result.verdict == "deviates", result.sentence
    first = result.culprit
    assert first is not None
    assert (first.scope, first.op, first.phase, first.step, first.kind) == (scope, op, phase, 0, "operator")
    assert first.error_in < 1e-5 < first.error_out


@pytest.mark.parametrize("noise", [(), ("reordered-reductions",), ("hf32-matmul", "reordered-reductions")])
def test_noise_between_modules_blames_none(noise: tuple[str, ...], tmp_path: Path) -> None:
    result = compared(tmp_path, Network, noise=noise)
    assert result.verdict != "deviates", result.sentence


def test_hf32_explains_nothing_where_there_is_one_product_or_none(tmp_path: Path) -> None:
    """A padding that is wrong by a third is more than rounded operands make, though a module may hold hundreds of products."""
    noise = ("hf32-matmul",)
    assert compared(tmp_path / "sound", convolutions, noise=noise).verdict != "deviates"
    result = compared(tmp_path / "broken", convolutions, noise=noise, fault="conv-padding-replicates-edge")
    assert result.culprit is not None, result.sentence
    assert (result.culprit.scope, result.culprit.op, result.culprit.phase) == ("0", "Conv2d", "forward")


def test_a_bias_that_began_at_zero_is_judged_by_its_update(tmp_path: Path) -> None:
    """One of 400 gradients with another sign, as where a gradient is nothing but rounding, moves the bias by a tenth."""
    result = compared(tmp_path, Packed, noise=("hf32-matmul",), flipped=1)
    assert result.verdict == "aligned", result.sentence


@pytest.mark.parametrize(("of", "word"), [("key", "aligned"), ("value", "deviates")])
def test_a_bias_that_changes_no_result_is_no_difference(of: str, word: str, tmp_path: Path) -> None:
    """A softmax forgets what its logits share: the gradient of its keys' bias is rounding, and Adam makes as much of it."""
    result = compared(tmp_path, Network, noise=("reordered-reductions",), flipped=24, of=of)
    assert result.verdict == word, result.sentence


def test_after_what_came_in_unseen_a_call_with_other_inputs_is_not_certain(tmp_path: Path) -> None:
    """Where HF32 leaves the module around it in doubt, whatever amplifies the difference later is not blamed in its place."""
    result = compared(tmp_path, Network, noise=("hf32-matmul",), fault="softmax-backward")
    assert result.culprit is None or result.culprit.error_in < 1e-2, result.sentence


class Between(nn.Module):  # type: ignore[misc]
    """Two layers in bfloat16, before which something is done to the batch that no module does."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change, self.layers = change, nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 3)).to(torch.bfloat16)

    def forward(self, x: Any) -> Any:
        return self.layers(self.change(x))


@pytest.mark.parametrize(("change", "verdict"), [(lambda x: x / 3 * 3, "aligned"), (lambda x: x * 1.01, "inconclusive")])
def test_of_what_rounding_makes_unseen_little_is_alike_in_all_elements(
    change: Callable[[Any], Any], verdict: str, tmp_path: Path
) -> None:
    sides = [tmp_path / "baseline", tmp_path / "candidate"]
    for side, made in zip(sides, (lambda x: x, change), strict=True):
        torch.manual_seed(0)
        model = Between(made)
        with trueup.capture(side, model=model, level=("module",)):
            model(torch.randn(32, 24).to(torch.bfloat16)).sum().backward()
    assert trueup.compare(*sides).verdict == verdict


class Rounding(nn.Linear):  # type: ignore[misc]
    """Each element is off by ``units`` of bfloat16, up or down, as on another processor."""

    units = 0

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y.float() * (1 + self.units * 2**-9 * torch.where(torch.arange(y.shape[-1]) % 2 == 0, 1, -1))


class Middle(nn.Module):  # type: ignore[misc]
    """Two layers, between which something is done that no module does."""

    def __init__(self, units: int, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.change, self.last = Rounding(24, 24), change, nn.Linear(24, 3)
        self.first.units = units

    def forward(self, x: Any) -> Any:
        return self.last(self.change(self.first(x)))


@pytest.mark.parametrize(("change", "verdict"), [(lambda y: y, "aligned"), (lambda y: y + 0.15 * y.roll(1, 0), "deviates")])
def test_what_is_done_between_two_modules_is_not_excused_by_how_the_first_rounds(
    change: Callable[[Any], Any], verdict: str, tmp_path: Path
) -> None:
    sides = [tmp_path / "baseline", tmp_path / "candidate"]
    for side, units, made in zip(sides, (0, 2), (lambda y: y, change), strict=True):
        torch.manual_seed(0)
        model = Middle(units, made)
        with trueup.capture(side, model=model, level=("module",)), torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(256, 24)).float().square().mean().backward()
    assert trueup.compare(*sides).verdict == verdict
