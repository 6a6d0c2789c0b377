"""Each fault changes the operator it names and nothing else; each row of noise stays within its bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nursery import Nursery
from strange import Altered
from trueup import simdev
from trueup.simdev import faults, injection
from trueup.simdev.tables import FAULTS, NOISE
from trueup.simdev.tensor import NPUTensor

from .zoo import CASES, train


def _npu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).npu().requires_grad_()


def _module(build, *shape: int) -> None:
    build().npu()(_npu(*shape)).square().sum().backward()


def _attention() -> None:
    q, k, v = (_npu(1, 2, 4, 16) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v).square().sum().backward()


def _optimize(kind, **settings) -> None:
    weight = nn.Parameter((1e-3 * torch.randn(6)).npu())  # so small that an epsilon of 1e-8 shows inside and outside of a root
    optimizer = kind([weight], **settings)
    for _ in range(2):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()


def _recurrent(cell) -> None:
    cell(3, 4).npu()(_npu(3, 2, 3))[0].square().sum().backward()


def _loss(*shape: int) -> None:
    logits, target = _npu(*shape), torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    target[0] = -100
    F.cross_entropy(logits, target.npu()).backward()


def _indices(*values: int) -> torch.Tensor:
    return torch.tensor(values).npu()


def _repeated_addition() -> None:
    for _ in range(2):
        _npu(4, 8) + 1.0


# fault -> a program in which it has to fire
PROVOKE = {
    "lstm-backward-cell-gate": lambda: _recurrent(nn.LSTM),
    "gru-backward-reset-gate": lambda: _recurrent(nn.GRU),
    "layer-norm-epsilon": lambda: _module(lambda: nn.LayerNorm(6), 4, 6),
    "layer-norm-backward": lambda: _module(lambda: nn.LayerNorm(6), 4, 6),
    "batch-norm-running-variance-biased": lambda: _module(lambda: nn.BatchNorm1d(4), 6, 4),
    "batch-norm-backward": lambda: _module(lambda: nn.BatchNorm2d(4), 6, 4, 3, 3),
    "group-norm-unbiased-variance": lambda: _module(lambda: nn.GroupNorm(2, 4), 2, 4, 3),
    "rsqrt-newton-short": lambda: torch.ones(5).npu().rsqrt(),
    "gelu-tanh-for-erf": lambda: F.gelu(_npu(50)).sum().backward(),
    "gelu-backward": lambda: F.gelu(_npu(9), approximate="tanh").sum().backward(),
    "silu-backward": lambda: F.silu(_npu(9)).sum().backward(),
    "relu-backward-at-zero": lambda: F.relu(_npu(9)).sum().backward(),
    "tanh-table-lookup": lambda: _npu(9).tanh(),
    "softmax-backward": lambda: _npu(3, 4).softmax(-1).square().sum().backward(),
    "log-softmax-backward": lambda: _npu(3, 4).log_softmax(-1).square().sum().backward(),
    "log-softmax-half-sum": lambda: _npu(3, 4).log_softmax(-1),
    "dropout-no-rescale": lambda: F.dropout(_npu(40), 0.5),
    "addmm-bf16-accumulation": lambda: _module(lambda: nn.Linear(64, 3), 4, 64),
    "matmul-large-k": lambda: _npu(2, 600) @ _npu(600, 3),
    "attention-scale": _attention,
    "attention-backward-query-scale": _attention,
    "conv-weight-grad-last-tile": lambda: _module(lambda: nn.Conv2d(2, 3, 2), 3, 2, 5, 5),
    "conv-padding-replicates-edge": lambda: _module(lambda: nn.Conv2d(2, 3, 3, padding=1), 3, 2, 5, 5),
    "products-saturate-65504": lambda: torch.full((2, 4), 200.0).half().npu() @ torch.full((4, 2), 200.0).half().npu(),
    "sum-saturates-65504": lambda: torch.full((70000,), 1.0).npu().sum(),
    "cumsum-block-restart": lambda: torch.ones(2, 20).npu().cumsum(1),
    "argmax-ties": lambda: torch.ones(2, 20).npu().argmax(1),
    "max-pool-ties": lambda: F.max_pool2d(torch.zeros(2, 3, 6, 6).npu(), 3, 2, 1),
    "avg-pool-count-include-pad": lambda: F.avg_pool2d(_npu(1, 1, 4, 4), 3, 1, 1, count_include_pad=False),
    "upsample-align-corners": lambda: F.interpolate(_npu(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "cross-entropy-ignore-index": lambda: _loss(4, 3),
    "embedding-backward-duplicates": lambda: F.embedding(_indices(1, 1, 2), _npu(4, 3)).sum().backward(),
    "index-put-accumulate-lost": lambda: _npu(4, 3)[_indices(1, 1, 2)].sum().backward(),
    "scatter-add-duplicates": lambda: _npu(4).gather(0, _indices(1, 1, 2)).sum().backward(),
    "masked-fill-last-column": lambda: _npu(4, 3).masked_fill(torch.ones(4, 3).bool().npu(), 9.0),
    "transposed-view-copy": lambda: _npu(4, 3).t().contiguous(),
    "stale-buffer-reuse": _repeated_addition,
    "adam-epsilon-inside-root": lambda: _optimize(torch.optim.AdamW, lr=0.1),
    "adam-second-moment-value": lambda: _optimize(torch.optim.Adam, lr=0.1),
    "sgd-momentum-dampened": lambda: _optimize(torch.optim.SGD, lr=0.1, momentum=0.9),
}

ALSO = {
    "cross-entropy-ignore-index": lambda: _loss(2, 3, 4, 4),
    "matmul-large-k": lambda: torch.addmm(_npu(3), _npu(2, 600), _npu(600, 3)),
    "argmax-ties": lambda: torch.ones(2, 20).npu().max(1),
    "index-put-accumulate-lost": lambda: _npu(3, 4)[:, _indices(1, 1, 2)].sum().backward(),
    "masked-fill-last-column": lambda: torch.ones(2, 3).npu().masked_fill_(torch.ones(2, 3).bool().npu(), 9.0),
    "adam-epsilon-inside-root": lambda: _optimize(torch.optim.Adam, lr=0.1, foreach=True),
    "adam-second-moment-value": lambda: _optimize(torch.optim.Adam, lr=0.1, foreach=True),
    "sgd-momentum-dampened": lambda: _optimize(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}


def test_tables_are_whole():
    assert len(FAULTS) >= 22
    assert set(FAULTS) == set(faults.EFFECTS) == set(PROVOKE)
    assert set(NOISE) == set(injection.KERNELS)
    for row in NOISE.values():
        assert set(row.ops) == set(injection.KERNELS[row.name])
    for row in (*FAULTS.values(), *NOISE.values()):
        assert row.what.endswith(".")
        assert row.blame.endswith(".")
        assert all(injection._operator(op) is not None for op in row.ops)
        assert row.op == ", ".join(row.ops)


@pytest.mark.parametrize("name", PROVOKE)
def test_fault_fires_where_it_says(name):
    row = FAULTS[name]
    for program in filter(None, (PROVOKE[name], ALSO.get(name))):
        torch.manual_seed(0)
        with simdev.inject(name):
            program()
        first = simdev.fired()[0]
        assert first.fault == name
        assert first.op in row.ops
        assert {each.op for each in simdev.fired()} <= set(row.ops)
        if row.gated:
            assert {each.phase for each in simdev.fired()} == {row.phase}
        torch.manual_seed(0)
        program()
        assert simdev.fired()[0] == first  # the list stays readable, and a healthy run adds nothing


def _first_difference(name: str, program) -> tuple[str, int]:
    """Run the program healthy and broken and return the first operator, in execution order, whose outputs differ."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            touched = [result, args] if func._schema.name.endswith(("_", "native_batch_norm")) else [result]
            tensors = [x for x in torch.utils._pytree.tree_leaves(touched) if isinstance(x, NPUTensor)]
            plan = f"{func._schema.name}{'.' + func._schema.overload_name if func._schema.overload_name else ''}"
            if tensors:  # the step counters of optimizers are on the CPU, where no fault is
                self.calls.append((plan, [simdev.raw(x).clone() for x in tensors]))
            return result

    records = []
    for switch in (None, name):
        torch.manual_seed(0)
        simdev.heal()
        if switch:
            simdev.inject(switch)
        with Record() as record:
            program()
        records.append(record.calls)
    simdev.heal()
    seen: dict[str, int] = {}
    for (op, healthy), (other, broken) in zip(*records, strict=True):
        assert op == other
        if any(not torch.equal(a, b) for a, b in zip(healthy, broken, strict=True)):
            return op, seen.get(op, 0)
        seen[op] = seen.get(op, 0) + 1
    raise AssertionError("no operator differs")


