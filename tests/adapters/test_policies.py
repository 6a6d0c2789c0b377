"""Policies on functions and modules of PyTorch: what a rule changes, and all that it must leave as it would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import zoo
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch import ruled
from trueup.recording.adapters.torch.policies import AppliedPolicy, apply_policy
from trueup.recording.adapters.torch.random_states import Generators
from trueup.recording.engine.policies import applied
from trueup.recording.engine.ruled import PolicyFailed
from trueup.recording.policy_file import parse


def patched() -> list[object]:
    """What a policy replaces, and the hooks that it puts on every optimizer."""
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    engine = torch.autograd._engine_run_backward
    return [torch.nn.Module._call_impl, torch.autograd.Function.__dict__["apply"], engine, *map(dict, hooks)]


@pytest.fixture(autouse=True)
def _one_thread_and_nothing_left() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = patched()
    yield
    assert applied("torch") == ()
    assert patched() == before
    assert torch.overrides._get_current_function_mode_stack() == []


def applying(model: Any = None, **rule: Any) -> AppliedPolicy:
    text = "".join(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n" for key, value in rule.items())
    return apply_policy(model, parse(f"[[rule]]\n{text}", "policy.toml"))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


# ---------------------------------------------------------------- whole models
def trained(name: str, rule: dict[str, Any] | None, dtype: torch.dtype | None = None) -> tuple[list[Any], tuple[Any, ...]]:
    torch.manual_seed(1)
    training = zoo.build(name, "cpu")
    if dtype is not None:
        training.model.to(dtype)
        training.batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in training.batches]
    handle = None if rule is None else applying(training.model, **rule)
    found = [training.step() for _ in range(2)]
    uses: tuple[Any, ...] = ()
    if handle is not None:
        uses = handle.uses()
        handle.remove()
    return [*found, *training.model.state_dict().values(), torch.get_rng_state()], uses


def same(one: list[Any], other: list[Any]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["bert", "gpt2", "lstm_tagger", "resnet"])
def test_a_policy_that_matches_nothing_leaves_every_bit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = trained(name, None)
    with_it, (use,) = trained(name, {"op": "torch.nothing", "dtype": "float64"})
    assert same(plain, with_it)
    assert use.nothing == "no call matched"
    assert "trueup: note: policy.toml, rule 1 (torch.nothing: float64) changed nothing: no call matched" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bert", "gpt2", "lstm_tagger", "resnet"])
@pytest.mark.parametrize("rule", [
    {"op": "torch.*", "dtype": "float32"}, {"level": "module", "scope": "?*", "dtype": "float32"},
    {"level": "module", "scope": "*", "op": "L*", "dtype": "float32", "phase": "backward"},
    {"op": "torch.nn.functional.[gl]*", "dtype": "float64", "phase": "forward"},
], ids=["functions", "modules", "backward", "forward"])  # fmt: skip
def test_models_in_half_precision_train_under_a_wider_dtype(name: str, rule: dict[str, Any]) -> None:
    plain, _ = trained(name, None, torch.bfloat16)
    wide, (use,) = trained(name, rule, torch.bfloat16)
    assert [t.dtype for t in wide] == [t.dtype for t in plain]
    if name in ("bert", "gpt2"):  # the others have no such call in one phase alone, or one that is exact
        assert use.changed
        assert not same(plain[:-1], wide[:-1])
    exact, _ = trained(name, None)
    for step in range(2):
        assert abs(wide[step].float() - exact[step]) <= 0.02 * exact[step].abs() + 0.01


@pytest.mark.parametrize("name", ["bert", "gpt2", "lstm_tagger", "resnet"])
def test_everything_deterministic_is_the_same_on_a_cpu(name: str) -> None:
    plain, _ = trained(name, None)
    found, (use,) = trained(name, {"op": "torch.*", "deterministic": True})
    assert use.changed > 10
    assert same(plain, found)
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- one function
def test_forward_and_backward_run_in_the_wider_dtype() -> None:
    x, w, b = tensor(8, 64), tensor(64), tensor(64)
    g = tensor(8, 64, grad=False)
    with applying(op="torch.nn.functional.layer_norm", dtype="float64"):
        y = F.layer_norm(x, (64,), w, b)
        y.backward(g)
    found = [y, x.grad, w.grad, b.grad]
    inputs = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = F.layer_norm(inputs[0], (64,), *inputs[1:])
    expected.backward(g.double())
    assert all(torch.equal(a, e.bfloat16()) for a, e in zip(found, [expected, *(t.grad for t in inputs)], strict=True))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("level", ["api", "module"])
def test_one_phase_alone(phase: str, level: str) -> None:
    torch.manual_seed(3)
    norm = torch.nn.LayerNorm(64)
    x, g = tensor(8, 64, dtype=torch.float32), tensor(8, 64, dtype=torch.float32, grad=False)

    def run() -> tuple[torch.Tensor, ...]:
        x.grad = norm.weight.grad = None
        y = norm(x)
        y.backward(g)
        assert x.grad is not None
        assert norm.weight.grad is not None
        return y.detach(), x.grad, norm.weight.grad

    names = {"op": "torch.nn.functional.layer_norm"} if level == "api" else {"level": "module", "op": "LayerNorm"}
    plain = run()
    with applying(norm, dtype="float64", **names):
        wide = run()
    with applying(norm, dtype="float64", phase=phase, **names):
        mixed = run()
    assert not any(torch.equal(a, b) for a, b in zip(plain[:2], wide[:2], strict=True))
    forward, backward = (wide, plain) if phase == "forward" else (plain, wide)
    assert torch.equal(mixed[0], forward[0])
    assert all(torch.equal(a, b) for a, b in zip(mixed[1:], backward[1:], strict=True))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    assert y.mul_(3).add_(0.5) is y
    return y


def into_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=x.dtype)
    with torch.no_grad():
        assert torch.exp(x, out=out) is out
    return out * x


def view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    part = y.view(-1)[:4]
    part.mul_(0)
    assert y.flatten()[:4].abs().sum() == 0
    return y


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": in_place,
    "out": into_out,
    "view": view,
    "several results": lambda x: torch.max(x, dim=1),
    "tuple of views": lambda x: torch.stack([part.exp() for part in x.chunk(2)]),
    "list of tensors": lambda x: torch.cat([x, x.sin()], dim=0),
    "keywords": lambda x: F.linear(input=x, weight=x, bias=None),
    "mask": lambda x: x.masked_fill(x > 0, -1.0),
    "index": lambda x: F.embedding(torch.tensor([0, 3, 3]), x),
    "assignment": lambda x: _assigned(x),
    "named dtype": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "conversion": lambda x: x.float(),
    "numbers": lambda x: x * x.detach().abs().max().item(),
    "mixed": lambda x: x + torch.ones(8, dtype=torch.float32),
    "scalar": lambda x: x * torch.tensor(2.0),
    "complex": lambda x: torch.fft.rfft(x.float()).abs(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "same twice": lambda x: torch.matmul(x, x.T),
    "not finite": lambda x: torch.isfinite(x),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype), training=True),
    "dropout": lambda x: F.dropout(x, 0.5),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


def _assigned(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[1:3] = x[0] * 2
    return y


def _results(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("rule", [{"op": "*", "dtype": "float64"}, {"op": "*", "dtype": "float32"}], ids=["float64", "float32"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", list(CASES))
def test_results_are_what_they_would_have_been(name: str, autocast: bool, rule: dict[str, Any]) -> None:
    torch.manual_seed(2)
    x = tensor(8, 8, dtype=torch.float32 if autocast else torch.bfloat16)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            results = _results(CASES[name](x))
        differentiable = [r for r in results if r.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.ones_like(r) for r in differentiable])
        found, x.grad = x.grad, None
        return results + ([] if found is None else [found])

    plain = run()
    with applying(**rule):
        wide = run()
    assert [(t.dtype, t.shape, t.requires_grad) for t in wide] == [(t.dtype, t.shape, t.requires_grad) for t in plain]
    for a, b in zip(plain, wide, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_running_statistics_are_updated_once_and_in_their_place() -> None:
    for phase in ({}, {"phase": "forward"}, {"phase": "backward"}):
        for level in ({"op": "torch.nn.functional.batch_norm"}, {"level": "module", "op": "BatchNorm1d"}):
            norm, other = torch.nn.BatchNorm1d(4).bfloat16(), torch.nn.BatchNorm1d(4).bfloat16()
            x = tensor(16, 4)
            mean = norm.running_mean
            with applying(norm, dtype="float32", **level, **phase):
                norm(x).sum().backward()
            other(x).sum().backward()
            assert norm.running_mean is mean
            assert norm.num_batches_tracked == 1
            torch.testing.assert_close(norm.running_var, other.running_var, rtol=0.02, atol=0.02)
            assert not torch.equal(norm.running_mean, torch.zeros(4).bfloat16())


def test_double_backward_goes_through_both_phases_and_is_refused_for_one() -> None:
    x = tensor(6, dtype=torch.float32)

    def second() -> torch.Tensor:
        (first,) = torch.autograd.grad(torch.tanh(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    plain = second()
    with applying(op="torch.tanh", dtype="float64"):
        torch.testing.assert_close(second(), plain)
    with applying(op="torch.tanh", dtype="float64", phase="forward"), pytest.raises(PolicyFailed, match="create_graph=True"):
        second()


def test_a_call_that_writes_cannot_be_split() -> None:
    x = tensor(4) * 1
    with applying(op="torch.Tensor.mul_", dtype="float32", phase="forward"), pytest.raises(PolicyFailed) as caught:
        x.mul_(2)
    assert "rule 1 (torch.Tensor.mul_: float32, forward only)" in str(caught.value)
    assert "it writes an argument" in str(caught.value)
    assert "leave out phase" in str(caught.value)


def test_an_error_of_pytorch_gets_the_rule_and_stays_a_runtime_error() -> None:
    with applying(op="torch.matmul", dtype="float32"), pytest.raises(RuntimeError) as caught:
        torch.matmul(tensor(2, 3), tensor(2, 3))
    assert isinstance(caught.value, TrueupError)
    assert "where:    torch.matmul" in str(caught.value)
    assert "cannot be multiplied" in str(caught.value)


# ---------------------------------------------------------------- modules
def test_a_recurrent_module_in_a_wider_dtype_equals_the_wider_module() -> None:
    torch.manual_seed(5)
    lstm = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True).bfloat16()
    x = tensor(7, 3, 6)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2]))
    wide = torch.nn.LSTM(6, 5, num_layers=2, bidirectional=True)
    wide.load_state_dict({name: value.float() for name, value in lstm.state_dict().items()})
    expected, _ = wide(torch.nn.utils.rnn.pack_padded_sequence(x.detach().float(), torch.tensor([7, 5, 2])))
    expected.data.sum().backward()
    for rule in ({"level": "module", "op": "LSTM"}, {"op": "torch.lstm"}):
        lstm.zero_grad()
        with applying(lstm, dtype="float32", **rule) as handle:
            result, (hidden, _) = lstm(packed)
            result.data.sum().backward(retain_graph=True)
            assert handle.uses()[0].changed == 1
        assert result.data.dtype == hidden.dtype == torch.bfloat16
        assert torch.equal(result.data, expected.data.bfloat16())
        for (name, mine), other in zip(lstm.named_parameters(), wide.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(mine.grad, other.grad.bfloat16(), msg=name)
    assert all(isinstance(weight, torch.nn.Parameter) for weight in lstm._parameters.values())
    lstm(packed)  # afterwards as before


def test_attention_modules_and_keywords() -> None:
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).bfloat16()
    x = tensor(2, 5, 16)
    for rule in ({"level": "module", "op": "MultiheadAttention"}, {"op": "torch.nn.functional.multi_head_attention_forward"}):
        with applying(attention, dtype="float32", **rule) as handle:
            y, weights = attention(query=x, key=x, value=x, average_attn_weights=False)
            y.sum().backward()
            assert handle.uses()[0].changed == 1
        assert y.dtype == weights.dtype == torch.bfloat16
        assert attention.in_proj_weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rule", [
    {"op": "torch.*linear", "scope": "block"}, {"level": "module", "scope": "block*", "op": "Linear"},
])  # fmt: skip
def test_what_checkpointing_runs_again_is_met_again(reentrant: bool, rule: dict[str, Any]) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(32, 32)

        def half(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.linear(self.inner(x), self.inner.weight))  # a function in the scope of the block

        def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
            return checkpoint(self.half, x, use_reentrant=reentrant) if again else self.half(x)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
            return self.block(x, again)

    torch.manual_seed(6)
    net = Net()
    x = tensor(4, 32, dtype=torch.float32)
    found = []
    for again in (False, True):
        with applying(net, dtype="float64", **rule) as handle:
            net.zero_grad()
            x.grad = None
            net(x, again).square().sum().backward()
            assert handle.uses()[0].changed == (2 if again else 1)
        found.append([net.block.inner.weight.grad, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_and_a_gradient_scaler() -> None:
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = []
    net[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))
    with applying(net, op="torch.nn.functional.linear", dtype="float32") as handle:
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(4, 16)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert handle.uses()[0].changed == 2
    assert seen == [torch.float16]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_an_optimizer_alone() -> None:
    def run(rule: dict[str, Any] | None, fused: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(8)
        net = torch.nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.Adam(net.parameters(), 0.01, fused=fused, foreach=None if fused else True)
        handle = None if rule is None else applying(net, **rule)
        for _ in range(3):
            net(tensor(4, 8, grad=False)).square().sum().backward()
            optimizer.step()
        use = None
        if handle is not None:
            (use,) = handle.uses()
            handle.remove()
        return [p.detach() for p in net.parameters()], use

    for fused, op in ((True, "torch._fused_adam_"), (False, "torch._foreach_*")):
        plain, _ = run(None, fused)
        wide, use = run({"op": op, "dtype": "float32", "phase": "optimizer"}, fused)
        assert use.changed >= 3
        assert all(p.dtype == torch.bfloat16 for p in wide)
        for a, b in zip(plain, wide, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
        untouched, use = run({"op": op, "dtype": "float32"}, fused)  # forward and backward are no optimizer
        assert use.nothing == "no call matched"
        assert same(plain, untouched)


# ---------------------------------------------------------------- deterministic
class Spy(torch.autograd.Function):
    """Notes whether deterministic algorithms are on in its forward and its backward."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Spy.seen.append(torch.are_deterministic_algorithms_enabled())
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Spy.seen.append(torch.are_deterministic_algorithms_enabled())
        return gradient


