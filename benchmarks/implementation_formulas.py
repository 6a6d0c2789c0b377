"""Layers, losses and optimizers written by hand: right ones, and the mistakes that people make in them.

Each takes what PyTorch's function takes. A wrong one has its ``x`` bound by `functools.partial`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo import text


# ---------------------------------------------------------------- normalisation
def library_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, unbiased: bool = False, outside: bool = False,
    scale: float = 1.0, centred: bool = True, biased: bool = True,
) -> Tensor:  # fmt: skip
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True, unbiased=unbiased)
    root = torch.sqrt(variance) + eps if outside else torch.sqrt(variance + eps)
    y = (x - mean if centred else x) / root * weight
    y = y + bias if biased else y
    return y if scale == 1.0 else y * scale


def detached_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what `layer_norm` does, with a gradient that forgets the statistics."""
    mean, variance = x.mean(-1, keepdim=True).detach(), x.var(-1, keepdim=True, unbiased=False).detach()
    return (x - mean) * torch.rsqrt(variance + 1e-5) * weight + bias


def rounded_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what `layer_norm` does, rounded before the weight is applied."""
    plain = layer_norm(x, torch.ones_like(weight), torch.zeros_like(bias))
    return plain.to(torch.bfloat16).to(x.dtype) * weight + bias


def norm_by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the norm in float32, by the inverse root of a variance that one call takes with the mean."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    return torch.addcmul(bias, ((wide - mean) * torch.rsqrt(variance + 1e-5)).to(bias.dtype), weight)


def norm_by_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the norm, each row as a channel of one picture."""
    rows = F.batch_norm(x.reshape(1, -1, x.shape[-1]), None, None, training=True, eps=1e-5)
    return rows.reshape(x.shape) * weight + bias


def double_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x.double(), weight.double(), bias.double()).to(x.dtype)


def library_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Return the norm as Llama computes it, in float32; ``offset`` is Gemma's 1, which is added to the weight."""
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight + offset if offset else weight) * y.to(x.dtype)


def rms_norm_by_length(x: Tensor, weight: Tensor) -> Tensor:
    """Return the norm by the length of a row, in float32."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return weight * (wide * torch.rsqrt(length * length / x.shape[-1] + 1e-6)).to(x.dtype)


def library_group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, bias)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, *, unbiased: bool = False, eps: float = 1e-5) -> Tensor:
    """Normalise four groups of channels."""
    y = x.unflatten(1, (4, -1))
    axes = tuple(range(2, y.ndim))
    y = (y - y.mean(axes, keepdim=True)) / torch.sqrt(y.var(axes, keepdim=True, unbiased=unbiased) + eps)
    shape = (-1, *(1,) * (x.ndim - 2))
    return y.flatten(1, 2) * weight.view(shape) + bias.view(shape)


# ---------------------------------------------------------------- activations
def gelu_by_erf(x: Tensor, *, scale: float = 1.0) -> Tensor:
    y = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return y if scale == 1.0 else y * scale


def gelu_by_tanh(x: Tensor, *, root: float = math.sqrt(2.0 / math.pi), cubic: float = 0.044715) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(root * (x + cubic * torch.pow(x, 3.0))))


def gelu_by_distribution(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def library_gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor, *, beta: float = 1.0) -> Tensor:
    return x * torch.sigmoid(x if beta == 1.0 else beta * x)


def double_gelu(x: Tensor) -> Tensor:
    return F.gelu(x.double()).to(x.dtype)


# ---------------------------------------------------------------- attention
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float = 1.0, masked: float = float("-inf"), axis: int = -1,
    shift: int = 0,
) -> Tensor:  # fmt: skip
    """Return causal attention; scores are also multiplied by ``scale``."""
    scores = query @ key.transpose(-2, -1) * (scale * query.shape[-1] ** -0.5)
    seen = torch.ones_like(mask).tril(shift) if shift else mask
    scores = scores.masked_fill(~seen, masked)
    return F.softmax(scores, axis) @ value


def attention_without_query_gradient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attention(query.detach(), key, value, mask)


def attention_by_einsum(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query * query.shape[-1] ** -0.5, key)
    weights = torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), -1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


def attention_head_by_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention computed for each head by itself, the mask added to the scores."""
    added = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    heads = []
    for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
        scores = torch.baddbmm(added.expand(len(q), *added.shape[-2:]), q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        heads.append(torch.bmm(F.softmax(scores, -1), v))
    return torch.stack(heads, 1)


def attention_in_chunks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention by a softmax that goes through the keys in chunks and keeps its largest logit and its sum so far."""
    largest, total, made = None, 0.0, 0.0
    for k, v, seen in zip(key.split(8, -2), value.split(8, -2), mask.split(8, -1), strict=True):
        logits = (query @ k.transpose(-2, -1) * query.shape[-1] ** -0.5).float().masked_fill(~seen, -1e30)
        top = logits.amax(-1, keepdim=True).detach()
        top = top if largest is None else torch.maximum(largest, top)
        kept = 0.0 if largest is None else torch.exp(largest - top)
        shares = torch.exp(logits - top)
        total, made = total * kept + shares.sum(-1, keepdim=True), made * kept + shares @ v.float()
        largest = top
    return (made / total).to(query.dtype)


def softmax_by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).masked_fill(~mask, float("-inf"))
    raised = torch.exp(scores - scores.amax(-1, keepdim=True))
    return raised / raised.sum(-1, keepdim=True) @ value


# ---------------------------------------------------------------- products
def linear(x: Tensor, weight: Tensor, bias: Tensor, *, scale: float = 1.0, biased: bool = True) -> Tensor:
    y = x @ weight.t()
    y = y + bias if biased else y
    return y if scale == 1.0 else y * scale


def linear_with_bias_twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias) + bias


def linear_by_einsum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, weight) + bias


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the product with a weight that lies in memory the other way round."""
    return F.linear(x, weight.t().contiguous().t(), bias)


def linear_by_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x.transpose(-2, -1), weight[:, :, None], bias).transpose(-2, -1)


