"""Policies on a second device (``tests/with_paddle/device``): calls moved to the CPU, and what auto_cast would run in float16."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from recording import bits

from models import build
from trueup.recording.adapters.paddle.policies import apply_policy
from trueup.recording.engine.replacing import Sweep
from trueup.recording.policy_file import parse


def trained(name: str, rule: str | None) -> tuple[Any, Any]:
    paddle.set_device("host:0")
    training = build(name)
    handle = None if rule is None else apply_policy(training.model, parse(f"[[rule]]\n{rule}\n", "policy.toml"))
    found = [training.step(k) for k in range(2)]
    use = None
    if handle is not None:
        (use,) = handle.uses()
        handle.remove()
    assert {str(p.place) for p in training.model.parameters()} == {"Place(host:0)"}
    return bits([*found, *training.model.state_dict().values()]), use


@pytest.fixture
def broken() -> Any:
    """Let the device's batch norm and GELU give a result that is 1 % too large, forward and backward."""

    def wrong(original: Any) -> Any:
        def run(x: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(x, *args, **kwargs)
            if x.place.is_cpu_place():
                return result
            first, *rest = result if isinstance(result, (tuple, list)) else [result]
            return (first * 1.01, *rest) if rest else first * 1.01

        return run

    sweep = Sweep([(op, wrong(op)) for op in (paddle._C_ops.gelu, paddle._C_ops.batch_norm)])
    sweep.install()
    yield
    sweep.remove()


@pytest.mark.parametrize(("name", "op"), [("transformer", "gelu"), ("ctc", "batch_norm")])
def test_a_broken_operator_is_healed_on_the_cpu(name: str, op: str, request: pytest.FixtureRequest) -> None:
    healthy, _ = trained(name, None)
    request.getfixturevalue("broken")
    assert trained(name, None)[0] != healthy
    healed, use = trained(name, f'op = "paddle._C_ops.{op}"\ndevice = "cpu"')
    assert healed == healthy, "the fallback of this device is the CPU's kernel"
    assert use.changed == 4
    layer = {"gelu": "TransformerEncoderLayer", "batch_norm": "BatchNorm2D"}[op]
    assert trained(name, f'level = "module"\nop = "{layer}"\ndevice = "cpu"')[0] == healthy


@pytest.mark.parametrize("rule", [
    'op = "*"\ndevice = "cpu"', 'op = "*"\ndevice = "cpu"\nphase = "forward"', 'op = "*"\ndevice = "cpu"\nphase = "backward"',
    'op = "*"\ndevice = "cpu"\nphase = "optimizer"', 'level = "module"\nscope = "?*"\ndevice = "cpu"',
], ids=lambda rule: rule.replace("\n", " "))  # fmt: skip
def test_where_a_call_runs_leaves_every_bit(rule: str) -> None:
    plain, _ = trained("transformer", None)
    ruled, use = trained("transformer", rule)
    assert use.changed
    assert ruled == plain


@pytest.mark.parametrize("rule", ['op = "*"\ndtype = "float32"', 'level = "module"\nscope = "?*"\ndtype = "float32"'])
def test_what_auto_cast_would_run_in_float16_runs_in_float32(rule: str) -> None:
    def losses(rule: str | None) -> list[float]:
        paddle.set_device("host:0")
        training, scaler = build("ctc"), paddle.amp.GradScaler(init_loss_scaling=1024.0)
        handle = None if rule is None else apply_policy(training.model, parse(f"[[rule]]\n{rule}\n", "policy.toml"))
        found = []
        try:
            for k in range(2):
                with paddle.amp.auto_cast(dtype="float16"):
                    loss = training.loss(k)
                scaler.scale(loss).backward()
                scaler.step(training.optimizer)
                scaler.update()
                training.optimizer.clear_grad()
                found.append(float(loss))
        finally:
            if handle is not None:
                handle.remove()
        return found

    with pytest.raises(RuntimeError, match="float16"):  # which this device has no kernels for
        losses(None)
    paddle.set_device("host:0")
    training = build("ctc")
    assert losses(rule) == pytest.approx([float(training.step(k)) for k in range(2)], rel=1e-3)