@pytest.mark.parametrize(("phase", "seen"), [
    ({}, [True, True]), ({"phase": "forward"}, [True, False]), ({"phase": "backward"}, [False, True]),
])  # fmt: skip
def test_deterministic_in_the_phases_asked_for_and_nowhere_else(phase: dict[str, str], seen: list[bool]) -> None:
    Spy.seen.clear()
    x = tensor(4)
    with applying(op="*Spy.apply", deterministic=True, **phase):
        y = Spy.apply(x)
        assert not torch.are_deterministic_algorithms_enabled()
        y.sum().backward()
    assert Spy.seen == seen
    assert not torch.are_deterministic_algorithms_enabled()


def test_where_pytorch_has_no_deterministic_algorithm() -> None:
    pooled, places = F.max_pool2d(tensor(1, 1, 4, 4, dtype=torch.float32), 2, return_indices=True)
    with applying(op="torch.nn.functional.max_unpool2d", deterministic=True), pytest.raises(PolicyFailed) as caught:
        F.max_unpool2d(pooled, places, 2)
    assert "torch.nn.functional.max_unpool2d" in str(caught.value)
    assert "deterministic" in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- life
def test_the_first_rule_holds_and_the_one_it_hides_is_named() -> None:
    text = '[[rule]]\nop = "torch.exp"\ndtype = "float32"\n[[rule]]\nop = "torch.e*"\ndtype = "float64"\n'
    with apply_policy(None, parse(text, "p")) as handle:
        torch.exp(tensor(3))
        first, second = handle.uses()
    assert (first.changed, second.nothing) == (1, "an earlier rule came first for all 1 calls")


