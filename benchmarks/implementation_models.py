"""Models whose parts can be exchanged, and what is measured of an exchange: `build("text", "bfloat16")` is a training.

    alteration = Alteration(build("text"))
    alteration.swap("blocks.1.ln1", norm_by_hand, parameters=("weight", "bias"), instead_of=F.layer_norm)
    alteration.training.step()
    alteration.planted      # [Planted(scope='blocks.1.ln1', step=0, size=0.008, coherence=160.0), ...]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import zoo
from implementation_formulas import ByHand, Update
from zoo import images, text
from zoo.language import next_word
from zoo.resnet import ResNet
from zoo.training import Batch, Training

PRECISIONS = ("float32", "float16", "bfloat16", "autocast")
"""``autocast`` is float32 under ``torch.autocast("cpu", torch.bfloat16)``."""
WIDTH, HEADS, LAYERS = 32, 4, 3
HALF_EPSILON = 1e-4
"""Of an optimizer whose state is float16, where the usual 1e-8 is 0."""

DOUBLE = 1e-12
"""Size up to which two formulas are one, computed in float64 in another order."""

Formula = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """How far a formula is from the right one, on the inputs it got, both computed in float64."""

    scope: str
    step: int
    size: float
    """‖wrong − right‖ / ‖right‖."""
    coherence: float
    """max(zs, zm): about 1 for rounding, up to the root of the number of elements for a wrong formula."""
    phase: str = "forward"
    """Of what is compared: forward, backward for its gradients, optimizer, data."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return causal attention in PyTorch's own kernel; ``mask`` is True where a key may be seen."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Attention(nn.Module):
    """Causal self-attention, its scores and sums computed by ``attend``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend: Formula = attend

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.proj(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))


def unchanged(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """A transformer's block; ``between`` is applied to what enters the feed-forward half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.activate: Formula = F.gelu
        self.between: Formula = unchanged

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(x + self.attn(self.ln1(x)))
        return x + self.down(self.activate(self.up(self.ln2(x))))


def own_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=text.IGNORED)


class Text(nn.Module):
    """Predicts the next word of the LICENSE."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(text.vocabulary()), width), nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(text.vocabulary()))
        self.loss: Formula = own_loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return self.loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Gate(nn.Module):
    """A layer that costs no product: normalise, activate, weigh each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.activate: Formula = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activate(self.norm(x)) * self.gain


class Wide(nn.Module):
    """A wide network on photographs that is cheap: only its last layer multiplies matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gate(width) for _ in range(LAYERS))
        self.head, self.width = nn.Linear(width, len(images.TEXTURES)), width
        self.prepare: Formula = unchanged

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.prepare(pictures).flatten(1)[:, : self.width]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


class Deep(nn.Module):
    """Sixteen linear layers with tanh; ``between`` is applied behind layer 3."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if k else 192, width) for k in range(16))
        self.head = nn.Linear(width, len(images.TEXTURES))
        self.between: Formula = unchanged
        self.prepare: Formula = unchanged

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.prepare(pictures), 8).flatten(1)
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 3:
                x = self.between(x)
        return F.cross_entropy(self.head(x), labels)


class Pictures(nn.Module):
    """The residual network of the zoo, with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.layout = ResNet(len(images.TEXTURES), 8), torch.contiguous_format

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(pictures.contiguous(memory_format=self.layout)), labels)


class Recurrent(nn.Module):
    """Predicts the next word with an LSTM."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(len(text.vocabulary()), width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, len(text.vocabulary()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embed(input_ids))[0])
        return own_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def words() -> list[Batch]:
    return [{name: batch[name] for name in ("input_ids", "labels")} for batch in next_word()]


def photographs(size: int) -> list[Batch]:
    return [{"pictures": pictures, "labels": labels} for pictures, labels in images.textures(2, size)]


