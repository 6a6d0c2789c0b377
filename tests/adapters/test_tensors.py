"""Tensors that hold no plain bytes are recorded with what can be said of them, and no tool of PyTorch's minds the capture."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trueup
from trueup.foundation import kernels
from trueup.foundation.store import open_capture

pytestmark = pytest.mark.filterwarnings("ignore")


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.ones(2, 3))


class Plain(torch.Tensor):
    """A user's tensor class; its overrides must not be run by the observer."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Plain.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


UNMEASURED = {
    "sparse": (sparse, [3, 3]),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), [3, 3]),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), [2, -1]),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), [2, -1]),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), [4]),
    "meta": (lambda: torch.ones(2, 5, device="meta"), [2, 5]),
    "fake": (fake, [2, 3]),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), [2, 2]),
}


@pytest.mark.parametrize("detail", ["stats", "tensor", "digest"])
@pytest.mark.parametrize("name", UNMEASURED)
def test_metadata_without_statistics(name: str, detail: str, path: Path, rows) -> None:
    make, shape = UNMEASURED[name]
    tensor = make()
    module = nn.Identity()
    with trueup.capture(path, model=module, detail=detail, on_error="stop"):
        module(tensor)
        torch.ones(2).exp()
    (row,) = [row for row in rows(level="module") if row["slot"] == "input.0"]
    assert row["shape"] == shape
    assert (row["l2"], row["digest"], row["sketch"]) == (None, None, None)
    assert row["dtype"] == str(tensor.dtype).removeprefix("torch.")
    assert [row["digest"] for row in rows(op="torch.Tensor.exp")] != [None, None]


def test_functional_transforms(path: Path, rows) -> None:
    weight = torch.randn(3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).tanh().sum()

    x = torch.randn(5, 3)
    expected = torch.vmap(torch.func.grad(loss))(x)
    with trueup.capture(path, on_error="stop"):
        observed = torch.vmap(torch.func.grad(loss))(x)
        torch.func.jvp(loss, (x[0],), (x[1],))
        torch.func.functional_call(nn.Linear(3, 3), {"bias": torch.zeros(3)}, (x,))
    assert torch.equal(observed, expected)
    assert rows(op="aten::tanh")


@pytest.mark.parametrize("level", [("module",), ("api",), ("aten",), ("module", "api", "aten")])
def test_transforms_of_a_module(level: tuple[str, ...], path: Path, rows) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(5, 3)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    def computed() -> list[torch.Tensor]:
        samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return [*samples.values(), torch.func.hessian(loss, argnums=1)(parameters, x[0]), torch.func.jacrev(model)(x[0])]

    expected = computed()
    with trueup.capture(path, on_error="stop", level=level):
        observed = computed()
        model(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(observed, expected, strict=True))
    assert rows(phase="backward")


def test_inference_mode_and_subclasses(path: Path, rows) -> None:
    x = torch.ones(3).as_subclass(Plain)
    with torch.inference_mode():
        inner = torch.ones(3)
    Plain.seen = 0
    torch.exp(x)
    plain = Plain.seen
    with trueup.capture(path, on_error="stop"), torch.inference_mode():
        Plain.seen = 0
        torch.exp(x)
        assert Plain.seen == plain
        inner.mul_(2)
        inner.exp()
        inner.mul_(2)
        inner.exp()
    outputs = [row["max"] for row in rows(op="aten::exp") if row["slot"] == "output.0"]
    assert outputs == pytest.approx([2.718281828, 7.389056, 54.59815])


def test_lazy_modules(path: Path, rows) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with trueup.capture(path, model=model, on_error="stop"):
        model(torch.randn(3, 5)).sum().backward()
    assert {row["slot"] for row in rows(level="module", scope="1", phase="forward")} >= {"input.0", "output.0"}


@pytest.mark.parametrize("level", ["module", "api", "all"])
def test_compiled_code_is_noted(level: str, path: Path, notes) -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    function = torch.compile(lambda x: x.sin() + 1, backend="eager")
    x = torch.ones(2, 3)
    expected = model(x), function(x)
    with trueup.capture(path, model=model, level=level, on_error="stop"):
        assert torch.equal(model(x), expected[0])
        assert torch.equal(function(x), expected[1])
        torch.ones(1).exp()
    assert any(note.startswith("torch.compile was used: ") for note in notes())
    assert torch.equal(model(x), expected[0])