def test_what_is_wide_already_is_said_to_be() -> None:
    with applying(op="torch.exp", dtype="float32", device="cpu") as handle:
        torch.exp(tensor(3, dtype=torch.float32))
        assert handle.uses()[0].nothing == "1 call matched, but their tensors have that dtype and device already"


def test_compiled_code_runs_as_python_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Linear(4, 4).bfloat16()
    compiled = torch.compile(net, backend="eager")
    with applying(net, op="torch.nn.functional.linear", dtype="float32") as handle:
        compiled(tensor(2, 4)).sum().backward()
        assert handle.uses()[0].changed == 1
    assert "its Python code runs while a policy is applied" in capsys.readouterr().err


def test_what_inference_mode_computes() -> None:
    with torch.inference_mode(), applying(op="torch.*", dtype="float32") as handle:
        x = torch.ones(3, dtype=torch.bfloat16)
        assert torch.exp(x).dtype == torch.bfloat16
        x.add_(1)
        assert x.tolist() == [2, 2, 2]
        assert handle.uses()[0].changed == 2


def test_what_lies_in_memory_otherwise_is_written_back() -> None:
    x = torch.ones(2, 3)
    assert ruled.lies_alike(x, x.clone())
    assert not ruled.lies_alike(x, x.t().contiguous().t())
    assert ruled.lies_alike(x.to_sparse(), x)  # which has no strides


def test_a_draw_from_any_generator_is_seen() -> None:
    own = torch.Generator()
    generators = Generators(["cpu"], [own])
    for draw in (lambda: torch.rand(1), lambda: torch.rand(1, generator=own)):
        before = generators.state()
        assert not generators.drew(before)
        draw()
        assert generators.drew(before)
