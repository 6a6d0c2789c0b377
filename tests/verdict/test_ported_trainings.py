"""Small trainings as people port them: averages of the weights, optimizers in another order, packed and transposed tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trueup

DECAY = 0.99


def in_place(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.mul_(decay).add_(weight, alpha=1 - decay)


def of_lists(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    torch._foreach_lerp_(averages, weights, 1 - decay)


def anew(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    averages[:] = [decay * average + (1 - decay) * weight for average, weight in zip(averages, weights, strict=True)]


def copied(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(average * decay + weight * (1 - decay))


def moved_back(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    for average, weight in zip(averages, weights, strict=True):
        average.sub_((1 - decay) * (average - weight))


FORMS: tuple[Callable[[list[Tensor], list[Tensor], float], None], ...] = (in_place, of_lists, anew, copied, moved_back)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., None], float], Path]:
    """Return what trains a small regression, with an output of one element, and an average of its weights; each once."""
    folder = tmp_path_factory.mktemp("averaged")

    def train(form: Callable[..., None], decay: float = DECAY) -> Path:
        into = folder / f"{form.__name__}-{decay}"
        if not into.exists():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
            averages, optimizer = list(copy.deepcopy(model).parameters()), torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
            with trueup.capture(into, model=model) as capture:
                for _ in range(3):
                    optimizer.zero_grad()
                    (model(torch.randn(16, 8)) - 1).square().mean().backward()
                    optimizer.step()
                    with torch.no_grad():
                        form(averages, list(model.parameters()), decay)
                    capture.step()
        return into

    return train


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("baseline", FORMS[:3], ids=lambda form: form.__name__)
def test_an_average_of_the_weights_in_any_form(
    averaged: Callable[[Callable[..., None], float], Path], baseline: Callable[..., None], form: Callable[..., None]
) -> None:
    """Nobody reads what the last step made of it. What is right is aligned, and another decay of the same form is no other form."""
    result = trueup.compare(averaged(baseline, DECAY), averaged(form, DECAY))
    assert result.verdict == "aligned", result.sentence
    result = trueup.compare(averaged(baseline, DECAY), averaged(form, 0.98))
    assert (result.verdict, result.culprit.phase, result.culprit.step) == ("deviates", "optimizer", 0), result.sentence


@pytest.mark.parametrize("steps", [1, 3])
def test_an_average_that_is_computed_and_dropped(steps: int, tmp_path: Path) -> None:
    """`average = ...` in a loop names another tensor, and changes none: nobody reads what it makes, there or in the next step."""

    def train(dropped: bool) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        target, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            (model(x) - target(x)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for average, weight in zip(target.parameters(), model.parameters(), strict=True):
                    made = average * DECAY + weight * (1 - DECAY)
                    if not dropped:
                        average.copy_(made)

    assert pair(tmp_path, train).verdict != "aligned"


def test_another_figure_that_is_logged_is_no_counterpart(tmp_path: Path) -> None:
    def train(other: bool) -> None:
        model = nn.Linear(8, 16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.abs().mean() if other else model.weight.std()

    assert pair(tmp_path, train).verdict != "deviates"


def pair(folder: Path, train: Callable[[bool], None], level: list[str] | None = None) -> trueup.Result:
    for other in (False, True):
        torch.manual_seed(0)
        with trueup.capture(folder / str(other), steps=range(3)):
            train(other)
    return trueup.compare(folder / "False", folder / "True", level=level)


@pytest.mark.parametrize("kernel", ["loop", "foreach", "fused", "momentum"])
def test_the_same_parameters_in_another_order(kernel: str, tmp_path: Path) -> None:
    def train(backwards: bool) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        given = list(model.parameters())[:: -1 if backwards else 1]
        how = {kernel: True} if kernel in ("foreach", "fused") else {"foreach": False}
        optimizer = torch.optim.SGD(given, 0.1, momentum=0.9) if kernel == "momentum" else torch.optim.AdamW(given, 1e-2, **how)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()

    assert pair(tmp_path, train).verdict == "aligned"


@pytest.mark.parametrize("level", [None, ["module", "api"]])
def test_a_transposed_weight_is_no_other_weight(level: list[str] | None, tmp_path: Path) -> None:
    def train(transposed: bool) -> None:
        weight, x = nn.Parameter(torch.randn(3, 3)), torch.ones(2, 3)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            ((x + (weight.t() if transposed else weight)[None][0, 0]) ** 2).sum().backward()
            optimizer.step()

    result = pair(tmp_path, train, level)
    assert result.verdict == "deviates"
    first = result.sentence.splitlines()[0]
    assert first.removeprefix("DEVIATES  only the candidate runs ") in ("aten::t", "torch.Tensor.t"), result.sentence


@pytest.mark.parametrize("level", [None, ["module", "api"]])
def test_two_results_of_one_call_that_change_places(level: list[str] | None, tmp_path: Path) -> None:
    def train(swapped: bool) -> None:
        packed, head = nn.Linear(8, 24), nn.Linear(8, 2)
        for _ in range(2):
            q, k, v = packed(torch.randn(2, 5, 8)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            q, k = (k, q) if swapped else (q, k)
            head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean().backward()

    result = pair(tmp_path, train, level)
    assert result.verdict == "deviates"
    assert "scaled_dot_product_attention reads output." in result.sentence.splitlines()[0]


def test_a_mask_takes_away_what_is_large(tmp_path: Path) -> None:
    """Of the gradients of rare targets one factor leaves what is small: the error lies evenly, and is large beside that."""

    def train(by_hand: bool) -> None:
        layer = nn.Linear(16, 64)
        for _ in range(2):
            x, target = torch.randn(256, 16), (torch.rand(256, 64) < 0.02).float()
            p = torch.sigmoid(layer(x) - 8)
            cross = F.binary_cross_entropy(p, target, reduction="none") if not by_hand else (
                -(target * torch.log(p) + (1 - target) * torch.log(1 - p))
            )  # fmt: skip
            (cross * (1 - (p * target + (1 - p) * (1 - target))) ** 2).sum().backward()

    result = pair(tmp_path, train)
    assert result.verdict == "aligned", result.sentence


def test_the_norm_of_a_sparse_gradient_is_of_no_indices(tmp_path: Path) -> None:
    def train(dense: bool) -> None:
        bag, head = nn.EmbeddingBag(900, 4, sparse=not dense), nn.Linear(4, 2)
        head(bag(torch.randint(800, 900, (5, 3)))).square().mean().backward()

    result = pair(tmp_path, train)
    assert result.verdict != "deviates", result.sentence
    assert all(norm < 10 for run in (result.baseline, result.candidate) for _, norm in run.gradient_norms)


class ByHand:
    """Optimizers as people write them: states that are new tensors each step, in a list."""

    def __init__(self, weights: Iterable[Tensor], kind: str, *, wrong: bool = False) -> None:
        self.weights, self.kind, self.wrong = list(weights), kind, wrong
        self.states = [(torch.zeros_like(one), torch.zeros_like(one)) for one in self.weights]

    def zero_grad(self) -> None:
        for one in self.weights:
            one.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for n, weight in enumerate(self.weights):
            (first, second), gradient = self.states[n], weight.grad
            assert gradient is not None
            if self.kind == "adagrad":
                first = first + (gradient.abs() if self.wrong else gradient * gradient)
                weight.sub_(1e-2 * gradient / (first.sqrt() + 1e-10))
            elif self.kind == "lion":
                weight.sub_(1e-2 * (0.9 * first + 0.1 * gradient).sign())
                first = (0.9 if self.wrong else 0.99) * first + (0.1 if self.wrong else 0.01) * gradient
            else:
                first = 0.9 * first + 0.1 * gradient * gradient
                change = (second + 1e-6).sqrt() / (first + 1e-6).sqrt() * gradient
                kept = 0.8 if self.wrong else 0.9
                second = kept * second + (1 - kept) * change * change
                weight.sub_(change)
            self.states[n] = first, second


class Lion(torch.optim.Optimizer):
    def __init__(self, weights: Iterable[Tensor], **_: bool) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            weight.add_(momentum.clone().mul_(0.9).add(weight.grad, alpha=0.1).sign_(), alpha=-1e-2)
            momentum.mul_(0.99).add_(weight.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "lion": Lion,
}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return what trains a regression with an output of one element by an optimizer, each once."""
    folder = tmp_path_factory.mktemp("stepped")

    def train(name: str, how: str) -> Path:
        into = folder / f"{name}-{how}"
        if not into.exists():
            torch.manual_seed(0)
            with trueup.capture(into) as capture:
                model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))
                weights = list(model.parameters())
                by_hand = how in ("by hand", "wrong")
                kernel = {"loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}.get(how, {})
                optimizer = ByHand(weights, name, wrong=how == "wrong") if by_hand else OPTIMIZERS[name](weights, **kernel)
                for _ in range(3):
                    (model(torch.randn(8, 8)) - 1).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    capture.step()
        return into

    return train


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "lists") for name in OPTIMIZERS if name != "lion"), ("adagrad", "fused")], ids=" ".join
)
def test_optimizers_of_other_kernels(stepped: Callable[..., Path], name: str, how: str) -> None:
    """States that the weights do not need yet, that one kernel keeps elsewhere, that nobody reads after the last step."""
    result = trueup.compare(stepped(name, "loop"), stepped(name, how))
    assert result.verdict == "aligned", result.sentence


