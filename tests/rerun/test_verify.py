"""Whether a recording is complete: calls executed where they were recorded, inside transforms, and code by its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

import trueup
from trueup.analysis.rerun.replay import Verification, verify
from trueup.foundation.model import TrueupError
from trueup.recording.adapters.torch.executing import Verifier
from trueup.recording.adapters.torch.recorded_call import Place, rebuild
from trueup.recording.execution.recorded import NotReplayable, RecordedCall, RecordedCalls

from .programs import all_calls, record


class Doubled(torch.autograd.Function):
    """Code of a user's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x + x).relu()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, received: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return received * 2 * (x > 0)


def captured(into: Path, compute: Callable[[], object], *levels: str) -> Path:
    torch.manual_seed(0)
    with trueup.capture(into, detail="tensor", level=list(levels or ("api", "aten")), on_error="stop"):
        compute()
    return into


def verified(into: Path, compute: Callable[[], object], *levels: str) -> Verification:
    return verify(captured(into, compute, *levels), processes=0)


def calls_of(into: Path, op: str) -> list[RecordedCall]:
    return [c for c in all_calls(RecordedCalls(trueup.open_capture(into))) if c.key.op == op]


def test_every_call_gives_its_recorded_bits(tmp_path: Path) -> None:
    calls = record(tmp_path)
    verifier = Verifier(calls, "cpu")
    outcomes = [verifier.verify(call) for call in all_calls(calls)]
    assert [f"{o.kind} {o.sentence}" for o in outcomes if o.verdict != "accurate"] == []
    phases = {(o.level, o.phase) for o in outcomes}
    assert phases >= {(level, phase) for level in ("api", "aten") for phase in ("forward", "backward", "optimizer")}


def samples() -> None:
    """Transforms in transforms; samples along several dimensions; numbers drawn for each sample."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    x, y = torch.randn(7, 6), torch.randn(7, 1)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(functional_call(model, weights, (x,)), y)

    vmap(grad(loss), in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
    vmap(lambda v: torch.nn.functional.dropout(v, 0.5) + torch.rand(6), randomness="different")(x)
    vmap(vmap(lambda a, b: (a * b).sum(), in_dims=(0, None)), in_dims=(None, 1))(x, x.t())
    vmap(lambda a: a.clone().mul_(2).t() @ a, in_dims=2)(torch.randn(3, 4, 5))


def test_a_call_inside_a_transform_is_executed_inside_one(tmp_path: Path) -> None:
    found = verified(tmp_path / "c", samples)
    assert found.reasons == []
    product = calls_of(tmp_path / "c", "torch.Tensor.matmul")[-1]
    assert product.invocation is not None
    assert product.invocation["transforms"] == [{"vmap": 5, "randomness": "error"}]
    assert product.invocation["args"][1] == {"tensor": "input.1", "samples": [[1, 2]]}
    assert product.tensors["input.1"].shape == (3, 4, 5)  # of all samples
    assert product.tensors["input.1"].array().shape == (3, 4, 5)
    random = calls_of(tmp_path / "c", "torch.rand")[0]
    assert random.tensors["output.0"].shape == (7, 6)


@pytest.mark.parametrize(
    "made",
    [
        {"transforms": [{"vmap": 2**40, "randomness": "error"}]},
        {"transforms": [{"vmap": 3, "randomness": "any"}]},
        {"transforms": [{"vmap": 3, "randomness": "error"}] * 17},
        {"transforms": {"vmap": 3}},
        {"transforms": [{"vmap": 3, "randomness": "error"}], "args": [{"tensor": "input.0", "samples": [[1, -1]]}]},
        {"transforms": [{"vmap": 3, "randomness": "error"}], "args": [{"tensor": "input.0", "samples": "all"}]},
    ],
)
def test_untrue_transforms_are_refused(tmp_path: Path, made: dict[str, object]) -> None:
    from dataclasses import replace

    captured(tmp_path / "c", lambda: vmap(torch.sin)(torch.ones(3, 2)))
    call = calls_of(tmp_path / "c", "torch.sin")[0]
    assert call.invocation is not None
    with pytest.raises(NotReplayable, match="damaged"):
        rebuild(replace(call, invocation={**call.invocation, **made}), Place("cpu"))


def test_code_is_reproduced_by_the_calls_inside_it(tmp_path: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    found = verified(tmp_path / "c", lambda: Doubled.apply(x).sum().backward())  # type: ignore[no-untyped-call]
    assert found.reasons == []
    assert found.by_parts == 2  # forward and backward
    assert "(2 of them, whose code is in no capture, by the calls inside them): the recording is complete." in found.sentence


def test_code_is_not_reproduced_where_its_parts_are_not_there(tmp_path: Path) -> None:
    x = torch.randn(4)
    found = verified(tmp_path / "api", lambda: Doubled.apply(x), "api")  # type: ignore[no-untyped-call]
    assert found.by_parts == 1  # its two functions are api calls
    (tmp_path / "beside").mkdir()

    class Beside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy((x + 1).numpy() * 3)  # computed outside of PyTorch

    found = verified(tmp_path / "beside" / "c", lambda: Beside.apply(x))  # type: ignore[no-untyped-call]
    assert found.exit_code == 1
    assert any("output.0 is no result of the" in why for _, why, _ in found.reasons), found.reasons


def recurrent() -> None:
    """A result that was computed from another one; weights that are cast once for several uses, or for each."""
    cell, layer = torch.nn.LSTMCell(4, 3), torch.nn.GRU(4, 3)
    hidden, _ = cell(torch.randn(2, 4))
    hidden.square().sum().backward()
    for caches in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=caches):
            layer(torch.randn(6, 2, 4))[0].float().square().sum().backward()


def test_gradients_add_up_as_they_did(tmp_path: Path) -> None:
    assert verified(tmp_path, recurrent, "api").reasons == []
    calls = calls_of(tmp_path, "torch.gru")
    assert [(c.invocation or {}).get("autocast_cache") for c in calls if c.key.phase == "forward"] == [None, False]


def test_tangents_are_named_as_missing(tmp_path: Path) -> None:
    found = verified(tmp_path / "c", lambda: jvp(torch.sin, (torch.ones(3),), (torch.ones(3),)))
    assert found.exit_code == 1
    assert {why for _, why, _ in found.reasons} == {"it is about tangents of forward-mode differentiation, which no capture holds"}


def test_elements_are_wanted(tmp_path: Path) -> None:
    calls = record(tmp_path / "stats", detail="stats", steps=1)
    with pytest.raises(TrueupError, match="expected: a capture of detail tensor"):
        verify(calls.capture.path)
