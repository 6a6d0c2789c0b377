"""Silent bugs of the optimizer: what decays, when, by which learning rate, and what the scale of the loss is then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from silent.case import Form, Place, Training, case
from silent.language import Decoder, batches, next_word_loss

DECAY = Place(r"mul_|add|sub_|update|step", phase="optimizer", setting="weight_decay|weight decay")


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], None] = lambda: None) -> Training:
    """Train a decoder on the next word; ``after`` runs at the end of each step."""
    source = batches()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    return Training(model, step)


@case(
    "norms-and-biases-decay", "huggingface/transformers#4360",
    "Names of parameters are not recognised, so that norms and biases decay like matrices.", DECAY,
)  # fmt: skip
def norms_and_biases_decay(form: Form) -> Training:
    model = Decoder()
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        excluded = "LayerNorm" in name if form == "buggy" else parameter.ndim < 2
        groups[excluded].append(parameter)
        if parameter.ndim < 2:
            nn.init.normal_(parameter, 0.5, 0.2)
    decays = [{"params": some, "weight_decay": decay} for some, decay in zip(groups, (0.1, 0.0), strict=True) if some]
    return stepping(model, torch.optim.AdamW(decays, lr=1e-2, foreach=form == "again"))


class AdamW(torch.optim.Optimizer):
    """AdamW of a few lines, whose decay comes before the update or after it."""

    def __init__(self, parameters: list[nn.Parameter], late: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2, "decay": 0.5, "late": late})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["t"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                if not group["late"]:
                    p.mul_(1 - group["lr"] * group["decay"])
                root = (state["v"] / (1 - 0.999 ** state["t"])).sqrt_().add_(1e-8)
                p.addcdiv_(state["m"], root, value=-group["lr"] / (1 - 0.9 ** state["t"]))
                if group["late"]:
                    p.mul_(1 - group["lr"] * group["decay"])


@case(
    "decay-after-update", "huggingface/transformers#14539",
    "The weights decay after the update, so that the update of this step decays as well.",
    Place("mul_|addcdiv_|add_|update|step", phase="optimizer"),
)  # fmt: skip
def decay_after_update(form: Form) -> Training:
    model = Decoder()
    if form == "again":
        settings = {"lr": 1e-2, "weight_decay": 0.5, "foreach": False}
        return stepping(model, torch.optim.AdamW(model.parameters(), **settings))
    return stepping(model, AdamW(list(model.parameters()), late=form == "buggy"))


@case(
    "adam-decays-like-adamw", "flagos-ai/FlagGems#4988",
    "Adam shrinks the weights where it should add their multiple to the gradient.", DECAY,
)  # fmt: skip
def adam_decays_like_adamw(form: Form) -> Training:
    model = Decoder()
    kind = torch.optim.AdamW if form == "buggy" else torch.optim.Adam
    return stepping(model, kind(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=form == "again"))


@case(
    "decay-by-default", "facebookresearch/bitsandbytes#13",
    "The optimizer that replaces another has no weight decay unless asked for, where the other has 0.01.", DECAY,
)  # fmt: skip
def decay_by_default(form: Form) -> Training:
    model = Decoder()
    decay = {"weight_decay": 0.0} if form == "buggy" else {}
    return stepping(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=form == "again", **decay))


@case(
    "schedule-runs-ahead", "huggingface/accelerate#2142",
    "The learning rate is scheduled once a process in each step, so that a warm-up is over too soon.",
    Place("add_|addcdiv_|mul_|update|step", phase="optimizer", step=1, setting=r"\blr\b|learning rate"), steps=3,
)  # fmt: skip
def schedule_runs_ahead(form: Form) -> Training:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=form == "again")
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: (done + 1) / 10)

    def after() -> None:
        for _ in range(2 if form == "buggy" else 1):
            warm_up.step()

    return stepping(model, optimizer, after)


@case(
    "masters-decay-before-training", "deepspeedai/DeepSpeed#5151",
    "Setting up the optimizer runs a step without gradients, which lets the float32 weights decay before training begins.",
    Place(phase="optimizer"), precision="bfloat16 weights, float32 masters",
)  # fmt: skip
def masters_decay_before_training(form: Form) -> Training:
    model, source = Decoder().bfloat16(), batches()
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.5, foreach=form == "again")
    if form == "buggy":
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer.step()

    def step() -> Tensor:
        model.zero_grad()
        loss = next_word_loss(model, next(source))
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        return loss.detach()

    return Training(model, step)


@case(
    "unscaled-by-the-next-scale", "deepspeedai/DeepSpeed#8588",
    "When the loss scale grows, the gradients of this step are divided by the new scale.",
    Place("mul_|div", scope="", phase="forward|backward|optimizer", step=1), steps=3,
)  # fmt: skip
def unscaled_by_the_next_scale(form: Form) -> Training:
    model, source = Decoder(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scales = iter([4.0, 4.0, 8.0, 8.0])
    scale = next(scales)

    def step() -> Tensor:
        nonlocal scale
        optimizer.zero_grad()
        loss = next_word_loss(model, next(source))
        (loss * scale).backward()
        before, scale = scale, next(scales)
        for parameter in model.parameters():
            parameter.grad.mul_(1 / (scale if form == "buggy" else before))
        optimizer.step()
        return loss.detach()

    return Training(model, step)


@case(
    "embedding-replaced-behind-the-optimizer", "huggingface/transformers#3532",
    "The embedding is resized after the optimizer was made, which goes on holding the old one.",
    Place(phase="optimizer"),
)  # fmt: skip
def embedding_replaced_behind_the_optimizer(form: Form) -> Training:
    model = Decoder()
    resized = nn.Embedding(model.words.num_embeddings + 4, model.words.embedding_dim)
    if form != "buggy":
        model.words = resized
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=form == "again")
    model.words = resized
    return stepping(model, optimizer)