@pytest.mark.parametrize("name", ["adagrad", "adadelta", "lion"])
def test_optimizers_by_hand(stepped: Callable[..., Path], name: str) -> None:
    """A state of zeros has the bytes of a bias of zeros, and is none; a state that is not carried on shows where it is made."""
    result = trueup.compare(stepped(name, "loop"), stepped(name, "by hand"))
    assert result.verdict == "aligned", result.sentence
    result = trueup.compare(stepped(name, "loop"), stepped(name, "wrong"))
    assert (result.verdict, result.culprit.phase, result.culprit.step) == ("deviates", "optimizer", 0), result.sentence


class Norm(nn.Module):
    """A norm by hand of a class and of names of its own; ``variance``: with running statistics, as BatchNorm1d has them."""

    def __init__(self, eps: float = 1e-5, momentum: float | None = None) -> None:
        super().__init__()
        self.gain, self.offset, self.eps, self.momentum = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16)), eps, momentum
        self.scale = 1.0
        if momentum is not None:
            self.register_buffer("running_mean", torch.zeros(16))
            self.register_buffer("running_var", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        over = -1 if self.momentum is None else 0
        mean, variance = x.mean(over, keepdim=True), x.var(over, unbiased=False, keepdim=True)
        if self.momentum is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean[0], self.momentum)
                self.running_var.lerp_(variance[0] * len(x) / (len(x) - 1), self.momentum)
        return ((x - mean) * torch.rsqrt(variance + self.eps) * self.gain + self.offset) * self.scale