def test_other_threads_are_noted(path: Path, notes, calls) -> None:
    model = nn.Linear(2, 2)
    with trueup.capture(path, model=model, on_error="stop"):
        thread = threading.Thread(target=lambda: model(torch.ones(1, 2)), name="feeder")
        thread.start()
        thread.join()
        model(torch.ones(1, 2))
    assert notes() == ["thread feeder runs modules; only its module calls are seen, not its api and aten calls"]
    assert len(calls(level="module")) == 2


def test_copy_save_and_trace(path: Path, calls) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.ones(2, 3)
    expected = model(x)

    def use() -> None:
        assert torch.equal(copy.deepcopy(model)(x), expected)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), expected)
        assert "detach" not in str(traced.graph)
        assert torch.equal(torch.jit.script(nn.Linear(3, 3).eval())(x) * 0, torch.zeros(2, 3))
        assert len(list(torch.fx.symbolic_trace(model).graph.nodes)) == 4

    with trueup.capture(path, model=model, on_error="stop"):
        use()
    use()
    assert calls(level="module")


def test_export_works(path: Path) -> None:
    model = nn.Linear(3, 3)
    with trueup.capture(path, model=model, on_error="stop"):
        batch = torch.export.Dim("batch")
        exported = torch.export.export(model, (torch.ones(4, 3),), dynamic_shapes=({0: batch},))
    assert exported.module()(torch.ones(7, 3)).shape == (7, 3)


def test_hooks_of_the_user_keep_their_order(device: str, path: Path) -> None:
    def order(directory: Path | None) -> list[str]:
        torch.manual_seed(0)
        said: list[str] = []
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)).to(device)
        model[0].register_forward_pre_hook(lambda m, a: said.append("pre"))
        model[0].register_forward_hook(lambda m, a, o: said.append("forward"))
        model[0].register_full_backward_hook(lambda m, i, o: said.append("backward"))
        model[0].weight.register_hook(lambda g: said.append("tensor"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: said.append("accumulated"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *a: said.append("step pre"))
        optimizer.register_step_post_hook(lambda *a: said.append("step post"))

        def go() -> None:
            x = torch.ones(2, 3).to(device).requires_grad_()
            out = model[0](x).clone()
            out.register_hook(lambda g: said.append("output"))
            out.sum().backward()
            optimizer.step()

        if directory is None:
            go()
        else:
            with trueup.capture(directory, model=model, on_error="stop"):
                go()
        return said

    expected = order(None)
    assert len(expected) == 8
    assert order(path) == expected


def test_workers_of_a_loader_let_go(path: Path, calls) -> None:
    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, k: int) -> torch.Tensor:
            return torch.full((2,), float(k)).exp()

    with trueup.capture(path, on_error="stop"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(Data(), batch_size=2, num_workers=1))
        torch.stack(batches).log()
    assert calls(op="torch.Tensor.log")
    assert not calls(op="torch.Tensor.exp")


def test_views_of_a_kept_buffer_are_not_kept_again(path: Path) -> None:
    layer = torch.nn.Linear(64, 192)
    x = torch.randn(8, 64)
    with trueup.capture(path, level="api", detail="tensor", on_error="stop"):
        hidden = layer(x)
        q, k, v = hidden[:, :64], hidden[:, 64:128], hidden[:, 128:]
        scores = q @ k.transpose(0, 1)
        v.add_(1.0)  # another version of the buffer
        scores @ v
    capture = open_capture(path)
    rows = [row for row in capture.records().to_pylist() if row["digest"] is not None]
    for row in rows:
        place = (row["payload_segment"], row["payload_key"], row["payload_view"])
        payload = np.ascontiguousarray(capture.payload(0, *place))
        assert kernels.hexadecimal(kernels.digest(payload)) == row["digest"], row["op"]
    whole = next(row for row in rows if (row["op"], row["slot"]) == ("torch.nn.functional.linear", "output.0"))
    views = [row for row in rows if row["payload_view"] is not None]
    assert {row["payload_key"] for row in views} == {whole["payload_key"]}
    assert {row["op"].rpartition(".")[2] for row in views} >= {"__getitem__", "transpose"}
    written = sum(row["numel"] for row in {(r["payload_key"]): r for r in rows if r["payload_view"] is None}.values())
    assert written < sum(row["numel"] for row in {r["digest"]: r for r in rows}.values())
