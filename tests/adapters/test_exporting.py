"""A model is exported, traced, copied and saved during a capture as without one, and nothing of ours comes along."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from adapters.conftest import Rows


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2))


def bert() -> nn.Module:
    torch.manual_seed(0)
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=8
    )
    return BertForMaskedLM(config).eval()


X = torch.linspace(-1, 1, 12).view(3, 4)
WORDS = {"input_ids": torch.arange(6).view(1, 6), "attention_mask": torch.ones(1, 6, dtype=torch.long)}


def saved(what: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def exported(model: nn.Module, strict: bool) -> Tensor:
    program = torch.export.export(model, (X,), strict=strict)
    assert not any("trueup" in str(node.meta.get("stack_trace", "")) for node in program.graph.nodes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module()(X)


def traced(model: nn.Module) -> Tensor:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, X), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)(X)


WAYS: dict[str, Callable[[nn.Module], Tensor]] = {
    "export": lambda model: exported(model, strict=False),
    "strict export": lambda model: exported(model, strict=True),
    "trace": traced,
    "script": lambda model: torch.jit.script(model)(X),
    "fx": lambda model: torch.fx.symbolic_trace(model)(X),
    "deepcopy": lambda model: copy.deepcopy(model)(X),
    "save": lambda model: loaded(saved(model))(X),
    "pickle": lambda model: pickle.loads(pickle.dumps(model))(X),
}


@pytest.mark.parametrize("steps", [None, [7]], ids=["recording", "idle"])
@pytest.mark.parametrize("compile", ["off", "through"])
def test_model_goes_every_way(compile: str, steps: list[int] | None, path: Path, notes: Callable[[], list[str]]) -> None:
    model = net()
    expected = model(X)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    with trueup.capture(path, compile=compile, steps=steps, on_error="stop"):
        model(X).sum().backward()
        for name, way in WAYS.items():
            found[f"{name} during"] = way(model)
        optimizer.step()
        model.load_state_dict(net().state_dict())
        during = pickle.dumps(model), pickle.dumps(optimizer), saved(model), saved(optimizer.state_dict())
    for name, way in WAYS.items():
        found[f"{name} after"] = way(model)
    assert [name for name, result in found.items() if not torch.allclose(result, expected, rtol=0, atol=1e-6)] == []
    assert not any(b"trueup" in data for data in during)
    assert all(torch.equal(a, b) for a, b in zip(loaded(during[2]).parameters(), model.parameters(), strict=True))
    if steps is None:
        assert notes() == []  # an export compiles nothing that runs


def test_language_model_is_copied_and_exported(path: Path, rows: Callable[..., Rows]) -> None:
    model = bert()
    expected = model(**WORDS).logits
    with trueup.capture(path, on_error="stop"):
        model(**WORDS)
        twin = copy.deepcopy(model)
        program = torch.export.export(model, (), WORDS)
    assert torch.equal(twin(**WORDS).logits, expected)
    assert torch.allclose(program.module()(**WORDS).logits, expected, atol=1e-6)
    assert [m for m in twin.modules() if m._forward_hooks or m._backward_hooks or "__call__" in vars(m)] == []
    assert {row["op"] for row in rows(level="module")} >= {"BertForMaskedLM"}
    assert sum(row["slot"] == "output.logits" for row in rows(level="module")) == 1  # what the export ran is no call


def test_nothing_stays_behind(path: Path) -> None:
    import torch._dynamo.eval_frame as dynamo
    from torch.optim.optimizer import _global_optimizer_post_hooks
    from torch.utils import checkpoint

    places = {
        "Module.__call__": lambda: nn.Module.__call__,
        "Function.apply": lambda: torch.autograd.Function.apply.__func__,
        "compile": lambda: torch.compile,
        "backward": lambda: torch.autograd._engine_run_backward,
        "checkpoint": lambda: checkpoint._checkpoint_without_reentrant_generator,
        "stance": lambda: (dynamo._stance, dynamo._callback_from_stance, dynamo.OptimizedModule._initialize),
        "hooks": lambda: dict(_global_optimizer_post_hooks),
        "modes": lambda: (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    }
    before = {name: place() for name, place in places.items()}
    for compile in ("off", "through"):
        model = net()
        with trueup.capture(path.with_name(compile), compile=compile, on_error="stop"):
            torch.compile(model, backend="eager")(X).sum().backward()
        assert {name: place() for name, place in places.items()} == before
        assert not any("hook" in name and value for name, value in vars(model).items())
