"""Silent bugs of kernels: an operator of the simulated device returns what the report says; the Python is the same.

The correct form runs on the CPU, ``again`` on the healthy device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Form, Place, Training, case
from silent.language import WIDTH, Block, adamw, batches, left_padded, shifted
from zoo import images, text
from zoo.language import capitals

aten: Any = torch.ops.aten
Kernel = Callable[..., Any]


@contextlib.contextmanager
def broken(form: Form, operator: Any, kernel: Kernel) -> Iterator[None]:
    """Let an operator of the device run ``kernel(healthy, *args, **kwargs)`` in the buggy form."""
    from trueup.simdev.tensor import interceptors

    if form == "buggy":
        interceptors[operator] = lambda _plan, healthy, args, kwargs: kernel(healthy, *args, **kwargs)
    try:
        yield
    finally:
        interceptors.pop(operator, None)


def device(form: Form) -> str:
    return "cpu" if form == "correct" else "npu"


def in_memory_order(tensor: Tensor) -> Tensor:
    """Read the elements of a tensor as they lie in memory, ignoring its strides."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride(), tensor.storage_offset())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor], around: Any
) -> Training:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach().cpu()

    return Training(model, step, around)


class Transposed(nn.Module):
    """A classifier whose first weight is a transposed matrix, as models that tie an encoder to a decoder have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, WIDTH).mul(0.1).t())
        self.head = nn.Linear(WIDTH, len(images.TEXTURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.weight)))


@case(
    "update-of-transposed-weights-lost", "pytorch/pytorch#118115",
    "addcdiv_ writes into a copy where the weight is not contiguous, so that Adam never changes it.",
    Place("addcdiv", phase="optimizer"),
)  # fmt: skip
def update_of_transposed_weights_lost(form: Form) -> Training:
    where = device(form)
    model = Transposed().to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    pictures, labels = images.textures(1, 32)[0]
    features = F.adaptive_avg_pool2d(pictures, 4).flatten(1).to(where)

    def into_copy(healthy: Kernel, weight: Tensor, *rest: Tensor, **value: Any) -> Tensor:
        healthy(weight if weight.is_contiguous() else weight.clone(), *rest, **value)
        return weight

    labels = labels.to(where)
    around = broken(form, aten.addcdiv_.default, into_copy)
    return train(model, optimizer, lambda: F.cross_entropy(model(features), labels), around)


class Placed(nn.Module):
    """A decoder that counts the positions of a padded sentence by a sum over its mask, and masks its scores in place."""

    def __init__(self) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(64, WIDTH)
        self.block, self.head = Block(), nn.Linear(WIDTH, words)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = (mask.cumsum(1) - 1).clamp(min=0)
        return self.head(self.block(self.words(tokens) + self.places(places)))


def placed(form: Form, operator: Any, kernel: Kernel, model: Any = Placed) -> Training:
    where, source = device(form), batches()
    net = model().to(where)

    def loss() -> Tensor:
        batch = left_padded(next(source))
        tokens, labels = shifted(batch)
        logits = net(tokens.to(where), batch["attention_mask"][:, :-1].to(where))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten().to(where), ignore_index=text.IGNORED)

    return train(net, adamw(net), loss, broken(form, operator, kernel))


@case(
    "cumulative-sum-of-integers", "pytorch/pytorch#90635",
    "The cumulative sum of 64-bit integers returns its input.", Place("cumsum", scope=""),
)  # fmt: skip
def cumulative_sum_of_integers(form: Form) -> Training:
    def unsummed(healthy: Kernel, x: Tensor, dim: int, **dtype: Any) -> Tensor:
        return healthy(x, dim, **dtype) if x.is_floating_point() else x.clone()

    return placed(form, aten.cumsum.default, unsummed)


class Masked(Placed):
    """The same with a mask over the keys that is a transposed view."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.words(tokens)
        scores = x @ x.transpose(1, 2)
        hidden = (mask == 0).t().contiguous().t()[:, None].expand_as(scores)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -1e4).masked_fill(hidden, -1e4).softmax(-1)
        return self.head(weights @ x)


@case(
    "mask-read-in-memory-order", "pytorch/pytorch#107694",
    "masked_fill reads a mask that is a transposed view as it lies in memory.", Place("masked_fill", scope=""),
)  # fmt: skip
def mask_read_in_memory_order(form: Form) -> Training:
    def misread(healthy: Kernel, x: Tensor, mask: Tensor, value: Any) -> Tensor:
        if 0 not in mask.stride():
            return healthy(x, mask, value)
        rows = mask[:, 0]
        return healthy(x, in_memory_order(rows)[:, None].expand_as(x), value)

    return placed(form, aten.masked_fill.Scalar, misread, Masked)