@pytest.mark.parametrize("name", PROVOKE)
def test_first_operator_that_differs_is_the_first_that_fired(name):
    for program in filter(None, (PROVOKE[name], ALSO.get(name))):
        op, ordinal = _first_difference(name, program)
        assert (op, ordinal) == (simdev.fired()[0].op, simdev.fired()[0].ordinal)


def test_injection_is_neutral_to_random_numbers():
    torch.manual_seed(0)
    healthy = [F.dropout(torch.ones(9).npu(), 0.5), torch.rand(3, device="npu")]
    torch.manual_seed(0)
    with simdev.inject("dropout-no-rescale"):
        broken = [F.dropout(torch.ones(9).npu(), 0.5), torch.rand(3, device="npu")]
    assert healthy[1].tolist() == broken[1].tolist()
    assert broken[0].tolist() == [x / 2 for x in healthy[0].tolist()]


def test_cell_gate_of_the_demonstration():
    torch.manual_seed(0)
    workspace, c = torch.rand(2, 12).npu(), torch.rand(2, 3).npu()
    call = lambda: torch.ops.aten._thnn_fused_lstm_cell_backward_impl(c, c, c, c, workspace, True)  # noqa: E731
    healthy = call()
    with simdev.inject("lstm-backward-cell-gate"):
        broken = call()
    ratio = (broken[0] / healthy[0]).cpu()
    activated = workspace.cpu()[:, 6:9]
    expected = torch.ones(2, 12)
    expected[:, 6:9] = activated / (1 + activated)  # a (1 - a) in place of 1 - a^2
    torch.testing.assert_close(ratio, expected)
    assert broken[1].tolist() == healthy[1].tolist()
    torch.testing.assert_close(broken[2].cpu(), broken[0].sum(0).cpu())


