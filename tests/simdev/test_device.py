"""The device behaves as a device: placement, views, random numbers, files, autocast, threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nursery import HUNG, Nursery
from trueup import simdev
from trueup.foundation.model import TrueupError


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(simdev.raw(a.detach()), simdev.raw(b.detach()))


def test_module_functions():
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.current_device() == 0
    torch.npu.set_device("npu:0")
    torch.npu.synchronize()
    torch.npu.empty_cache()
    assert torch.npu.memory_allocated() >= 0
    assert torch.npu.max_memory_allocated() >= torch.npu.memory_allocated() // 2
    assert torch.bfloat16 in torch.npu.get_amp_supported_dtype()
    assert torch.npu.matmul.allow_hf32 is False
    assert torch.npu.conv.allow_hf32 is False
    with pytest.raises(RuntimeError, match="invalid device ordinal 3"):
        torch.npu.set_device(3)
    simdev.install()  # a second time


@pytest.mark.parametrize("place", ["npu", "npu:0", ("npu",), ("npu", 0)])
def test_placement(place):
    place = torch.device(*place) if isinstance(place, tuple) else place
    x = torch.arange(6.0).to(place)
    assert str(x.device) == "npu:0"
    assert x.is_npu
    assert x.cpu().device.type == "cpu"
    assert torch.zeros(2, device=place).device == x.device
    assert nn.Linear(2, 2).to(place).weight.device == x.device
    assert nn.Linear(2, 2, device=place).weight.device == x.device
    assert torch.zeros_like(torch.ones(2), device=place).device == x.device
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert torch.empty(2, device="npu", pin_memory=False).device == x.device
    assert nn.Linear(2, 2).npu().weight.device == x.npu().device


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.tensor([[1.0, 2.0]], device=d),
        lambda d: torch.tensor([], device=d),
        lambda d: torch.tril_indices(3, 3, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.full((2,), 3, device=d),
        lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
        lambda d: torch.ones(2, device=d).new_zeros(3),
        lambda d: torch.as_tensor([1.0], device=d),
        lambda d: torch.asarray([1.0], device=d),
        lambda d: torch.scalar_tensor(2.0, device=d),
    ],
)
def test_factories(make):
    assert make("npu").device.type == "npu"
    assert same(make("npu"), make("cpu"))


def test_default_device_and_context():
    with torch.device("npu"):
        assert torch.ones(2).device.type == "npu"
        assert nn.Linear(2, 2).weight.device.type == "npu"


DRAWS = [
    lambda d: torch.randn(5, device=d),
    lambda d: torch.rand(5, 33, device=d),
    lambda d: torch.randperm(40, device=d),
    lambda d: torch.randint(0, 9, (17,), device=d),
    lambda d: torch.empty(40, device=d).normal_(),
    lambda d: torch.empty(40, device=d).uniform_(-1, 1),
    lambda d: torch.empty(40, device=d).bernoulli_(0.3),
    lambda d: torch.empty(40, device=d).exponential_(),
    lambda d: torch.bernoulli(torch.full((40,), 0.5, device=d)),
    lambda d: torch.multinomial(torch.ones(40, device=d), 5),
    lambda d: torch.randn_like(torch.ones(7, device=d)),
    lambda d: torch.normal(torch.zeros(5, device=d), torch.ones(5, device=d)),
    lambda d: F.dropout(torch.ones(9, 31, device=d), 0.3),
    lambda d: F.dropout(torch.ones(9, 31, device=d).t(), 0.3),
    lambda d: F.dropout2d(torch.ones(2, 5, 3, 3, device=d), 0.5),
    lambda d: F.alpha_dropout(torch.ones(50, device=d), 0.3),
    lambda d: F.rrelu(-torch.ones(50, device=d), training=True),
    lambda d: nn.init.kaiming_uniform_(torch.empty(5, 6, device=d)),
    lambda d: F.gumbel_softmax(torch.zeros(3, 4, device=d)),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_are_those_of_the_cpu(draw):
    torch.manual_seed(5)
    on_cpu = [draw("cpu"), draw("cpu")]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    on_npu = [draw("npu"), draw("npu")]
    assert all(map(same, on_cpu, on_npu))
    assert torch.equal(state, torch.npu.get_rng_state())


def test_random_state():
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert same(first, torch.rand(3, device="npu"))
    torch.npu.set_rng_state_all(torch.npu.get_rng_state_all())
    with torch.random.fork_rng(device_type="npu"):
        inside = torch.rand(1, device="npu")
    assert same(inside, torch.rand(1, device="npu"))


def test_dropout_gradient():
    grads = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        x = torch.ones(20, 20, device=device, requires_grad=True)
        F.dropout(x, 0.4).sum().backward()
        grads.append(x.grad.cpu())
    torch.testing.assert_close(grads[0], grads[1])


def test_views_share_storage_and_versions():
    base = torch.zeros(4, 6, device="npu")
    view = base[1:, ::2].t()
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.stride() == (2, 6)
    assert view.storage_offset() == 6
    assert view._is_view()
    before = base._version
    view.add_(1)
    assert base._version == view._version == before + 1
    assert base.sum().item() == 9
    assert simdev.raw(view).data_ptr() == simdev.raw(base)[1:].data_ptr()
    pieces = base.chunk(2)
    assert {piece.untyped_storage()._cdata for piece in pieces} == {base.untyped_storage()._cdata}
    assert base.clone().untyped_storage()._cdata != base.untyped_storage()._cdata
    assert base.detach().untyped_storage()._cdata == base.untyped_storage()._cdata
    assert base.untyped_storage().nbytes() == 96


def test_in_place_on_view_has_the_gradient():
    grads = []
    for device in ("cpu", "npu"):
        x = torch.arange(12.0, device=device).reshape(3, 4).requires_grad_()
        y = x * 2
        y[:, 1].mul_(3)
        F.relu_(y[1:])
        y.square().sum().backward()
        grads.append(x.grad.cpu())
    assert torch.equal(*grads)


def test_metadata_changes():
    x = torch.arange(6.0, device="npu").reshape(2, 3)
    storage = x.untyped_storage()._cdata
    x.t_()
    assert x.shape == (3, 2)
    assert x.stride() == (1, 3)
    assert x.untyped_storage()._cdata == storage
    x.unsqueeze_(0)
    assert x.tolist() == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]
    y = torch.empty(0, device="npu").resize_(2, 5)
    assert y.shape == (2, 5)
    assert y.fill_(1).sum().item() == 10
    y.set_(x)
    assert y.shape == x.shape
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
    out = torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert out.shape == x.shape
    x.data = torch.ones(5, device="npu")
    assert x.sum().item() == 5
    assert (x + 1).shape == (5,)


def test_channels_last_and_expanded_strides():
    x = torch.randn(2, 3, 4, 4).to("npu", memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    y = nn.Conv2d(3, 5, 3, padding=1).npu().to(memory_format=torch.channels_last)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.ones(1, 3, device="npu").expand(4, 3).stride() == (0, 1)
    assert x[:, 1].contiguous().is_contiguous()


def test_mixed_devices_are_refused():
    with pytest.raises(RuntimeError, match=r"at least two devices, npu:0 and cpu! \(when running aten::add.Tensor\)"):
        torch.ones(2, device="npu") + torch.ones(2)
    with pytest.raises(RuntimeError, match="two devices"):
        nn.Linear(2, 2).npu()(torch.ones(1, 2))
    assert (torch.ones(2, device="npu") * torch.tensor(3.0)).tolist() == [3, 3]
    assert torch.ones(3, device="npu")[torch.tensor([0, 2])].shape == (2,)
    host = torch.zeros(2)
    host.copy_(torch.ones(2, device="npu"))
    assert host.tolist() == [1, 1]


def test_leaving_the_device():
    x = torch.tensor([[1.5, 2.5]], device="npu", requires_grad=True)
    assert x[0, 1].item() == 2.5
    assert x.tolist() == [[1.5, 2.5]]
    assert np.array_equal(x.detach().cpu().numpy(), [[1.5, 2.5]])
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        x.detach().numpy()
    assert repr(x) == "tensor([[1.5000, 2.5000]], device='npu:0', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in str(x * 2)
    assert f"{x.sum():.1f}" == "4.0"
    assert bool(torch.ones(1, device="npu"))
    assert len(list(torch.ones(3, device="npu"))) == 3
    assert x.numpy(force=True).shape == (1, 2)


def test_transformers_save_and_reload(tmp_path):
    from .zoo import CASES

    model = CASES["gpt2"].build().npu()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.transformer.wte.weight.device.type == "cpu"
    assert again.lm_head.weight is again.transformer.wte.weight
    assert same(again.lm_head.weight, model.lm_head.weight)
    out = model.generate(torch.ones(1, 3, dtype=torch.long).npu(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 5)


def test_storage_is_the_devices():
    x = torch.arange(6.0).npu()
    storage = x[2:].untyped_storage()
    assert storage.device.type == "npu"
    assert storage.nbytes() == 24
    assert storage.data_ptr() == x.data_ptr()
    other = torch.empty(0, device="npu").set_(storage, 1, (2,), (1,))
    assert other.tolist() == [1, 2]
    other.add_(5)
    assert x.tolist()[:3] == [0, 6, 7]


def test_raw_shares_memory_and_dispatches_nothing():
    x = torch.zeros(3, device="npu")
    with Seen() as seen:
        simdev.raw(x)
    assert seen.ops == []
    simdev.raw(x)[1] = 7
    assert x.tolist() == [0, 7, 0]
    assert simdev.raw(x).data_ptr() == x.data_ptr()
    host = torch.ones(1)
    assert simdev.raw(host) is host


def test_save_and_load():
    model = nn.LSTM(3, 4).npu()
    buffer = io.BytesIO()
    base = torch.arange(6.0, device="npu")
    torch.save({"model": model.state_dict(), "base": base, "view": base[2:4], "parameter": model.weight_ih_l0}, buffer)
    for where, device in ((None, "npu"), ("npu", "npu"), ("npu:0", "npu"), ("cpu", "cpu"), ("npu:0", "npu")):
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True, map_location=where)
        assert loaded["base"].device.type == device
        assert isinstance(loaded["parameter"], nn.Parameter)
        assert loaded["parameter"].requires_grad
        loaded["base"][2] = 50
        assert loaded["view"].tolist() == [50, 3]
        assert all(same(value, model.state_dict()[name]) for name, value in loaded["model"].items())
        model.load_state_dict(loaded["model"])
    buffer.seek(0)
    with pytest.raises(RuntimeError, match=r"device on npu:1|device_count\(\) is 1"):
        torch.load(buffer, map_location="npu:1")
    assert base.device.type == "npu"
    assert (base + 1).device.type == "npu"


def test_cpu_file_loads_onto_the_device():
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    buffer.seek(0)
    assert torch.load(buffer, map_location="npu").device.type == "npu"


def test_pickle_and_deepcopy():
    layer = nn.Linear(2, 2).npu()
    layer(torch.ones(1, 2, device="npu")).sum().backward()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(twin.weight, nn.Parameter)
        assert twin.weight.device.type == "npu"
        assert same(twin.weight, layer.weight)
        assert twin.weight.data_ptr() != layer.weight.data_ptr()
    assert same(copy.deepcopy(layer).weight.grad, layer.weight.grad)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(layer.weight * 2)


def test_tied_weights_and_optimizer_survive_the_move():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("npu")
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 3
    assert isinstance(model[0].weight, nn.Parameter)
    before = first.weight.detach().clone()
    (second(first(torch.ones(2, 3, device="npu")))).sum().backward()
    optimizer.step()
    assert not same(before, first.weight)
    model.bfloat16()
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype is torch.bfloat16
    assert simdev.raw(model[0].weight).dtype is torch.bfloat16


def test_backward_runs_on_its_own_thread():
    threads = []
    x = torch.ones(2, device="npu", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: threads.append(threading.current_thread()))
    y.sum().backward()
    assert threads
    assert threads[0] is not threading.main_thread()


def test_autocast():
    layer, x = nn.Linear(4, 4).npu(), torch.randn(2, 4).npu()
    with torch.autocast("npu"):
        default = layer(x).dtype
    assert default in (torch.float16, torch.bfloat16)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("npu", dtype=dtype):
            y = layer(x)
            assert y.dtype is dtype
            assert (x @ x.t()).dtype is dtype
            assert F.conv2d(torch.ones(1, 1, 3, 3, device="npu"), torch.ones(1, 1, 2, 2, device="npu")).dtype is dtype
            assert y.softmax(-1).dtype is torch.float32
            assert F.layer_norm(y, (4,)).dtype is torch.float32
            assert torch.cat([y, x]).dtype is torch.float32
            assert y.relu().dtype is dtype
            assert F.cross_entropy(y, torch.zeros(2, dtype=torch.long, device="npu")).dtype is torch.float32
            with torch.autocast("npu", enabled=False):
                assert layer(x).dtype is torch.float32
        y.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
    assert torch.is_autocast_enabled("npu") is False


def test_grad_scaler_skips_an_infinite_step():
    weight = nn.Parameter(torch.ones(2, device="npu"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    grads = []
    for device in ("cpu", "npu"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()).to(device)
        x = torch.randn(4, 8).to(device).requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
        grads.append([x.grad.cpu(), net[0].weight.grad.cpu()])
    for left, right in zip(*grads, strict=True):
        torch.testing.assert_close(left, right)


def test_dispatch_mode_sees_every_operator():
    x = torch.randn(3, 4, device="npu", requires_grad=True)
    with Seen() as seen:
        torch.randn(2, device="npu")
        F.dropout(x, 0.5).sum().backward()
    assert seen.ops[0] == "aten.randn.default"
    assert "aten.native_dropout.default" in seen.ops
    assert "aten.native_dropout_backward.default" in seen.ops


def test_function_mode_sees_no_kernel_of_the_device():
    from torch.overrides import TorchFunctionMode

    names = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    cell, x = nn.LSTM(3, 4).npu(), torch.randn(2, 1, 3).npu()
    with Functions():
        loss = cell(x)[0].sum()
        names.clear()
        torch.autograd.backward(loss)
    assert "sigmoid" not in names
    assert "tanh" not in names
    assert "chunk" not in names


def test_inference_mode():
    with torch.inference_mode():
        q = torch.randn(1, 2, 3, 4, device="npu")
        assert same(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q.cpu(), q.cpu(), q.cpu()))
        assert nn.Linear(4, 2).npu()(q).shape == (1, 2, 3, 2)


def test_pinning_is_ignored():
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    assert len(list(torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True))) == 2
    assert torch.ones(2).pin_memory().to("npu", non_blocking=True).tolist() == [1, 1]


def test_sparse_is_refused():
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        torch.eye(2, device="npu").to_sparse()


def test_failing_backward_says_why_before_pytorch_aborts(nursery: Nursery, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch; from trueup import simdev; from trueup.simdev import faults; simdev.inject('softmax-backward')\n"
        "def broken(call): raise ValueError('told you')\n"
        "faults.EFFECTS['softmax-backward'] = broken\n"
        "torch.randn(3, 4).npu().requires_grad_().softmax(-1).sum().backward()"
    )
    run = nursery.script(tmp_path / "log", script)
    assert run.wait() not in (0, HUNG)
    assert "ValueError: told you" in run.complained


def test_gradient_of_gradient():
    x = torch.randn(3, device="npu", requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second.cpu(), 6 * x.detach().cpu())


def test_unknown_names():
    with pytest.raises(TrueupError, match=r"no fault 'softmax-bakward'\. Did you mean softmax-backward"):
        simdev.inject("softmax-bakward")
    with pytest.raises(TrueupError, match=r"no noise 'zzzzzz'\. `trueup simdev list` shows them all"):
        simdev.noise("zzzzzz")