def normed(into: Path, norm: Callable[[], nn.Module], level: str, *, centred: bool = False) -> Path:
    """``centred``: behind a norm and a product without bias, so that nothing but rounding is left of the batch's mean."""
    torch.manual_seed(0)
    before = [nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)] if centred else []
    model = nn.Sequential(nn.Linear(8, 16), *before, norm(), nn.GELU(), nn.Linear(16, 4))
    optimizer = (torch.optim.AdamW if centred else torch.optim.SGD)(model.parameters(), 1e-2)
    with trueup.capture(into, model=model, level=level) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.randn(8, 8)) - 1).square().mean().backward()
            optimizer.step()
            capture.step()
    return into


@pytest.mark.parametrize("level", ["all", "module"])
@pytest.mark.parametrize(
    ("library", "right", "wrong"),
    [
        (partial(nn.LayerNorm, 16), Norm, partial(Norm, 1e-2)),
        (partial(nn.BatchNorm1d, 16), partial(Norm, momentum=0.1), partial(Norm, momentum=0.9)),
    ],
    ids=["eps", "running statistics"],
)
def test_a_layer_by_hand_stands_where_the_library_s_stood(
    tmp_path: Path, library: Callable[[], nn.Module], right: Callable[[], nn.Module], wrong: Callable[[], nn.Module], level: str
) -> None:
    """A module is the one at its path, of whatever class, and what it writes into buffers of the same names is compared."""
    first = normed(tmp_path / "a", library, level)
    result = trueup.compare(first, normed(tmp_path / "right", right, level))
    assert result.verdict == "aligned", result.sentence
    result = trueup.compare(first, normed(tmp_path / "wrong", wrong, level))
    assert (result.verdict, result.culprit.scope, result.culprit.phase, result.culprit.step) == ("deviates", "1", "forward", 0)


@pytest.mark.parametrize(("level", "centred"), [("api", False), ("aten", False), ("aten", True)])
def test_running_statistics_where_no_module_shows_them(tmp_path: Path, level: str, centred: bool) -> None:
    """They are what a forward writes into memory that was there before, and its own step does not read."""
    first = normed(tmp_path / "a", partial(nn.BatchNorm1d, 16), level, centred=centred)
    verdicts = {0.1: "aligned", 0.11: "deviates", 0.9: "inconclusive"}  # of the last nothing near is written
    for momentum, verdict in verdicts.items():
        norm = partial(Norm, momentum=momentum)
        result = trueup.compare(first, normed(tmp_path / str(momentum), norm, level, centred=centred))
        assert result.verdict == verdict, result.sentence