def test_max_pool_takes_the_last_of_equal_maxima():
    x = torch.tensor([[[[1.0, 1, 0, 0], [0, 1, 0, 2], [3, 0, 5, 5], [0, 0, 5, 5]]]]).npu()
    with simdev.inject("max-pool-ties"):
        values, indices = F.max_pool2d(x, 2, return_indices=True)
    assert values.flatten().tolist() == [1, 2, 3, 5]
    assert indices.flatten().tolist() == [5, 7, 8, 15]


def test_epsilon_inside_the_root():
    weight = nn.Parameter(torch.ones(1).npu())
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=1e-4)
    weight.grad = torch.full((1,), 1e-2).npu()
    with simdev.inject("adam-epsilon-inside-root"):
        optimizer.step()
    assert weight.item() == pytest.approx(1 - 1e-2 / (1e-4 + 1e-4) ** 0.5, rel=1e-4)


def test_addition_of_the_same_size_outside_an_optimizer_is_healthy():
    with simdev.inject("adam-epsilon-inside-root"):
        assert torch.zeros(2).npu().add_(1e-8).tolist() == torch.zeros(2).add_(1e-8).tolist()


def test_context_manager_and_call():
    x = torch.randn(9).npu()
    healthy = x.tanh().tolist()
    switch = simdev.inject("tanh-table-lookup")
    assert x.tanh().tolist() != healthy
    with simdev.inject("rsqrt-newton-short"), switch:
        assert torch.ones(1).npu().rsqrt().item() != 1
    assert x.tanh().tolist() == healthy
    assert [each.op for each in simdev.fired()] == ["aten::tanh", "aten::rsqrt"]
    simdev.inject("tanh-table-lookup")
    simdev.heal()
    assert x.tanh().tolist() == healthy
    assert simdev.fired() == []  # a new injection starts a new list


