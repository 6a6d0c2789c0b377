"""Rows of the second table: another implementation, and a right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import implementation_formulas as by_hand
from implementation_models import HALF_EPSILON, PRECISIONS, Alteration, Formula, Row
from implementation_wrong import PARTS, hand_bert_norm
from zoo.training import Training

FORMULAS: tuple[tuple[str, str, Formula, bool], ...] = (
    ("norm", "by hand", by_hand.layer_norm, False),
    ("norm", "in float64", by_hand.double_norm, True),
    *((f"norm, width {w}", "by hand", by_hand.layer_norm, False) for w in (64, 2048, 8192)),
    ("gelu", "by erf", by_hand.gelu_by_erf, False),
    ("gelu", "in float64", by_hand.double_gelu, False),
    ("gelu, width 2048", "by erf", by_hand.gelu_by_erf, False),
    ("gelu, width 8192", "by erf", by_hand.gelu_by_erf, False),
    ("gpt2 gelu", "PyTorch's kernel", by_hand.library_gelu_tanh, False),
    ("gpt2 norm", "by hand", by_hand.layer_norm, False),
    ("bert gelu", "by erf", by_hand.gelu_by_erf, False),
    ("llama norm", "PyTorch's kernel", by_hand.library_rms_norm, True),
    ("attention", "products and softmax", by_hand.attention, False),
    ("attention", "einsum", by_hand.attention_by_einsum, True),
    ("attention", "softmax from exponentials", by_hand.softmax_by_hand, False),
    ("linear", "product and sum", by_hand.linear, False),
    ("linear", "einsum", by_hand.linear_by_einsum, False),
    ("linear", "weight transposed in memory", by_hand.linear_transposed, False),
    ("linear", "sum in two halves", by_hand.linear_in_halves, True),
    ("linear", "in float64", by_hand.double_linear, False),
    ("vit linear", "einsum", by_hand.linear_by_einsum, False),
    ("loss", "by hand", by_hand.cross_entropy, False),
    ("loss", "by logsumexp", by_hand.loss_by_logsumexp, True),
    ("embedding", "one-hot product", by_hand.one_hot_embedding, False),
    ("embedding", "by index", by_hand.embedding_by_index, True),
    ("lstm", "cells by hand", by_hand.lstm, False),
    ("convolution", "unfolded product", by_hand.convolution, False),
    ("unet norm", "by hand", by_hand.group_norm, True),
    ("llama silu", "by hand", by_hand.silu, True),
    ("bert norm", "by hand", hand_bert_norm, True),
    ("norm", "by var_mean", by_hand.norm_by_moments, True),
    ("attention", "head by head", by_hand.attention_head_by_head, True),
    ("linear", "bias as a column", by_hand.linear_with_bias_as_column, True),
    ("norm", "as a batch norm", by_hand.norm_by_batch_norm, False),
    ("gpt2 norm", "as a batch norm", by_hand.norm_by_batch_norm, False),
    ("llama norm", "by its length", by_hand.rms_norm_by_length, False),
    ("gelu", "by the normal distribution", by_hand.gelu_by_distribution, False),
    ("bert gelu", "by the normal distribution", by_hand.gelu_by_distribution, False),
    ("attention", "softmax in chunks", by_hand.attention_in_chunks, False),
    ("linear", "as a convolution", by_hand.linear_by_convolution, False),
    ("vit linear", "as a convolution", by_hand.linear_by_convolution, False),
    ("convolution", "sum of shifted products", by_hand.convolution_by_shifts, False),
    ("loss", "with one-hot labels", by_hand.loss_by_one_hot, False),
    ("lstm", "one product for all gates", by_hand.lstm_by_one_product, False),
)
"""Part, name, formula, held out."""


def replaced(part: str, formula: Formula, a: Alteration) -> None:
    PARTS[part].swap(formula, None, "all layers", a)


def formula_rows() -> Iterator[Row]:
    for part, name, formula, held in FORMULAS:
        change = partial(replaced, part, formula)
        precisions = PRECISIONS[:3] if part == "lstm" else PRECISIONS  # oneDNN has no LSTM under autocast without AVX-512
        yield Row(part.split(",")[0], f"{part}: {name}", PARTS[part].base, change, precisions=precisions, held_out=held)


# ---------------------------------------------------------------- optimizers
def library(make: Callable[..., Any], a: Alteration, **options: Any) -> None:
    if a.precision == "float16" and make is not torch.optim.SGD:
        options["eps"] = HALF_EPSILON
    a.training.optimizer = make(a.training.model.parameters(), **options)


def own(update: by_hand.Update, a: Alteration) -> None:
    eps = {"eps": HALF_EPSILON} if a.precision == "float16" and update is by_hand.adamw else {}
    a.optimize(partial(update, **eps))


ADAMW = partial(library, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
SGD = partial(library, torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
PRECISE = tuple(precision for precision in PRECISIONS if precision != "float16")
"""Without float16, in which squares of gradients are 0: there a fused kernel, which computes in float32, does make other steps."""
STORED = ("float32", "autocast")
"""Precisions of parameters that the fused SGD of a CPU updates: of 16-bit ones it skips whole vectors and reads a wrong momentum
(https://github.com/pytorch/pytorch/issues/191763), so it is no right implementation there."""
KERNELS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def optimizer_rows() -> Iterator[Row]:
    for name, make, update in (("AdamW", ADAMW, by_hand.adamw), ("SGD", SGD, by_hand.momentum)):
        plain, tried = partial(make, foreach=False), PRECISE if name == "AdamW" else PRECISIONS
        for kernel in ("foreach", "fused"):
            change, right = partial(make, **KERNELS[kernel]), STORED if (name, kernel) == ("SGD", "fused") else tried
            yield Row("optimizer", f"{name}: {kernel} against a for-loop", "text", change, plain, name, precisions=right)
        yield Row("optimizer", f"{name}: by hand", "text", partial(own, update), plain, name, precisions=tried)
    for kernel in ("foreach", "fused"):
        yield Row("optimizer", f"AdamW: {kernel} against a for-loop, ResNet", "pictures", partial(ADAMW, **KERNELS[kernel]),
                  partial(ADAMW, foreach=False), "AdamW", precisions=PRECISE, held_out=kernel == "fused")  # fmt: skip


# ---------------------------------------------------------------- other ways through the same step
def recomputed(a: Alteration) -> None:
    for block in a.module("blocks").children():
        plain = block.forward
        block.forward = partial(checkpoint, plain, use_reentrant=False)


def pieces(training: Training, count: int) -> list[dict[str, Tensor]]:
    batch = training.batches[training.done % len(training.batches)]
    return [dict(zip(batch, piece, strict=True)) for piece in zip(*(t.chunk(count) for t in batch.values()), strict=True)]


def accumulated(count: int, a: Alteration, *, uneven: bool = False) -> None:
    """Train each batch of pictures in several micro-batches; uneven ones count by their length."""

    def step(plain: Callable[[], Tensor]) -> Tensor:  # noqa: ARG001
        training = a.training
        training.optimizer.zero_grad()
        losses, found = [], pieces(training, count)
        if uneven:  # the first two as one
            joined = {name: torch.cat([found[0][name], found[1][name]]) for name in found[0]}
            found = [joined, *found[2:]]
        sizes = [len(next(iter(piece.values()))) for piece in found]
        for piece, size in zip(found, sizes, strict=True):
            loss = training.loss(training.model, piece)
            loss = loss * (size / sum(sizes)) if uneven else loss / count
            loss.backward()
            losses.append(loss.detach())
        training.optimizer.step()
        training.done += 1
        return torch.stack(losses).sum()

    a.around_step(step)


def channels_last(a: Alteration) -> None:
    a.training.model.to(memory_format=torch.channels_last)
    a.training.model.layout = torch.channels_last


def transposed_weights(a: Alteration) -> None:
    for module in a.training.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def in_double(a: Alteration) -> None:
    """Compute each linear layer in float64 and hand on what it was given."""
    for module in a.training.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(lambda m, x: F.linear(x.double(), m.weight.double(), m.bias.double()).to(x.dtype), module)


def other_attention(kind: str, a: Alteration) -> None:
    """Let a model of `transformers` compute attention in another way."""
    a.training.model.set_attn_implementation(kind)


def way_rows() -> Iterator[Row]:
    yield Row("recomputation", "blocks checkpointed", "text", recomputed)
    for count in (2, 4):
        yield Row("micro-batches", f"{count} against one batch", "deep", partial(accumulated, count))
        yield Row("micro-batches", f"{count} against one batch, width 1024", "wide-1024", partial(accumulated, count))
    yield Row("micro-batches", "4 against 2", "deep", partial(accumulated, 4), partial(accumulated, 2), "2 micro-batches")
    uneven = partial(accumulated, 4, uneven=True)
    yield Row("micro-batches", "3 uneven ones against one batch", "deep", uneven, held_out=True)
    yield Row("layout", "channels_last", "pictures", channels_last)
    yield Row("layout", "weights transposed in memory", "text", transposed_weights)
    yield Row("float64 inside", "each linear layer", "text", in_double)
    yield Row("float64 inside", "each linear layer, tanh between", "deep", in_double)
    for model in ("gpt2", "vit", "llama"):
        eager, fused = (partial(other_attention, kind) for kind in ("eager", "sdpa"))
        yield Row("attention", f"{model}: sdpa against eager", model, fused, eager, "eager")


def rows() -> list[Row]:
    return [*formula_rows(), *optimizer_rows(), *way_rows()]

