"""What changes the weights, found in captures that hold neither their gradients nor the optimizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trueup
from trueup.comparison.normalise.optimizer_steps import Update, _nearest
from trueup.foundation.model import Result

LAYERS = 3


def training(
    directory: Path, *, optimizer: str = "SGD", clip: float = 0.0, gradient: float = 1.0, noise: float = 0.0, flipped: int = 0,
    level: Any = "module", steps: int = 3, dtype: str = "float32", **options: Any,
) -> Path:  # fmt: skip
    """Train a small network; ``gradient`` multiplies that of one weight, ``flipped`` elements of a bias' have another sign.

    ``noise`` changes all activations by so much.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [module for n in range(LAYERS) for module in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    kind = getattr(torch, dtype)
    model = torch.nn.Sequential(*layers).to(kind)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), **({"lr": 0.01} | options))
    if noise:
        generator = torch.Generator().manual_seed(5)
        for layer in layers[1::2]:
            layer.register_forward_hook(lambda _m, _a, out: out * (1 + noise * torch.randn(out.shape, generator=generator)))
    with trueup.capture(directory, model=model, level=level):
        for _ in range(steps):
            chosen.zero_grad()
            (model(torch.randn(32, 16).to(kind)) - torch.randn(32, 16).to(kind)).square().mean().backward()
            if gradient != 1:
                layers[2].weight.grad.mul_(gradient)
            layers[2].bias.grad[:flipped].neg_()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            chosen.step()
    return directory


def compared(tmp_path: Path, optimizer: str, **candidate: Any) -> Result:
    baseline = training(tmp_path / "baseline", optimizer=optimizer)
    return trueup.compare(baseline, training(tmp_path / "candidate", optimizer=optimizer, **candidate))


@pytest.mark.parametrize(("optimizer", "options", "scope", "said"), [
    ("SGD", {"lr": 0.0101}, "0", "all 6 weights were moved 1.01 times as far, the same way: another learning rate, or"),
    ("AdamW", {"lr": 0.02}, "0", "all 6 weights were moved 2.00 times as far, the same way: another learning rate"),
    ("SGD", {"clip": 0.05}, "0", "times as far, the same way: another learning rate, or gradients clipped or scaled"),
    ("SGD", {"gradient": 1.05}, "2", "1 of 6 weights were updated differently, the rest alike: their gradients"),
    ("AdamW", {"weight_decay": 0.5}, "0", "all 6 weights were updated differently: the optimizer, its settings, or"),
])  # fmt: skip
def test_what_moved_the_weights_otherwise_is_said(
    tmp_path: Path, optimizer: str, options: dict[str, float], scope: str, said: str
) -> None:
    result = compared(tmp_path, optimizer, **options)
    assert result.verdict == "deviates"
    assert (result.culprit.kind, result.culprit.scope, result.culprit.step) == ("input", scope, 1)
    assert said in result.sentence
    assert "record levels api or aten with all phases to see which" in result.sentence
    assert len(result.culprits) == 1  # from there on the weights differ in every step


def test_what_an_alignment_does_not_show_is_said(tmp_path: Path) -> None:
    result = compared(tmp_path, "SGD")
    assert result.verdict == "aligned"
    assert "the optimizer was not compared, nor the gradients of weights" in result.notes[0]
    sides = [training(tmp_path / name, level=["module", "api", "aten"]) for name in ("one", "other")]
    assert not trueup.compare(*sides).notes


@pytest.mark.parametrize("times", [0.5, 2])
def test_steps_of_another_length_show_where_each_is_less_than_a_unit(tmp_path: Path, times: float) -> None:
    """Most steps are lost in the rounding of a bfloat16 weight, and no weight by itself tells what the others are."""
    sides = [training(tmp_path / str(lr), dtype="bfloat16", lr=lr) for lr in (0.05, 0.05 * times)]
    result = trueup.compare(*sides)
    assert (result.verdict, result.culprits) == ("inconclusive", [])
    assert "what moved the weights since the step before was not compared" in result.notes[0]
    again = training(tmp_path / "again", dtype="bfloat16", lr=0.05)
    assert trueup.compare(sides[0], again).verdict == "aligned"


def test_rounding_of_an_optimizer_is_no_other_update(tmp_path: Path) -> None:
    """Adam makes steps of full length of gradients that are nothing but rounding."""
    result = compared(tmp_path, "AdamW", noise=1e-7)
    assert result.verdict == "aligned", result.sentence


def test_another_learning_rate_shows_through_rounding(tmp_path: Path) -> None:
    result = compared(tmp_path, "AdamW", noise=1e-7, lr=0.011)
    assert result.verdict == "deviates"
    assert "weights were moved 1.10 times as far, the same way" in result.sentence