class Layer(nn.Module):
    """A layer in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.form in ("pooled", "cut"):
            return (h if self.form == "pooled" else h[..., 1:-1]).unflatten(2, (-1, 2)).amax(3)
        rounded = torch.round(h * 4) / 4
        return x + rounded if self.form == "straight through, lost" else x + (rounded - h).detach() + h


@pytest.mark.parametrize("level", ["all", "api", "module"])
@pytest.mark.parametrize(
    ("forms", "phase"), [(("pooled", "cut"), "forward"), (("straight through", "straight through, lost"), "backward")], ids=str
)
def test_the_place_of_another_shape_and_of_a_lost_gradient(forms: tuple[str, str], phase: str, level: str, tmp_path: Path) -> None:
    """What a module returns has another number of elements; and a gradient is lost behind a forward that agrees."""
    for form in forms:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), Layer(form), nn.AdaptiveAvgPool1d(1))
        with trueup.capture(tmp_path / form, model=model, level=level):
            model(torch.randn(3, 8, 6)).square().sum().backward()
    result = trueup.compare(tmp_path / forms[0], tmp_path / forms[1])
    if (phase, level) == ("forward", "api"):  # no call that both runs make returns it
        assert result.verdict == "inconclusive"
    else:
        assert (result.verdict, result.culprit.scope, result.culprit.phase) == ("deviates", "1", phase), result.sentence


def test_a_module_that_an_identity_replaces_is_named_and_no_layer_in_it(tmp_path: Path) -> None:
    for replaced in (False, True):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = nn.Sequential(nn.Linear(6, 8), nn.Identity() if replaced else inner, nn.Tanh())
        with trueup.capture(tmp_path / str(replaced), model=model):
            model(torch.randn(3, 6))
    result = trueup.compare(tmp_path / "False", tmp_path / "True")
    assert (result.verdict, result.culprit.scope) == ("deviates", "1"), result.sentence


def test_a_cast_of_an_earlier_step_where_no_operator_shows_it(tmp_path: Path) -> None:
    """Autocast around the training keeps the weights that it cast; the first step was bitwise equal, so kernels are the same."""
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        around = torch.autocast("cpu", torch.bfloat16) if kept else nullcontext()
        with trueup.capture(tmp_path / str(kept), model=model, level="api"), around:
            for _ in range(2):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(12, 16)).float().square().mean()
                loss.backward(retain_graph=True)
                optimizer.step()
    result = trueup.compare(tmp_path / "False", tmp_path / "True")
    assert result.verdict == "inconclusive", result.sentence
    assert "0 of step 0, which does the same, is bitwise equal" in result.sentence


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "aligned"), (1.01, "inconclusive")])
def test_a_run_of_calls_whose_elements_are_off_alike(tmp_path: Path, scale: float, verdict: str) -> None:
    """Several roundings to bfloat16 may be a hundredth of a result, but not all in one direction."""
    for scaled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), Norm() if scaled else nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10))
        if scaled:
            model[1].gain, model[1].offset = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
            model[1].scale = scale
        with trueup.capture(tmp_path / str(scaled), model=model, level="api"), torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(model(torch.randn(48, 16)).float(), torch.arange(48) % 10).backward()
    result = trueup.compare(tmp_path / "False", tmp_path / "True")
    assert result.verdict == verdict, result.sentence


class Halved(nn.Module):
    """A weight beside a layer: detached by mistake, or rounded to halves after each step."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.layer, self.detached = nn.Linear(8, 8), detached
        self.down, self.up = (nn.Parameter(torch.randn(*size)) for size in ((2, 8), (8, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.down.T @ (self.up.detach() if self.detached else self.up).T) * 2


@pytest.mark.parametrize("fault", ["", "detached", "halved"])
def test_a_weight_that_is_detached_or_rounded(tmp_path: Path, fault: str) -> None:
    for name, its in (("a", ""), ("b", fault)):
        torch.manual_seed(0)
        model = Halved(detached=its == "detached")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        with trueup.capture(tmp_path / name, model=model) as capture:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                if its == "halved":
                    model.up.data.copy_(model.up.data.half().float())
                capture.step()
    result = trueup.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == ("deviates" if fault else "aligned")
    assert ("does not update up:" in result.sentence) == (fault == "detached")
    assert any("float16, none of the baseline" in note for note in result.notes) == (fault == "halved")


def test_a_recomputation_stops_inside_a_function(tmp_path: Path) -> None:
    """Checkpointing stops as soon as it has what it needs: the function in which it stops returns nothing. Nothing is missing."""
    where = torch.arange(4)

    def body(x: Tensor, layers: nn.ModuleList) -> Tensor:
        found = torch.zeros_like(x)
        for layer in layers:
            found.index_add_(0, where, layer(x[where]))
        return found

    for name in ("a", "b"):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        with trueup.capture(tmp_path / name, model=layers) as capture:
            x = torch.randn(4, 8)
            found = checkpoint(body, x, layers, use_reentrant=False) if name == "b" else body(x, layers)
            found.square().mean().backward()
            capture.step()
    assert trueup.compare(tmp_path / "a", tmp_path / "b").verdict == "aligned"


def distances(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    near, far = ((anchor - other + 1e-6).square().sum(-1).sqrt() for other in (positive, negative))
    return (near - far + margin).clamp(min=0).mean()


@pytest.mark.parametrize(("margin", "verdict"), [(0.5, "aligned"), (1.0, "deviates")])
def test_a_loss_with_another_margin(tmp_path: Path, margin: float, verdict: str) -> None:
    """The gradients are the same, and operators inside are alike by chance: what they read was made there, and explains nothing."""
    for name in ("a", "b"):
        torch.manual_seed(0)
        model = nn.Linear(16, 10)
        with trueup.capture(tmp_path / name, model=model) as capture:
            parts = model(torch.randn(12, 16)).split(4)
            loss = F.triplet_margin_loss(*parts, margin=0.5) if name == "a" else distances(*parts, margin)
            loss.backward()
            capture.step()
    result = trueup.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == verdict, result.sentence
    assert verdict == "aligned" or result.culprit.phase == "forward"


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "aligned"), (1.01, "deviates")])
def test_a_critic_that_reads_both_batches_at_once(tmp_path: Path, scale: float, verdict: str) -> None:
    """The gradient of a bias of one element goes through a view, whose own result nobody reads: what it views is read."""
    for name in ("a", "b"):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(critic.parameters(), 1e-3, foreach=False)
        with trueup.capture(tmp_path / name, model=critic, level="aten") as capture:
            real, fake = torch.randn(2, 12, 8)
            first, second = (critic(real), critic(fake)) if name == "a" else critic(torch.cat([real, fake])).chunk(2)
            (F.softplus(second).mean() * (1.0 if name == "a" else scale) + F.softplus(-first).mean()).backward()
            optimizer.step()
            capture.step()
    assert trueup.compare(tmp_path / "a", tmp_path / "b").verdict == verdict