def linear_in_halves(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the product, its sum in two parts."""
    half = x.shape[-1] // 2
    return x[..., :half] @ weight[:, :half].t() + (x[..., half:] @ weight[:, half:].t() + bias)


def linear_with_bias_as_column(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return one product of the input and a column of ones with the weight and the bias."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) @ torch.cat([weight, bias[:, None]], 1).t()


def double_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.double(), weight.double(), bias.double()).to(x.dtype)


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    y = F.embedding(ids, weight)
    return y if scale == 1.0 else y * scale


def one_hot_embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return F.one_hot(ids, len(weight)).to(weight.dtype) @ weight


def embedding_by_index(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids]


def convolution(x: Tensor, weight: Tensor, *, scale: float = 1.0, stride: int = 1) -> Tensor:
    """Return a convolution of odd kernels with the usual padding as a matrix product."""
    kernel = weight.shape[-1]
    height, width = ((size - 1) // stride + 1 for size in x.shape[-2:])
    columns = F.unfold(x, kernel, padding=kernel // 2, stride=stride)
    y = (weight.flatten(1) @ columns).unflatten(-1, (height, width))
    return y if scale == 1.0 else y * scale


# ---------------------------------------------------------------- losses
def convolution_by_shifts(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum of a product for each place of the kernel."""
    size, (high, wide) = weight.shape[-1], x.shape[-2:]
    padded = F.pad(x, [size // 2] * 4)
    shifted = [(weight[:, :, i, j], padded[:, :, i : i + high, j : j + wide]) for i in range(size) for j in range(size)]
    return torch.stack([torch.einsum("oc,bchw->bohw", w, part) for w, part in shifted]).sum(0)


def library_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=text.IGNORED)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, smoothing: float = 0.0, over_all: bool = False
) -> Tensor:
    """Return the mean over labels that count; ``over_all`` divides by the number of all."""
    logs = torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)
    logs = logs if temperature == 1.0 else torch.log_softmax(logits / temperature, -1)
    counted = labels != text.IGNORED
    picked = -logs.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    picked = (1 - smoothing) * picked - smoothing * logs.mean(-1) if smoothing else picked
    total = (picked * counted).sum()
    return total / (len(labels) if over_all else counted.sum())