def seeded(model: nn.Module) -> nn.Module:
    """Give a model weights of an unremarkable size; vectors, biases among them, are centred at a half."""
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = min(0.15, parameter.shape[-1] ** -0.5)
            parameter.copy_(spread * torch.randn(parameter.shape, generator=source) + (parameter.ndim == 1) * 0.5)
    return model


def forward_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, foreach=False)


def own(model: Callable[[], nn.Module], batches: Callable[[], list[Batch]]) -> Training:
    made = seeded(model())
    return Training(made, sgd(made.parameters()), forward_loss, batches())


def from_zoo(name: str) -> Training:
    """Return a training of the zoo without dropout: another kernel draws different random numbers."""
    training = zoo.build(name)
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout_prob", None), float):
            module.dropout_prob = 0.0
    return training


MODELS: dict[str, Callable[[], Training]] = {
    "text": partial(own, Text, words),
    "deep": partial(own, Deep, partial(photographs, 32)),
    "pictures": partial(own, Pictures, partial(photographs, 32)),
    "recurrent": partial(own, Recurrent, words),
    **{f"wide-{w}": partial(own, partial(Wide, w), partial(photographs, 64)) for w in (64, 256, 1024, 2048, 8192)},
    **{name: partial(from_zoo, name) for name in ("gpt2", "gpt2-eager", "bert", "vit", "llama", "lstm_tagger", "unet")},
}


