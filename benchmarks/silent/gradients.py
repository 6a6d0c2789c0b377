"""Silent bugs between the loss and the optimizer: gradients lost, cleared, clipped at the wrong time, weights cast too early."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from silent.case import Form, Place, Training, case
from silent.language import Decoder, adamw, batches, next_word_loss
from zoo import text

CLIPPING = "vector_norm|norm|stack|clamp|reciprocal|rtruediv|mul_|add|div"
BF16 = "bfloat16 autocast"


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, foreach=False)


@case(
    "clipped-before-unscaled", "Lightning-AI/pytorch-lightning#9599",
    "Gradients are clipped while they still carry the loss scale, and unscaled afterwards.",
    Place(CLIPPING, scope="", phase="forward|backward|optimizer"),
)  # fmt: skip
def clipped_before_unscaled(form: Form) -> Training:
    model, source, scale = Decoder(), batches(), 1024.0
    optimizer = sgd(model)

    def unscale() -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(1 / scale)

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=form == "again")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        (loss * scale).backward()
        for do in (clip, unscale) if form == "buggy" else (unscale, clip):
            do()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "clipping-off-in-bf16", "deepspeedai/DeepSpeed#3790",
    "With bfloat16 the gradients are not clipped, for clipping was taken for a part of loss scaling.",
    Place(CLIPPING, phase="backward|optimizer"), precision=BF16,
)  # fmt: skip
def clipping_off_in_bf16(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = sgd(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_word_loss(model, next(source))
        loss.backward()
        if form != "buggy":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=form == "again")
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "validation-clears-gradients", "Lightning-AI/pytorch-lightning#18710",
    "A validation in the middle of an accumulation clears what was accumulated.",
    Place("add|zero|accumulate|copy|detach", phase="backward|optimizer"),
)  # fmt: skip
def validation_clears_gradients(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = sgd(model)

    def validate() -> None:
        with torch.no_grad():
            next_word_loss(model, next(source))
        if form == "buggy":
            model.zero_grad()

    def step() -> Tensor:
        optimizer.zero_grad()
        for part in range(2):
            loss = next_word_loss(model, next(source)) / 2
            loss.backward()
            if part == 0:
                validate()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "checkpoint-loses-gradients", "huggingface/transformers#21381",
    "Behind frozen embeddings a checkpointed block gets no gradient, for no input of it asks for one.",
    Place(phase="backward|recompute", scope=r"blocks\.0.*"),
)  # fmt: skip
def checkpoint_loses_gradients(form: Form) -> Training:
    class Checkpointed(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            first, second = self.blocks
            x = first(x) if form == "again" else checkpoint(first, x, use_reentrant=form == "buggy")
            return self.head(self.norm(second(x)))

    model, source = Checkpointed(), batches()
    for frozen in (model.words, model.places):
        frozen.requires_grad_(False)
    optimizer = sgd(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "autocast-remembers-old-weights", "X-GenGroup/Flow-Factory#186",
    "One autocast around all steps goes on with the bfloat16 weights of the first, which the optimizer has changed since.",
    Place("linear|to|addmm|mm|t$", step=1, scope=r"blocks\.0\.attention(\.qkv)?"), precision=BF16,
)  # fmt: skip
def autocast_remembers_old_weights(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = sgd(model)
    outside = torch.autocast("cpu", torch.bfloat16) if form == "buggy" else contextlib.nullcontext()

    def step() -> Tensor:
        optimizer.zero_grad()
        inside = torch.autocast("cpu", torch.bfloat16, cache_enabled=form != "again")
        with inside if form != "buggy" else contextlib.nullcontext():
            loss = next_word_loss(model, next(source))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step, outside)


class RememberedCast(nn.Linear):
    """A linear layer that casts its weight once a step, as autocast's cache did: also where no gradient is recorded."""

    cast: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.bfloat16() if self.cast is None else self.cast
        self.cast = weight
        return F.linear(x.bfloat16(), weight, self.bias.bfloat16()).float()


@case(
    "cast-remembered-without-gradient", "pytorch/pytorch#158232",
    "A forward without gradients fills the cache of cast weights, and the training's forward takes them from there.",
    Place(phase="forward|backward", scope=r"(1|3)?"), precision="bfloat16 weights cast by hand",
)  # fmt: skip
def cast_remembered_without_gradient(form: Form) -> Training:
    layers = [RememberedCast(32, 32), RememberedCast(32, 32)]
    words = len(text.vocabulary())
    model = nn.Sequential(nn.Embedding(words, 32), layers[0], nn.GELU(), layers[1], nn.Linear(32, words))
    optimizer, source = sgd(model), batches()

    def forget() -> None:
        for layer in layers:
            layer.cast = None

    def step() -> Tensor:
        batch = next(source)
        optimizer.zero_grad()
        forget()
        with torch.no_grad():
            next_word_loss(model, batch)
        if form != "buggy":
            forget()
        loss = next_word_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "head-untied", "NVIDIA/Megatron-LM#656",
    "The output layer has a copy of the embedding's weights where it should have the weights.",
    Place(phase="backward|optimizer", scope=r"(head|words)?"),
)  # fmt: skip
def head_untied(form: Form) -> Training:
    class ByWords(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return F.linear(self.norm(x), self.words.weight)

    model, source = ByWords() if form == "again" else Decoder(), batches()
    nn.init.normal_(model.words.weight, std=0.1)
    model.head.weight = nn.Parameter(model.words.weight.detach().clone()) if form == "buggy" else model.words.weight
    optimizer = adamw(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, step)


class Halves(nn.Module):
    """A layer on two ranks: each norms its half of the sentence with its copy of the norm's weights."""

    def __init__(self) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.head = nn.Embedding(words, 32), nn.Linear(32, words)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.words(tokens).tensor_split(2, 1)
        return self.head(torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)], 1))


@case(
    "norm-gradient-not-summed", "NVIDIA/Megatron-LM#1446",
    "Under sequence parallelism the gradient of the last norm stays each rank's own.",
    Place("add", phase="forward|backward|optimizer|collective"),
)  # fmt: skip
def norm_gradient_not_summed(form: Form) -> Training:
    model, source = Halves(), batches()
    optimizer = sgd(model)

    def all_reduce() -> None:
        for one, other in zip(*(norm.parameters() for norm in model.norms), strict=True):
            total = other.grad + one.grad if form == "again" else one.grad + other.grad
            one.grad, other.grad = total, total.clone()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        loss.backward()
        if form != "buggy":
            all_reduce()
        optimizer.step()
        return loss.detach()

    return Training(model, step)