@pytest.mark.parametrize(("dtype", "betas"), [("float32", (0.9, 0.99)), ("bfloat16", (0.0, 0.999))])
def test_another_formula_moves_most_weights_otherwise(dtype: str, betas: tuple[float, float], tmp_path: Path) -> None:
    """Signs of gradients that are next to nothing make the update of few weights another one."""
    noise = 1e-7 if dtype == "float32" else 0.0
    runs = [
        training(tmp_path / str(b), optimizer="AdamW", noise=n, dtype=dtype, lr=1e-3, betas=b)
        for n, b in ((0.0, (0.9, 0.999)), (noise, betas))
    ]
    assert trueup.compare(*runs).verdict != "aligned"
    sound = training(tmp_path / "sound", optimizer="AdamW", noise=noise, dtype=dtype, lr=1e-3)
    assert trueup.compare(runs[0], sound).verdict == "aligned"


def test_a_capture_of_fewer_levels_compares_at_those(tmp_path: Path) -> None:
    """The loss is a row of level api in every capture, and is none of the levels that were asked for."""
    first, second = training(tmp_path / "aten", level="aten"), training(tmp_path / "both", level=["api", "aten"])
    for sides in ((first, second), (second, first)):
        result = trueup.compare(*sides)
        assert result.verdict == "aligned", result.sentence
        assert result.notes == ["only one capture holds level api; compared at aten"]
        assert result.baseline.losses == result.candidate.losses != ()


def test_full_captures_compared_at_level_module(tmp_path: Path) -> None:
    """Their weights have producers, calls that are not compared; where rounding may be the reason it is said what tells."""
    options: dict[str, Any] = {"optimizer": "AdamW", "level": ["module", "api"]}
    baseline = training(tmp_path / "baseline", **options)
    wrong = trueup.compare(baseline, training(tmp_path / "rate", lr=0.02, **options), level="module")
    assert wrong.culprit is not None
    assert "all 6 weights were moved 2.00 times as far" in wrong.sentence
    noisy = trueup.compare(baseline, training(tmp_path / "noise", noise=6e-5, flipped=1, **options), level="module")
    assert (noisy.verdict, noisy.culprits) == ("inconclusive", [])
    assert "param.bias of rank 0 step 1 forward module 2/Linear#0 differs" in noisy.sentence
    assert "it could be rounding" in noisy.sentence
    assert noisy.sentence.endswith("too, which both captures hold, where gradients and the optimizer show which")


def test_lists_of_weights_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call updates all weights: what is asked of its slots grows with their number, and not with its square."""
    from trueup.comparison.graph.streams import Stream

    listed = 0
    slots = Stream.slots

    def counted(stream: Stream, call: int) -> dict[int, int]:
        nonlocal listed
        found = slots(stream, call)
        listed += len(found)
        return found

    monkeypatch.setattr(Stream, "slots", counted)
    counts = []
    for layers in (5, 20):
        monkeypatch.setitem(globals(), "LAYERS", layers)
        runs = [
            training(tmp_path / f"{foreach} {layers}", optimizer="AdamW", level=["module", "api", "aten"], steps=1, foreach=foreach)
            for foreach in (True, False)
        ]
        before = listed
        assert trueup.compare(*runs).verdict == "aligned"
        counts.append(listed - before)
    assert 0 < counts[1] < 6 * counts[0]


def scored(directory: Path, **options: Any) -> Path:
    """Train a layer of one output, and numbers of no and of one dimension beside it, with Adam."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    scale, shift = torch.nn.Parameter(torch.tensor(0.5)), torch.nn.Parameter(torch.tensor([0.1]))
    optimizer = torch.optim.Adam([*model.parameters(), scale, shift], lr=1e-2, **options)
    with trueup.capture(directory, model=model):
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)) * scale.exp() + shift - 1).square().mean().backward()
            optimizer.step()
    return directory


@pytest.mark.parametrize(("options", "verdict"), [
    ({"fused": True}, "aligned"), ({"foreach": True}, "aligned"), ({"fused": True, "betas": (0.9, 0.9)}, "deviates"),
])  # fmt: skip
@pytest.mark.parametrize("level", [None, ["module", "api"]])
def test_a_weight_of_one_element_is_no_counter(options: dict[str, Any], verdict: str, level: Any, tmp_path: Path) -> None:
    """The moments of a value head's bias are as small as the number of steps, which a fused kernel is given beside them."""
    runs = scored(tmp_path / "loop", foreach=False), scored(tmp_path / "other", **options)
    result = trueup.compare(*runs, level=level)
    assert result.verdict == verdict, str(result)
    if verdict == "aligned":
        matched = set(result.matched["op"].to_pylist())
        assert options == {"foreach": True} or "optimizer.step" in matched


def test_states_are_paired_whatever_their_number() -> None:
    """Those of twelve in all orders would be a thousand million."""
    numbers = np.random.default_rng(0)
    sketches, order = numbers.normal(size=(12, 64)), numbers.permutation(12)
    streams: Any = [SimpleNamespace(sketch=its, l2=np.ones(12)) for its in (sketches, sketches[order] + 1e-6)]
    sides = [Update(0, 0, states=[(k, k) for k in range(12)]) for _ in streams]
    assert [k for k, _ in _nearest(sides[0], sides[1], streams)] == np.argsort(order).tolist()