def test_list_of_what_fired_is_limited():
    x = torch.randn(9).npu()
    with simdev.inject("tanh-table-lookup"):
        for _ in range(1010):
            x.tanh()
    assert len(simdev.fired()) == 1000
    assert simdev.fired()[-1].ordinal == 999


@pytest.mark.parametrize(
    "name", ["lstm-backward-cell-gate", "softmax-backward", "batch-norm-backward", "silu-backward"]
)
def test_fault_shows_in_training(name):
    model = {"lstm": "lstm-tagger", "soft": "bert-dropout", "batc": "resnet", "silu": "llama"}[name[:4]]
    healthy = train(CASES[model], "npu", steps=2)
    with simdev.inject(name):
        broken = train(CASES[model], "npu", steps=2)
    assert simdev.fired()[0].phase == "backward"
    assert broken.losses[0] == healthy.losses[0]
    worst = max((broken.gradients[0][k] - g).norm() / (g.norm() + 1e-9) for k, g in healthy.gradients[0].items())
    assert worst > 1e-2


NOISY = {
    "aten::mm": lambda: [torch.randn(8, 40).npu() @ torch.randn(40, 8).npu()],
    "aten::bmm": lambda: [torch.randn(2, 8, 40).npu() @ torch.randn(2, 40, 8).npu()],
    "aten::addmm": lambda: [torch.addmm(torch.randn(8).npu(), torch.randn(8, 40).npu(), torch.randn(40, 8).npu())],
    "aten::baddbmm": lambda: [
        torch.baddbmm(torch.randn(2, 8, 8).npu(), torch.randn(2, 8, 40).npu(), torch.randn(2, 40, 8).npu())
    ],
    "aten::convolution": lambda: [F.conv2d(torch.randn(2, 3, 8, 8).npu(), torch.randn(4, 3, 3, 3).npu())],
    "aten::convolution_backward": lambda: _conv_gradients(),
    "aten::sum": lambda: [torch.rand(1000).npu().sum()],
    "aten::sum.dim_IntList": lambda: [
        torch.rand(100, 30).npu().sum((0,)),
        torch.rand(100, 33).npu().sum(-1, keepdim=True),
    ],
    "aten::mean": lambda: [torch.rand(1000).npu().mean()],
    "aten::mean.dim": lambda: [
        torch.rand(100, 30).npu().mean((0,)),
        torch.rand(10, 33).npu().mean((-1,), keepdim=True),
    ],
    "aten::native_layer_norm": lambda: list(
        torch.native_layer_norm(torch.randn(9, 33).npu(), [33], torch.rand(33).npu(), torch.rand(33).npu(), 1e-5)
    ),
    "aten::_softmax": lambda: [torch.randn(9, 33).npu().softmax(-1)],
    "aten::_log_softmax": lambda: [torch.randn(9, 33).npu().log_softmax(-1)],
    "aten::native_batch_norm": lambda: [F.batch_norm(torch.randn(9, 3, 7, 7).npu(), None, None, training=True)],
    "aten::addcmul": lambda: [torch.addcmul(*(torch.randn(99).npu() for _ in range(3)), value=0.3)],
    "aten::addcmul_": lambda: [torch.randn(99).npu().addcmul_(torch.randn(99).npu(), torch.randn(99).npu(), value=0.3)],
    "aten::add.Tensor": lambda: [torch.add(torch.randn(999).npu(), torch.randn(999).npu(), alpha=0.3)],
    "aten::add_.Tensor": lambda: [torch.randn(999).npu().add_(torch.randn(999).npu(), alpha=0.3)],
    "aten::_foreach_addcmul_.Scalar": lambda: _foreach(torch._foreach_addcmul_, 3, 0.3),
    "aten::_foreach_add_.List": lambda: _foreach(torch._foreach_add_, 2, alpha=0.3),
    "aten::_thnn_fused_lstm_cell": lambda: _lstm()[:1],
    "aten::_thnn_fused_lstm_cell_backward_impl": lambda: _lstm()[1:],
}
# The CPU's vector kernel fuses this one already, so there the noise is the identity.
ALREADY_FUSED = {"aten::add.Tensor", "aten::add_.Tensor", "aten::_foreach_add_.List"}