def looped(into: Path, form: str, level: str) -> Path:
    """Train with a scaled loss; the script clips or measures itself in some ``form``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=8.0)
    with trueup.capture(into, model=model, level=level) as capture:
        for _ in range(2):
            optimizer.zero_grad()
            x, wanted = torch.randn(8, 8), torch.randint(0, 4, (8,))
            guessed = model(x)
            scaler.scale(F.cross_entropy(guessed, wanted)).backward()
            scaler.unscale_(optimizer)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if form in ("clipped by hand", "clipped at twice"):
                norm = sum(one.pow(2).sum().item() for one in gradients) ** 0.5
                for one in gradients:
                    one.mul_(min(1.0, (0.05 if form == "clipped by hand" else 0.1) / (norm + 1e-6)))
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if form == "accuracy":
                (guessed.argmax(-1) == wanted).float().mean().item()
            if form == "accuracy by hand":
                (guessed.argmax(-1) == wanted).float().sum().div(7).item()
            if form == "perplexity":
                F.cross_entropy(guessed.detach(), wanted).exp().item()
            if form == "perplexity to base 2":
                torch.pow(2.0, F.cross_entropy(guessed.detach(), wanted)).item()
            scaler.step(optimizer)
            scaler.update()
            capture.step()
    return into


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("plain", "clipped by hand", "aligned"), ("plain", "clipped at twice", "deviates"),
        ("accuracy", "accuracy by hand", "inconclusive"), ("perplexity", "perplexity to base 2", "inconclusive"),
    ],
)  # fmt: skip
def test_numbers_that_python_reads(tmp_path: Path, before: str, after: str, verdict: str) -> None:
    """A factor shows in what it is multiplied with; of two measures that no call reads nothing says that they agree."""
    result = trueup.compare(looped(tmp_path / "a", before, "api"), looped(tmp_path / "b", after, "api"))
    assert result.verdict == verdict, result.sentence
