"""Policies on operators and Layers of Paddle: what a rule changes, and all that it must leave as it would have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from recording import bits, notes_of, rows_of

import trueup
from models import build
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.paddle import ruled
from trueup.recording.adapters.paddle.invocations import listed
from trueup.recording.adapters.paddle.policies import AppliedPolicy, apply_policy
from trueup.recording.engine.policies import applied
from trueup.recording.engine.ruled import PolicyFailed
from trueup.recording.policy_file import parse


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = paddle.nn.Layer.__call__, paddle._C_ops.matmul, paddle.Tensor.__add__, paddle.optimizer.AdamW.step
    yield
    assert applied("paddle") == ()
    assert before == (paddle.nn.Layer.__call__, paddle._C_ops.matmul, paddle.Tensor.__add__, paddle.optimizer.AdamW.step)


def applying(model: Any = None, **rule: Any) -> AppliedPolicy:
    text = "".join(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n" for key, value in rule.items())
    return apply_policy(model, parse(f"[[rule]]\n{text}", "policy.toml"))


def tensor(*shape: int, seed: int = 0, grad: bool = True, dtype: str = "float32") -> paddle.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return paddle.to_tensor(values, stop_gradient=not grad)


# ---------------------------------------------------------------- whole models
def trained(name: str, rule: dict[str, Any] | None) -> tuple[list[paddle.Tensor], Any]:
    training = build(name)
    handle = None if rule is None else applying(training.model, **rule)
    found = [training.step(k) for k in range(2)]
    use = None
    if handle is not None:
        (use,) = handle.uses()
        handle.remove()
    return [*found, *training.model.state_dict().values()], use


@pytest.mark.parametrize("name", ["transformer", "ctc"])
def test_a_policy_that_matches_nothing_leaves_every_bit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = trained(name, None)
    with_it, use = trained(name, {"op": "paddle.nothing", "dtype": "float64"})
    assert bits(plain) == bits(with_it)
    assert use.nothing == "no call matched"
    assert "trueup: note: policy.toml, rule 1 (paddle.nothing: float64) changed nothing: no call matched" in capsys.readouterr().err


@pytest.mark.parametrize("rule", [
    {"op": "*"}, {"op": "*", "phase": "forward"}, {"op": "*", "phase": "backward"}, {"op": "*", "phase": "optimizer"},
    {"level": "module", "scope": "?*"}, {"level": "module", "scope": "*", "op": "L*", "phase": "backward"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["lstm", "ctc"])
def test_models_train_under_a_wider_dtype(name: str, rule: dict[str, Any]) -> None:
    plain, _ = trained(name, None)
    wide, use = trained(name, {**rule, "dtype": "float64"})
    assert use.changed
    assert bits(plain) != bits(wide)
    for one, other in zip(plain, wide, strict=True):
        assert one.dtype == other.dtype
        assert np.allclose(one.numpy(), other.numpy(), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- single calls
def both_ways(compute: Callable[..., paddle.Tensor], dtype: str) -> tuple[bytes, list[bytes]]:
    """Return result and gradients of a computation in a dtype, rounded to float32."""
    inputs = [tensor(6, 40, seed=k) for k in range(2)]
    cast = [t.astype(dtype).detach() for t in inputs]
    for t in cast:
        t.stop_gradient = False
    out = compute(*cast)
    incoming = tensor(*out.shape, seed=9, grad=False).astype(dtype)
    out.backward(incoming)
    return out.astype("float32").numpy().tobytes(), [t.grad.astype("float32").numpy().tobytes() for t in cast]


@pytest.mark.parametrize("phase", [None, "forward", "backward"])
def test_each_phase_runs_in_its_own_dtype(phase: str | None) -> None:
    def compute(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, y, transpose_y=True)

    narrow, wide = both_ways(compute, "float32"), both_ways(compute, "float64")
    assert narrow[0] != wide[0]
    assert narrow[1] != wide[1]
    with applying(op="paddle._C_ops.matmul", dtype="float64", **({} if phase is None else {"phase": phase})) as handle:
        got = both_ways(compute, "float32")
    assert handle.uses()[0].changed == 1
    assert got[0] == (narrow if phase == "backward" else wide)[0]
    assert got[1] == (narrow if phase == "forward" else wide)[1]


def test_halves_are_computed_in_float32_where_the_cpu_has_no_kernel_for_them() -> None:
    x, weight = tensor(4, 8).astype("float16"), tensor(8, 3, seed=1).astype("float16")
    with pytest.raises(RuntimeError, match="not registered"):
        F.softmax(x @ weight)
    with applying(op="*", dtype="float32"):
        result = F.softmax(x @ weight)
        assert result.dtype == paddle.float16
    expected = F.softmax((x.astype("float32") @ weight.astype("float32")).astype("float16").astype("float32"))
    assert bits([result]) == bits([expected.astype("float16")])


def test_running_statistics_are_written_once_and_once_only() -> None:
    def after(rule: dict[str, Any] | None) -> list[np.ndarray[Any, Any]]:
        layer, x = nn.BatchNorm1D(5), tensor(7, 5)
        handle = None if rule is None else applying(layer, dtype="float64", **rule)
        layer(x).pow(3).sum().backward()
        if handle is not None:
            assert handle.uses()[0].changed == 1, rule
            handle.remove()
        return [layer._mean.numpy(), layer._variance.numpy(), x.grad.numpy()]

    plain = after(None)
    for rule in ({"op": "*batch_norm"}, {"level": "module", "op": "BatchNorm1D"}):
        for phase in ({}, {"phase": "forward"}, {"phase": "backward"}):
            for one, other in zip(plain, after({**rule, **phase}), strict=True):
                assert np.allclose(one, other, rtol=1e-4, atol=1e-6), (rule, phase)


def test_what_is_written_in_place_is_brought_back() -> None:
    with applying(op="paddle._C_ops.[re]*_", dtype="float64") as handle:
        x = tensor(5)
        y = x * 2
        z = F.relu_(y)
        assert z is y
        z.sum().backward()
        other = tensor(5, grad=False)
        other.exp_()
    assert handle.uses()[0].changed == 2
    assert np.array_equal(y.numpy(), np.maximum(tensor(5).numpy() * 2, 0))
    assert np.array_equal(x.grad.numpy(), 2.0 * (tensor(5).numpy() > 0))
    assert np.array_equal(other.numpy(), np.exp(tensor(5).numpy().astype("f8")).astype("f4"))
    with applying(op="paddle.Tensor.__setitem__", dtype="float64"):
        whole, part = tensor(4, 3, grad=False), tensor(3, seed=2)
        whole[1] = part
    (whole * 2).sum().backward()
    assert np.array_equal(whole[1].numpy(), part.numpy())
    assert np.array_equal(part.grad.numpy(), np.full(3, 2.0))


def test_an_optimizer_steps_in_float64_and_its_states_stay_float32() -> None:
    def weights(computed: str, **rule: Any) -> list[Any]:
        parameter = paddle.to_tensor(tensor(6).numpy().astype(computed), stop_gradient=False)
        optimizer = paddle.optimizer.Adam(0.1, parameters=[parameter])
        handle = applying(**rule) if rule else None
        for k in range(3):
            (parameter * tensor(6, seed=k + 1, grad=False).astype(computed)).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        if handle is not None:
            assert handle.uses()[0].changed == 3
            handle.remove()
        return [parameter, *optimizer.state_dict().values()]

    plain, wide = weights("float32"), weights("float32", op="paddle._C_ops.adam_", phase="optimizer", dtype="float64")
    tensors = [t for t in wide if isinstance(t, paddle.Tensor)]
    assert {str(t.dtype) for t in tensors} == {"paddle.float32"}
    assert bits(plain[:1]) != bits(wide[:1])
    assert np.allclose(plain[0].numpy(), wide[0].numpy(), rtol=1e-5)
    assert np.allclose(wide[0].numpy(), weights("float64")[0].numpy(), rtol=1e-4)


def test_of_two_rules_the_first_holds_and_views_and_casts_are_left_alone() -> None:
    text = '[[rule]]\nop = "*.scale"\ndtype = "float64"\n[[rule]]\nop = "*"\ndtype = "float64"\n'
    with apply_policy(None, parse(text, "policy.toml")) as handle:
        x = tensor(4, 3)
        paddle.scale(x, 3.0).reshape([12]).astype("float64")
    first, rest = handle.uses()
    assert (first.matched, first.changed) == (1, 1)
    assert (rest.matched, rest.changed, rest.shadowed) == (2, 0, 1)
    assert rest.nothing is not None
    assert "compute nothing" in rest.nothing


# ---------------------------------------------------------------- scopes
class Two(nn.Layer):
    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again = again

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        return self.second(x) if self.again is None else recompute(self.second, x, use_reentrant=self.again)


@pytest.mark.parametrize("rule", [{"op": "*.linear"}, {"level": "module"}], ids=str)
def test_a_rule_holds_in_its_scope_and_in_what_is_recomputed_there(rule: dict[str, Any]) -> None:
    results = []
    for again in (None, True, False):
        paddle.seed(3)
        model, x = Two(again), tensor(4, 6)
        with applying(model, scope="second", dtype="float64", **rule) as handle:
            model(x).pow(2).sum().backward()
        results.append(bits([x.grad, *(p.grad for p in model.parameters())]))
        assert handle.uses()[0].changed == (1 if again is None else 2), "once more where it runs again"
    assert results[0] == results[1] == results[2]


# ---------------------------------------------------------------- beside a capture
def captured(path: Path, order: str) -> list[dict[str, Any]]:
    training = build("ctc")
    rule = {"op": "paddle._C_ops.[bl]*", "dtype": "float64"}
    if order == "policy first":
        with applying(training.model, **rule), trueup.capture(path, model=training.model):
            training.step(0)
    elif order == "capture first":
        with trueup.capture(path, model=training.model), applying(training.model, **rule):
            training.step(0)
    else:
        with trueup.capture(path, model=training.model):
            training.step(0)
    return rows_of(path)


@pytest.mark.parametrize("order", ["policy first", "capture first"])
def test_a_capture_sees_each_call_as_it_was_meant(tmp_path: Path, order: str) -> None:
    names = ("level", "phase", "scope", "op", "ordinal", "slot", "dtype", "shape")
    plain, ruled = captured(tmp_path / "plain", ""), captured(tmp_path / "ruled", order)
    assert {tuple(map(str, map(row.get, names))) for row in plain} == {tuple(map(str, map(row.get, names))) for row in ruled}
    digests = [{(row["op"], row["slot"]): row["digest"] for row in rows if row["phase"] == "forward"} for rows in (plain, ruled)]
    changed = ("paddle._C_ops.batch_norm", "output.0")
    assert digests[0][changed] != digests[1][changed]
    (use,) = trueup.open_capture(tmp_path / "ruled").ranks[0]["policy"]
    assert (use["rule"], use["changed"]) == (1, 3)
    assert not [note for note in notes_of(tmp_path / "ruled") if "not recorded" in note and "only their sum" not in note]


def test_the_python_code_of_what_to_static_was_given_runs(capsys: pytest.CaptureFixture[str]) -> None:
    paddle.seed(3)
    model, x = Two(), tensor(4, 6)
    expected = model(x)
    compiled = paddle.jit.to_static(model, full_graph=True)
    with applying(compiled, scope="second", dtype="float64", op="*.linear") as handle:
        result = compiled(x)
    assert handle.uses()[0].changed == 1
    assert np.allclose(result.numpy(), expected.numpy(), rtol=1e-5)
    assert "a Layer was given to to_static: its Python code runs while a policy is applied" in capsys.readouterr().err


# ---------------------------------------------------------------- what cannot be done
def test_a_call_that_cannot_run_so_names_the_rule() -> None:
    with applying(op="*.relu_", dtype="float64", phase="backward"), pytest.raises(PolicyFailed) as caught:
        F.relu_(tensor(3) * 2)
    assert str(caught.value) == (
        "The policy cannot be kept.\n"
        "  where:    paddle._C_ops.relu_\n"
        "  expected: rule 1 (*.relu_: float64, backward only)\n"
        "  got:      its forward and its backward cannot run in different ways: it writes an argument\n"
        "  next:     leave out phase, and both run in the same way"
    )


def test_deterministic_is_refused_where_paddle_has_no_switch_for_it() -> None:
    with pytest.raises(TrueupError) as caught:
        applying(op="*.conv2d", deterministic=True)
    assert "got:      Paddle 3.3.1 for cpu, which has none" in str(caught.value).replace(paddle.__version__, "3.3.1")


def test_deterministic_is_a_flag_around_the_call_and_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "FLAGS_check_nan_inf_level"  # stands for a flag that this build lacks
    monkeypatch.setattr(ruled, "FLAGS", (flag, "FLAGS_no_such_flag"))
    seen: list[int] = []

    def look() -> int:
        return int(paddle.get_flags(flag)[flag])

    class Looks(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            seen.append(look())
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            seen.append(look())
            return gradient

    with applying(op="Looks.apply", deterministic=True) as handle:
        Looks.apply(tensor(3)).sum().backward()
    assert (seen, look(), handle.uses()[0].changed) == ([1, 1], 0, 1)


def test_operators_have_the_names_that_auto_cast_knows() -> None:
    found = listed(["paddle._C_ops.subtract", "paddle.Tensor.__sub__", "paddle._C_ops.gelu", "paddle.Tensor.backward"])
    assert found["paddle._C_ops.subtract"] == found["paddle.Tensor.__sub__"] == ["elementwise_sub", "subtract"]
    assert found["paddle._C_ops.gelu"] == ["gelu"]
    assert "paddle.Tensor.backward" not in found