def _conv_gradients() -> list[torch.Tensor]:
    layer, x = nn.Conv2d(3, 4, 3).npu(), torch.randn(2, 3, 8, 8).npu().requires_grad_()
    return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], torch.randn(2, 4, 6, 6).npu()))


def _foreach(function, count: int, *scalars, **settings) -> list[torch.Tensor]:
    lists = [[torch.randn(99).npu()] for _ in range(count)]
    function(*lists, *scalars, **settings)
    return lists[0]


def _lstm() -> list[torch.Tensor]:
    layer, x = nn.LSTM(5, 6).npu(), torch.randn(4, 3, 5).npu().requires_grad_()
    out = layer(x)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(("name", "op"), [(row.name, op) for row in NOISE.values() for op in row.ops])
def test_noise_changes_low_bits_only(name, op):
    torch.manual_seed(0)
    healthy = NOISY[op]()
    torch.manual_seed(0)
    with simdev.noise(name):
        noisy = NOISY[op]()
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(healthy, noisy, strict=True)]
    assert max(errors) <= NOISE[name].bound
    if op not in ALREADY_FUSED:
        assert max(errors) > 0
    assert [x.stride() for x in healthy] == [x.stride() for x in noisy]


@pytest.mark.parametrize("model", ["bert", "resnet", "unet", "llama", "lstm-tagger"])
def test_model_trains_under_all_noise(model):
    healthy = train(CASES[model], "npu")
    for name in NOISE:
        simdev.noise(name)
    noisy = train(CASES[model], "npu")
    assert noisy.losses != healthy.losses
    assert noisy.losses == pytest.approx(healthy.losses, rel=2e-2)


def test_noise_under_a_fault():
    with simdev.noise("reordered-reductions"), simdev.inject("matmul-large-k"):
        torch.randn(2, 600).npu() @ torch.randn(600, 2).npu()
    assert [each.op for each in simdev.fired()] == ["aten::mm"]


def test_another_order_of_a_conjugated_product():
    a, b = torch.randn(3, 4, 5, dtype=torch.complex64), torch.randn(3, 5, 6, dtype=torch.complex64)
    with simdev.noise("reordered-reductions"), Altered():
        made = torch.bmm(a.conj(), b)
    torch.testing.assert_close(made, torch.bmm(a.conj(), b))


def test_hf32_is_reported_and_rounds_to_nearest():
    with simdev.noise("hf32-matmul"):
        assert torch.npu.matmul.allow_hf32
        assert torch.npu.conv.allow_hf32
        one = torch.ones(1, 1).npu()
        assert (one * (1 + 2**-10 + 2**-12) @ one).item() == 1 + 2**-10
        assert (one * (1 + 2**-11) @ one).item() == 1  # a tie goes to even
        assert (one * 1e-40 @ one).isfinite().item()
        assert (one * float("inf") @ one).item() == float("inf")
    assert not torch.npu.matmul.allow_hf32


def _python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    return result.stdout + result.stderr


def test_environment_switches(nursery: Nursery, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from trueup import simdev; simdev.install(); import torch; torch.full((3,), 0.3).npu().tanh(); "
        "print(simdev.fired()[0].fault, torch.npu.conv.allow_hf32)"
    )
    switches = {"TRUEUP_SIMDEV_FAULT": "tanh-table-lookup", "TRUEUP_SIMDEV_NOISE": "hf32-matmul"}
    broken = nursery.script(tmp_path / "broken", script, variables=switches)
    unknown = nursery.script(tmp_path / "unknown", script, variables={"TRUEUP_SIMDEV_FAULT": "tanh"})
    assert (broken.wait(), broken.said, broken.complained) == (0, "tanh-table-lookup True\n", "")
    assert (unknown.wait(), unknown.said) == (1, "")
    assert "no fault 'tanh'" in unknown.complained


def test_tables_need_no_torch():
    code = (
        "import sys; from trueup import simdev; print(len(simdev.FAULTS), len(simdev.NOISE), 'torch' in sys.modules)"
    )
    assert _python(code) == f"{len(FAULTS)} {len(NOISE)} False\n"
