"""Training loops by what they compute: `build("penalty", "npu").iterate()`, for all that has broken observers before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapters.loops import WIDTH, Loop, Mlp


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor], device: str) -> Loop:
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)

    def iterate() -> Tensor:
        optimizer.zero_grad()
        out = loss(model)
        out.backward()
        optimizer.step()
        return out

    return Loop([model], iterate, [optimizer])


def numbers(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device)


class Views(nn.Module):
    """Writes through views, into slices, into a buffer of its own, into a result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("memory", torch.zeros(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y[:, :4].mul_(2)
        y[:, 4:8] *= 0.5
        y.view(-1, 2, 8)[:, 0].add_(1)
        left, right = y.narrow(1, 0, 8), y.narrow(1, 8, 8)
        y = torch.cat((left.sigmoid_().clone(), right), 1)
        with torch.no_grad():
            self.memory.mul_(0.5).add_(y[:4].detach())
        y = y + self.memory
        y.t()[3].zero_()
        out = torch.empty_like(x)
        out.copy_(self.down(y))
        out.masked_fill_(out > 2, 0.0)
        return out.squeeze_(0).clamp_(-3, 3)


def double(p: Tensor) -> None:
    p.grad.mul_(2)


class Hooked(Mlp):
    """Hooks of the user's own that change values, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
        self.up.register_forward_hook(lambda m, args, out: out + 1)
        self.norm.register_forward_hook(lambda m, args, kwargs, out: out * 2, with_kwargs=True)
        self.down.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 3,))
        self.down.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 0.5,))
        self.up.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        self.down.bias.register_post_accumulate_grad_hook(double)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(lambda gradient: gradient * 1.5)
        return out


class Sequence(nn.Module):
    """The recurrent layers, packed and not, and a cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 6, 2, bidirectional=True, dropout=0.2, proj_size=0)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
        y, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        y, _ = self.gru(y)
        h = c = torch.zeros_like(y[0])
        for one in y:
            h, c = self.cell(one, (h, c))
        return h


class Attention(nn.Module):
    """nn.Transformer with masks, and nn.MultiheadAttention with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 16, batch_first=True, dropout=0.1)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y = self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True)
        out, weights = self.attention(y, y, y, need_weights=True)
        return out + weights.sum(-1, keepdim=True)


class Exponential(torch.autograd.Function):
    """A custom function that can be differentiated twice, with functions inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clamp(max=3).exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return gradient * out


class Custom(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return Exponential.apply(super().forward(x))


def penalty(device: str) -> Loop:
    """WGAN-GP: the gradient of the output by the input is part of the loss."""

    def loss(model: nn.Module) -> Tensor:
        x = numbers(device, 4, WIDTH).requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()

    return trained(Custom(), loss, device)


def per_sample(device: str) -> Loop:
    """torch.func: gradients for each sample, an ensemble by functional_call, a directional derivative."""

    def loss(model: nn.Module) -> Tensor:
        parameters = dict(model.named_parameters())
        x = numbers(device, 4, WIDTH)

        def one(held: dict[str, Tensor], sample: Tensor) -> Tensor:
            return torch.func.functional_call(model, held, (sample[None],)).square().sum()

        held = {k: p.detach() for k, p in parameters.items()}
        each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(held, x)
        _, slope = torch.func.jvp(lambda v: one(held, v), (x[0],), (x[1],))
        noise = sum(g.square().sum() for g in each.values()) + slope
        return model(x).square().mean() * (1 + noise.detach() * 1e-3)

    return trained(Mlp(), loss, device)


def spectral(device: str) -> Loop:
    """Complex numbers in the middle."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(self.mix(x)) * self.weight, n=WIDTH)

    return trained(Filter(), lambda model: model(numbers(device, 4, WIDTH)).square().mean(), device)


def images(device: str) -> Loop:
    """Channels last, a frozen stem, an evaluation between two steps."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    model = nn.Sequential(*stem, nn.Conv2d(4, 4, 3), nn.Dropout(0.3))
    model[0].requires_grad_(False)
    model = model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module) -> Tensor:
        x = numbers(device, 2, 3, 6, 6).to(memory_format=torch.channels_last)
        model.eval()
        with torch.no_grad():
            level = model(x).square().mean()
        with torch.inference_mode():
            model(x)
        model.train()
        return (model(x).square().mean() - level).square()

    return trained(model, loss, device)


def graph(device: str) -> Loop:
    """A graph convolution: a sparse matrix times features, COO and CSR."""
    edges = torch.rand(6, 6) < 0.4
    coo, csr = (edges.float() / 2).to_sparse(), (edges.t().float() / 3).to_sparse_csr()

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.value = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(coo._nnz()))

        def forward(self, x: Tensor) -> Tensor:
            learned = torch.sparse_coo_tensor(coo._indices(), self.value, coo.shape, is_coalesced=True)
            return torch.sparse.mm(learned, self.mix(x)) + csr @ x.tanh()

    return trained(Convolution(), lambda model: model(numbers(device, 6, WIDTH)).square().mean(), device)


def ragged(device: str) -> Loop:
    """A batch of sentences of different lengths as a jagged tensor."""

    def loss(model: nn.Module) -> Tensor:
        batch = torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (2, 5, 3)], layout=torch.jagged)
        out = F.silu(model[1](F.relu(model[0](batch))))
        return out.values().square().mean()

    return trained(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)), loss, device)


def narrow(device: str) -> Loop:
    """A layer that rounds its weight to fp8 on the way, straight through."""

    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            narrow = self.weight.to(torch.float8_e4m3fn).to(self.weight.dtype)
            return F.linear(x, self.weight + (narrow - self.weight).detach(), self.bias)

    return trained(Rounded(WIDTH, WIDTH), lambda model: model(numbers(device, 4, WIDTH)).square().mean(), device)


def plain(make: Callable[[], nn.Module], *shape: int) -> Callable[[str], Loop]:
    return lambda device: trained(make(), lambda model: model(numbers(device, *shape)).square().mean(), device)


COMPUTATIONS: dict[str, Callable[[str], Loop]] = {
    "views": plain(Views, 4, WIDTH),
    "hooks": plain(Hooked, 4, WIDTH),
    "sequence": plain(Sequence, 5, 3, WIDTH),
    "attention": plain(Attention, 2, 5, WIDTH),
    "custom": plain(Custom, 4, WIDTH),
    "penalty": penalty,
    "per sample": per_sample,
    "spectral": spectral,
    "images": images,
    "graph": graph,
    "ragged": ragged,
    "narrow": narrow,
}

ON_THE_CPU_ONLY = ("graph", "ragged", "per sample")
"""The simulated device has no sparse and no nested tensors, and torch.func does not see through it."""


def build(name: str, device: str) -> Loop:
    """Seed everything and build a loop."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return COMPUTATIONS[name](device)
