"""The example's wrong backend of torch.compile, and what switches it off in a process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trueup.recording.adapters.torch import switching

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorflow_classifier"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("train_torch_of_the_example", EXAMPLE / "train_torch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("digits", "fusing_backend"):
        sys.modules.pop(name, None)


def logits(example: ModuleType, backend: str | None) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = example.Classifier()
    if backend is not None:
        model = torch.compile(model, backend=example.BACKENDS[backend])
    pictures, _ = next(iter(example.batches(1)))
    return model(torch.from_numpy(pictures[..., 0])).detach()


def test_the_backend_is_wrong_and_another_one_is_taken(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import eval_frame

    truth = logits(example, None)
    torch.testing.assert_close(logits(example, "right"), truth, rtol=1e-6, atol=1e-7)
    assert (logits(example, "wrong") - truth).abs().max() > 1e-4, "the planted fault is one"
    monkeypatch.setattr(eval_frame, "get_compiler_fn", eval_frame.get_compiler_fn)
    asked = switching.compile_backend("aot_eager")
    torch.testing.assert_close(logits(example, "wrong"), truth, rtol=1e-6, atol=1e-7)
    assert len(asked()) == 1
    assert asked()[0].startswith("wrong_fusion (")
    assert "fusing_backend.py:" in asked()[0]


def test_compiled_code_is_not_run(example: ModuleType) -> None:
    truth = logits(example, None)
    before = torch._dynamo.eval_frame._stance
    try:
        switching.compile_stance("force_eager")
        assert torch.equal(logits(example, "wrong"), truth)
    finally:
        torch._dynamo.eval_frame._set_stance(before)