def build(name: str, precision: str = "float32") -> Training:
    """Return a training of a model in a precision, the same in every run.

    The optimizer keeps its parameters: `nn.Module.to` changes them in place.
    """
    torch.manual_seed(0)
    training = MODELS[name]()
    if precision == "autocast":
        plain = training.loss

        def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return plain(model, batch)

        training.loss = under_autocast
    elif precision != "float32":
        dtype = getattr(torch, precision)
        training.model.to(dtype)
        training.batches = [
            {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
            for batch in training.batches
        ]
        make_safe(training.optimizer, precision)
    return training


def make_safe(optimizer: torch.optim.Optimizer, precision: str) -> None:
    for group in optimizer.param_groups:
        if precision == "float16" and "eps" in group:
            group["eps"] = HALF_EPSILON


def distance(wrong: Any, right: Any) -> tuple[float, float]:
    """Return size and coherence of a difference (`Planted`) of tensors, or of the first of several."""
    if isinstance(right, tuple):
        wrong, right = wrong[0], right[0]
    w, r = wrong.detach().double().flatten(), right.detach().double().flatten()
    difference = w - r
    norm, scale = difference.norm().item(), r.norm().item()
    if norm == 0.0:
        return 0.0, 0.0
    along = abs((difference @ r).item()) / max(scale, 1e-300) / norm * math.sqrt(r.numel())
    return norm / max(scale, 1e-300), max(along, abs(difference.sum().item()) / norm)


@dataclass
class Alteration:
    """A training that is being changed, and what its changed formulas were measured to be off by."""

    training: Training
    precision: str = "float32"
    planted: list[Planted] = field(default_factory=list)

    def module(self, scope: str) -> nn.Module:
        return self.training.model.get_submodule(scope)

    def swap(
        self, scope: str, formula: Formula, *, instead_of: Formula | None = None, at: str = "forward",
        parameters: Sequence[str] = (), steps: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Let a module compute by another formula.

        Args:
            formula: takes what the attribute takes, and then the parameters.
            instead_of: the right formula, which the other is measured by; None for one that is right.
            at: the attribute of the module that computes, ``forward`` or a function it holds.
            parameters: names of the module's parameters.
            steps: where the formula is used, and the right one elsewhere; None for all steps.
        """
        module = self.module(scope)

        def compute(*inputs: Any) -> Any:
            arguments = (*inputs, *(getattr(module, name) for name in parameters))
            if steps is not None and self.training.done not in steps:
                assert instead_of is not None
                return instead_of(*arguments)
            if instead_of is not None:
                self.measure(scope, formula, instead_of, arguments)
            return formula(*arguments)

        setattr(module, at, compute)

    def measure(self, scope: str, wrong: Formula, right: Formula, arguments: Sequence[Any]) -> None:
        """Note how far apart two formulas are, unseen by what records the training: their results, then their gradients.

        The gradients are those to normal noise, and the one that is farthest apart counts.
        """
        # Without autocast, which would compute the float64 of the measurement in bfloat16.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.autocast("cpu", enabled=False), torch.enable_grad():
            sides = [self._computed(formula, arguments) for formula in (wrong, right)]
        forward, *backward = (distance(w, r) for w, r in zip(*sides, strict=True))
        self.planted.append(Planted(scope, self.training.done, *forward))
        if backward:
            farthest = max(backward)
            self.planted.append(Planted(scope, self.training.done, *farthest, "backward"))

    def _computed(self, formula: Formula, arguments: Sequence[Any]) -> list[Tensor]:
        """Return a result in float64, and its gradients."""
        given = [self._double(argument) for argument in arguments]
        result = formula(*given)
        result = result[0] if isinstance(result, tuple) else result
        leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        noise = torch.randn(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad((result * noise).sum(), leaves, allow_unused=True)
        return [result, *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True))]

    @staticmethod
    def _double(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.is_floating_point():
            return argument.detach().double().requires_grad_()
        return argument.detach() if isinstance(argument, Tensor) else argument

    def optimize(self, update: Update, *, instead_of: Update | None = None, steps: Sequence[int] | None = None) -> None:
        """Let the parameters be updated by a formula of `implementation_formulas`; arguments are those of `swap`."""
        named = {id(p): name for name, p in self.training.model.named_parameters()}

        def compute(p: Tensor, *rest: Any) -> None:
            if steps is not None and self.training.done not in steps:
                assert instead_of is not None
                return instead_of(p, *rest)
            if instead_of is not None:
                self._measure_update(named[id(p)], update, instead_of, (p, *rest))
            return update(p, *rest)

        self.training.optimizer = ByHand(self.training.model.parameters(), compute)

    def _measure_update(self, name: str, wrong: Update, right: Update, arguments: Sequence[Any]) -> None:
        """Note how far apart two updates leave the parameter or its state, whichever is farther."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            sides = []
            for update in (wrong, right):
                given = [a.detach().double().clone() if isinstance(a, Tensor) else a for a in arguments]
                update(*given)
                sides.append([t for t in given if isinstance(t, Tensor)])
            apart = max(distance(w, r) for w, r in zip(*sides, strict=True))
        self.planted.append(Planted(name, self.training.done, *apart, "optimizer"))

    def note(self, scope: str, size: float, phase: str = "forward") -> None:
        """Note a difference of a factor, or of a whole layer, that no formula measures."""
        self.planted.append(Planted(scope, 0, size, math.inf, phase))

    def around_step(self, change: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        """Let a function take the place of a training step; it is given the plain one."""
        plain = self.training.step
        setattr(self.training, "step", partial(change, plain))  # noqa: B010 - mypy wants no method assigned


@dataclass(frozen=True)
class Row:
    """A row of a table: a model whose candidate, or whose baseline too, computes otherwise than the model as it is."""

    kind: str
    name: str
    base: str
    candidate: Callable[[Alteration], Any]
    baseline: Callable[[Alteration], Any] | None = None
    against: str = "library"
    """What the baseline's alteration is called; baselines of one name are recorded once."""
    levels: Sequence[str] = ("module", "api", "aten")
    """Where anything of it is recorded."""
    precisions: Sequence[str] = PRECISIONS
    missing: Sequence[str] = ()
    """Levels at which a call is in one run only, so that the runs are never aligned, whatever its result."""
    places: Sequence[str] = ()
    """Scopes that may be named, beside those where something was planted."""
    near: Sequence[str] = ()
    """Modules that read what arises between modules: level module can name no other place."""
    held_out: bool = False
    steps: int = 2
    """Training steps that are captured."""