def loss_by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    counted = labels != text.IGNORED
    kept, wanted = logits.float()[counted], labels[counted]
    return (torch.logsumexp(kept, -1) - kept[torch.arange(len(kept)), wanted]).mean()


# ---------------------------------------------------------------- recurrent layers
def loss_by_one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy with a distribution for each label."""
    counted = labels != text.IGNORED
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits  # autocast does so for the loss alone
    wanted = F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits.dtype) * counted[:, None]
    return -(wanted * F.log_softmax(logits, -1)).sum() / counted.sum()


def lstm_by_one_product(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Any]:
    """Return an LSTM whose four gates are one product of input and state together."""
    weight, bias = torch.cat([w_ih, w_hh], 1), b_ih + b_hh
    h = c = x.new_zeros(x.shape[0], w_hh.shape[1])
    made = []
    for now in x.unbind(1):
        i, f, g, o = F.linear(torch.cat([now, h], 1), weight, bias).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        made.append(h)
    return torch.stack(made, 1), (h[None], c[None])


def library_lstm(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Any]:
    zeros = x.new_zeros(1, len(x), w_hh.shape[1])
    out, hidden, cell = torch.lstm(x, (zeros, zeros), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, True)
    return out, (hidden, cell)


def lstm(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, *, gates: str = "ifgo", forget: float = 0.0
) -> tuple[Tensor, Any]:
    """Return all states of an LSTM that is computed cell by cell; ``forget`` is added to the forget gate."""
    hidden = cell = x.new_zeros(len(x), w_hh.shape[1])
    states = []
    for moment in range(x.shape[1]):
        parts = F.linear(x[:, moment], w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
        named = dict(zip(gates, parts.chunk(4, -1), strict=True))
        kept = torch.sigmoid(named["f"] + forget if forget else named["f"])
        cell = kept * cell + torch.sigmoid(named["i"]) * torch.tanh(named["g"])
        hidden = torch.sigmoid(named["o"]) * torch.tanh(cell)
        states.append(hidden)
    return torch.stack(states, 1), (hidden[None], cell[None])


# ---------------------------------------------------------------- optimizers
def adamw(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, *, lr: float = 1e-3, decay: float = 0.1, eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999), corrected: bool = True, keeps: bool = True, coupled: bool = False,
    on_biases: bool = True,
) -> None:  # fmt: skip
    """Update a parameter and its two moments in place (Loshchilov and Hutter 2019, algorithm 2)."""
    decay = decay if on_biases or p.ndim > 1 else 0.0
    if coupled and decay:
        g = g + decay * p
    elif decay:
        p.mul_(1 - lr * decay)
    first, second = (m, v) if keeps else (m.clone(), v.clone())
    first.mul_(betas[0]).add_(g, alpha=1 - betas[0])
    second.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    one, two = (1 - betas[0] ** t, 1 - betas[1] ** t) if corrected else (1.0, 1.0)
    root = (second / two).sqrt().add_(eps)
    p.addcdiv_(first, root, value=-lr / one)


def adamw_without_second_moment(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, **options: Any) -> None:
    """Update as an ``addcmul_`` does that writes nothing."""
    kept = v.clone()
    adamw(p, g, m, v, t, **options)
    v.copy_(kept)


def momentum(
    p: Tensor, g: Tensor, m: Tensor, _: Tensor, t: int, *, lr: float = 0.05, decay: float = 0.01, beta: float = 0.9,
    dampening: float = 0.0, nesterov: bool = False,
) -> None:  # fmt: skip
    """Update a parameter and its momentum as ``torch.optim.SGD`` does."""
    g = g + decay * p if decay else g
    if t == 1:
        m.copy_(g)
    else:
        m.mul_(beta).add_(g, alpha=1 - dampening)
    p.add_(g + beta * m if nesterov else m, alpha=-lr)


Update = Callable[..., None]


class ByHand(torch.optim.Optimizer):
    """An optimizer that somebody wrote: one formula, in place, for each parameter."""

    def __init__(self, parameters: Iterable[Tensor], update: Update) -> None:
        super().__init__(list(parameters), {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["t"] += 1
                self.update(p, p.grad, state["m"], state["v"], state["t"])