@case(
    "padding-row-gets-gradient", "pytorch/pytorch#26302",
    "The embedding's backward gives the row of the padding a gradient.", Place("embedding", phase="backward"),
)  # fmt: skip
def padding_row_gets_gradient(form: Form) -> Training:
    where, source = device(form), batches()
    words = len(text.vocabulary())
    model = nn.Sequential(nn.Embedding(words, WIDTH, padding_idx=text.PAD), nn.Linear(WIDTH, words)).to(where)

    def unpadded(healthy: Kernel, grad: Tensor, indices: Tensor, rows: int, _padding: int, by_count: bool) -> Tensor:
        return healthy(grad, indices, rows, -1, by_count)

    def loss() -> Tensor:
        batch = next(source)
        logits = model(batch["input_ids"].to(where)).mean(1)
        return F.cross_entropy(logits, batch["input_ids"][:, 0].to(where))

    return train(model, adamw(model), loss, broken(form, aten.embedding_dense_backward.default, unpadded))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(text.vocabulary()), WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(WIDTH, len(text.CASES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0])


@case(
    "recurrent-dropout-lost-in-backward", "pytorch/pytorch#190056",
    "The backward of stacked LSTM layers passes the gradient between them as if nothing had been dropped.",
    Place("dropout|lstm|mul", phase="backward", scope=r"lstm"),
)  # fmt: skip
def recurrent_dropout_lost_in_backward(form: Form) -> Training:
    where, source = device(form), cycle(capitals())
    model = Recurrent().to(where)

    def kept(_healthy: Kernel, grad: Tensor, _mask: Tensor, _scale: float) -> Tensor:
        return grad.clone()

    def loss() -> Tensor:
        batch = next(source)
        logits = model(batch["tokens"].to(where))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().to(where), ignore_index=text.IGNORED)

    return train(model, adamw(model), loss, broken(form, aten.native_dropout_backward.default, kept))


class Slices(nn.Module):
    """A convolution over time made of two over pictures, each with a slice of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 2, 3, 3) * 0.1)
        self.head = nn.Linear(8, len(images.TEXTURES))

    def forward(self, pictures: Tensor) -> Tensor:
        now, then = pictures, pictures.flip(-1)
        seen = sum(F.conv2d(x, self.weight[:, :, k], stride=2) for k, x in enumerate((now, then)))
        return self.head(F.relu(seen).mean((2, 3)))


@case(
    "sliced-weight-misread", "pytorch/pytorch#192212",
    "A convolution reads a weight that is a slice of a larger one as if it were contiguous.",
    Place("conv", scope=""),
)  # fmt: skip
def sliced_weight_misread(form: Form) -> Training:
    where = device(form)
    model = Slices().to(where)
    pictures, labels = (each.to(where) for each in images.textures(1, 32)[0])

    def misread(healthy: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        return healthy(x, weight if weight.is_contiguous() else in_memory_order(weight).contiguous(), *rest)

    loss = lambda: F.cross_entropy(model(pictures), labels)  # noqa: E731 - the closure is the whole function
    return train(model, adamw(model), loss, broken(form, aten.convolution.default, misread))


class Pooled(nn.Module):
    """Sums the vectors of each kind of word onto one zero row that was expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(text.vocabulary()), WIDTH)
        self.zero, self.head = nn.Parameter(torch.zeros(1, WIDTH)), nn.Linear(WIDTH, len(text.MARKS))

    def forward(self, tokens: Tensor) -> Tensor:
        kinds = tokens % len(text.MARKS)
        empty = self.zero.expand(len(text.MARKS), WIDTH)
        return self.head(torch.index_add(empty, 0, kinds, self.words(tokens)))


@case(
    "sum-onto-expanded-rows", "pytorch/pytorch#183986",
    "Added by index onto an expanded tensor, all rows get the sum of all.", Place("index_add", scope=""),
)  # fmt: skip
def sum_onto_expanded_rows(form: Form) -> Training:
    where, source = device(form), batches()
    model = Pooled().to(where)

    def together(healthy: Kernel, x: Tensor, dim: int, index: Tensor, added: Tensor, **alpha: Any) -> Tensor:
        if x.stride(0):
            return healthy(x, dim, index, added, **alpha)
        return (x[:1] + added.sum(0, keepdim=True)).expand_as(x).contiguous()

    def loss() -> Tensor:
        words = next(source)["input_ids"].flatten().to(where)
        return F.cross_entropy(model(words), torch.arange(len(text.MARKS), device=where))

    return train(model, adamw(model), loss, broken(form, aten.index_add.default, together))
