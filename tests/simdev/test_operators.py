"""A healthy npu gives the CPU's bits, forward and backward, for the operators that training uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .zoo import CASES, train


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def _index(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(3))


# name -> (function of floating inputs, shapes of these)
CALLS = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(2, 3, 8), (4, 3, 3)]),
    "conv2d-grouped": (lambda x, w, b: F.conv2d(x, w, b, 2, 1, groups=2), [(2, 4, 8, 8), (6, 2, 3, 3), (6,)]),
    "conv3d": (lambda x, w: F.conv3d(x, w), [(1, 2, 4, 4, 4), (3, 2, 2, 2, 2)]),
    "conv-transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 4, 5, 5), (4, 3, 2, 2)]),
    "batch-norm-train": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(4, 3, 5, 5), (3,), (3,)]),
    "batch-norm-eval": (
        lambda x, w: F.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, None, False), [(4, 3, 5), (3,)]
    ),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(3, 5, 6), (6,), (6,)]),
    "group-norm": (lambda x, w: F.group_norm(x, 2, w), [(2, 4, 3, 3), (4,)]),
    "instance-norm": (lambda x: F.instance_norm(x), [(2, 4, 3, 3)]),
    "rms-norm": (lambda x, w: F.rms_norm(x, (6,), w), [(3, 6), (6,)]),
    "max-pool": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), [(2, 3, 7, 7)]),
    "avg-pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), [(2, 3, 7, 7)]),
    "adaptive-pools": (lambda x: F.adaptive_avg_pool2d(x, 2) + F.adaptive_max_pool2d(x, 2), [(2, 3, 7, 7)]),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), [(2, 3, 4, 4)]),
    "bilinear": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), [(2, 3, 4, 4)]),
    "bicubic": (lambda x: F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=True), [(2, 3, 4, 4)]),
    "grid-sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), [(2, 3, 4, 4), (2, 5, 5, 2)]),
    "pad": (lambda x: F.pad(x, (1, 2)) + F.pad(x, (1, 2), mode="reflect"), [(2, 3, 6)]),
    "softmax": (lambda x: x.softmax(-1) * x.log_softmax(0), [(4, 5)]),
    "losses": (
        lambda x, y: sum(loss(x, y) for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss))
        + F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        [(4, 5), (4, 5)],
    ),
    "activations": (
        lambda x: sum(f(x) for f in (F.gelu, F.silu, F.mish, F.elu, F.softplus, F.hardswish, F.tanh, F.selu)),
        [(4, 5)],
    ),
    "sort": (lambda x: x.sort(-1)[0] + x.sort(stable=True, dim=0)[0], [(4, 5)]),
    "topk": (lambda x: x.topk(2)[0].sum(-1) + x.max(1)[0] + x.median(1)[0], [(4, 5)]),
    "reductions": (lambda x: x.sum(0) + x.mean((0,)) + x.var(0) + x.std(0) + x.norm(dim=0) + x.logsumexp(0), [(4, 5)]),
    "cumulative": (lambda x: x.cumsum(1) + x.cumprod(0), [(4, 5)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [(2, 3, 4), (2, 4, 5)]),
    "matmuls": (lambda x, y: torch.baddbmm(x @ y, x, y, alpha=0.5) + torch.bmm(x, y), [(2, 3, 4), (2, 4, 5)]),
    "cat-stack-split": (lambda x, y: torch.cat([torch.stack([x, y]), *torch.stack([y, x]).split(1)]), [(2, 3), (2, 3)]),
    "complex": (lambda x: torch.view_as_real(torch.fft.rfft(x) * 2j), [(3, 8)]),
    "linalg": (lambda x: torch.linalg.solve(x @ x.mT + torch.eye(4, device=x.device), x), [(4, 4)]),
    "roll-flip": (lambda x: x.roll(2, 1) + x.flip(0) + x.tril() + x.rot90(), [(4, 4)]),
    "zeros-without-memory": (lambda x: x.sgn() + x * x, [(4, 5)]),  # what the backward of sgn returns
    "where-clamp": (lambda x, y: torch.where(x > 0, x.clamp(max=0.5), y).masked_fill(y > 1, 3.0), [(4, 5), (4, 5)]),
}  # fmt: skip

# name -> (function of a floating input and an integer tensor, shapes of both)
INDEXED = {
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=1), (6, 4), (3, 5)),
    "embedding-bag": (lambda w, i: F.embedding_bag(i, w, mode="mean"), (6, 4), (3, 5)),
    "cross-entropy": (lambda x, i: F.cross_entropy(x, i[:, 0], ignore_index=2, label_smoothing=0.1), (5, 4), (5, 1)),
    "cross-entropy-2d": (lambda x, i: F.cross_entropy(x, i), (2, 4, 3, 3), (2, 3, 3)),
    "gather": (lambda x, i: x.gather(1, i), (5, 4), (5, 6)),
    "scatter-add": (lambda x, i: torch.zeros(5, 4, device=x.device).scatter_add(1, i, x), (5, 6), (5, 6)),
    "scatter": (lambda x, i: x.scatter(1, i, 2.0), (5, 4), (5, 2)),
    "index": (lambda x, i: x[i] + x[:, i[0, 0]], (4, 4), (3, 4)),
    "index-put": (
        lambda x, i: torch.zeros(4, 5, device=x.device).index_put((i[:, 0],), x, accumulate=True),
        (3, 5),
        (3, 1),
    ),
    "index-select-add": (
        lambda x, i: x.index_select(0, i[0]).index_add(0, i[0], x.index_select(0, i[0])),
        (4, 5),
        (1, 4),
    ),
    "one-hot": (lambda x, i: F.one_hot(i, 4) * x, (3, 5, 4), (3, 5)),
}


# PyTorch's own formulas decompose these differently for tensor subclasses (areAnyTensorSubclassLike).
CLOSE = {"prod": (lambda x: x.prod(0), [(4, 5)])}


def _run(function, floats, integers, device):
    inputs = [x.clone().to(device).requires_grad_() for x in floats]
    output = function(*inputs, *[i.to(device) for i in integers])
    output.square().sum().backward()
    return [output.detach().cpu(), *[x.grad.cpu() for x in inputs if x.grad is not None]]


def _same(function, floats, integers=()):
    left, right = _run(function, floats, integers, "cpu"), _run(function, floats, integers, "npu")
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CALLS)
def test_call(name):
    function, shapes = CALLS[name]
    _same(function, [_input(*shape) for shape in shapes])


@pytest.mark.parametrize("name", CLOSE)
def test_call_is_close(name):
    function, shapes = CLOSE[name]
    floats = [_input(*shape) for shape in shapes]
    for a, b in zip(_run(function, floats, (), "cpu"), _run(function, floats, (), "npu"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", INDEXED)
def test_indexed_call(name):
    function, shape, index = INDEXED[name]
    _same(function, [_input(*shape)], [_index(*index)])


@pytest.mark.parametrize(
    "settings", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
)
def test_attention(settings):
    def attend(q, k, v):
        mask = settings.get("attn_mask")
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, **settings)
        allowed = torch.ones(6, 6, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed if mask == "bool" else allowed.float())

    _same(attend, [_input(2, 3, 6, 8) for _ in range(3)])


def test_attention_grouped_and_three_dimensional():
    def grouped(q, k):
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    _same(grouped, [_input(2, 4, 6, 8), _input(2, 2, 6, 8)])
    _same(lambda q: F.scaled_dot_product_attention(q, q, q), [_input(3, 6, 8)])


def test_attention_with_dropout_and_with_a_learned_bias():
    def dropped(q):
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    for function, shapes in (
        (dropped, [(2, 3, 6, 8)]),
        (lambda q, bias: F.scaled_dot_product_attention(q, q, q, attn_mask=bias), [(2, 3, 6, 8), (6, 6)]),
    ):
        floats = [_input(*shape) for shape in shapes]
        for a, b in zip(_run(function, floats, (), "cpu"), _run(function, floats, (), "npu"), strict=True):
            torch.testing.assert_close(a, b)


def test_attention_backend_can_be_forced_to_the_decomposition():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        _same(lambda q: F.scaled_dot_product_attention(q, q, q), [_input(2, 3, 6, 8)])


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_are_close(cell, bias):
    def sides(device):
        torch.manual_seed(2)
        layer = cell(5, 6, 2, bias=bias, bidirectional=True).to(device)
        x = _input(7, 3, 5).to(device).requires_grad_()
        output, hidden = layer(x)
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        (output.square().sum() + sum(h.sin().sum() for h in hidden)).backward()
        return [output.detach().cpu(), x.grad.cpu(), *[p.grad.cpu() for p in layer.parameters()]]

    for a, b in zip(sides("cpu"), sides("npu"), strict=True):
        assert (a - b).norm() <= 2e-6 * a.norm()


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_gradients_against_float64_differences(cell):
    torch.manual_seed(0)
    layer = cell(3, 4).double().npu()
    x = torch.randn(3, 2, 3, dtype=torch.float64).npu()
    loss = lambda: layer(x)[0].square().sum()  # noqa: E731
    loss().backward()
    for parameter in layer.parameters():
        with torch.no_grad():
            values = []
            for step in (1e-6, -2e-6):
                parameter[0].add_(step)
                values.append(loss().item())
            parameter[0].add_(1e-6)
        assert parameter.grad[0].sum().item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_packed_sequence():
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    results = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        layer = nn.LSTM(3, 4, batch_first=True).to(device)
        packed = pack_padded_sequence(_input(2, 5, 3).to(device), torch.tensor([5, 3]), batch_first=True)
        results.append(pad_packed_sequence(layer(packed)[0], batch_first=True)[0].detach().cpu())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("train", [True, False])
def test_transformer_layers(train):
    def sides(device):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device).train(train)
        attention = nn.MultiheadAttention(8, 2, batch_first=True).to(device).train(train)
        x = _input(2, 5, 8).to(device).requires_grad_()
        output, weights = attention(layer(x), x, x)
        output.square().sum().backward()
        return [output.detach().cpu(), weights.detach().cpu(), x.grad.cpu()]

    for a, b in zip(sides("cpu"), sides("npu"), strict=True):
        torch.testing.assert_close(a, b)


OPTIMIZERS = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
    "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, **k),
    "rmsprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **k),
}
FORMS = [
    (name, form)
    for name in OPTIMIZERS
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}, {})
    if not (name == "rmsprop" and "fused" in form)
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_optimizer(name, form):
    def sides(device):
        torch.manual_seed(0)
        layer = nn.Linear(5, 6).to(device)
        optimizer = OPTIMIZERS[name](layer.parameters(), **form)
        for _ in range(3):
            optimizer.zero_grad()
            layer(_input(4, 5).to(device)).square().sum().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        return [p.detach().cpu() for p in layer.parameters()]

    for a, b in zip(sides("cpu"), sides("npu"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_model_trains_as_on_the_cpu(name):
    cpu, npu = train(CASES[name], "cpu"), train(CASES[name], "npu")
    assert npu.losses[-1] < npu.losses[0]
    if CASES[name].bitwise:
        assert cpu.losses == npu.losses
        assert all(torch.equal(value, npu.state[key]) for key, value in cpu.state.items())
        return
    assert cpu.losses == pytest.approx(npu.losses, rel=1e-5)
    for key, gradient in cpu.gradients[0].items():
        assert (gradient - npu.gradients[0][key]).norm() <= 1e-5 * gradient.norm() + 1e-9, key


def test_backward_twice_into_one_gradient():
    layer = nn.Linear(3, 3).npu()
    for _ in range(2):
        layer(_input(2, 3).npu()).sum().backward()
    twin = nn.Linear(3, 3)
    twin.load_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
    for _ in range(2):
        twin(_input(2, 3)).sum().backward()
    assert torch.equal(layer.weight.grad.cpu(), twin.weight.grad)
