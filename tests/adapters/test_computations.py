"""What has broken observers before: the run is unchanged, and what was recorded says who, where and with which tensors."""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trueup
from adapters.computations import COMPUTATIONS, ON_THE_CPU_ONLY, Views, build
from adapters.loops import WIDTH, Mlp
from adapters.running import everywhere, outcome

pytestmark = pytest.mark.filterwarnings("ignore")

ITERATIONS = 3


def run(name: str, device: str, directory: Path | None, **options: Any) -> dict[str, Any]:
    return outcome(build(name, device), ITERATIONS, directory, as_real, **options)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


@functools.cache
def unobserved(name: str, device: str) -> dict[str, Any]:
    return run(name, device, None)


def skip_where_impossible(name: str, device: str) -> None:
    if device == "npu" and name in ON_THE_CPU_ONLY:
        pytest.skip("the simulated device has no such kernels")


@pytest.mark.parametrize(
    ("device", "options"), [("cpu", {"detail": "tensor"}), ("npu", {"detail": "tensor"}), ("cpu", {"level": "module"})], ids=str
)
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_run_is_unchanged(name: str, options: dict[str, Any], device: str, path: Path) -> None:
    skip_where_impossible(name, device)
    observed = run(name, device, path, **options)
    assert [key for key, value in unobserved(name, device).items() if observed[key] != value] == []
    capture = trueup.open_capture(path)
    assert (capture.problems, capture.ranks[0]["notes"]) == ([], [])


@pytest.mark.parametrize(("name", "device"), everywhere(COMPUTATIONS))
def test_steps_repeat_themselves(name: str, device: str, path: Path, calls) -> None:
    """Each step makes the same calls in the same phases and scopes, and nothing is recomputed that nobody checkpoints."""
    skip_where_impossible(name, device)
    loop = build(name, device)
    with trueup.capture(path, model=loop.models, on_error="stop") as capture:
        for _ in range(ITERATIONS):
            loop.iterate()
            capture.step()
    second, third = (
        Counter((row["phase"], row["level"], row["scope"], row["op"]) for row in calls(step=step)) for step in (1, 2)
    )
    assert second == third
    assert {key[0] for key in second} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("level", ["api", "aten"])
def test_views_are_read_after_each_write(level: str, device: str, path: Path, rows) -> None:
    """The weights and the buffer that a later call reads are those that the earlier one wrote."""
    torch.manual_seed(0)
    model = Views().to(device)
    with trueup.capture(path, model=model, level=("module", level), on_error="stop"):
        model(torch.randn(4, WIDTH).to(device)).sum().backward()
    (buffer,) = [row for row in rows(level="module", op="Views", phase="forward") if row["slot"] == "output.buffer.memory"]
    assert buffer["l2"] == pytest.approx(float(model.memory.cpu().double().norm()))
    zeroed = [row for row in rows(level=level) if row["op"].endswith("zero_") and row["slot"] == "output.0"]
    assert [row["l2"] for row in zeroed] == [0.0]
    found = rows(level=level, phase="forward")
    added = next(row for row in found if row["op"].endswith("add_") and row["slot"] == "output.0")
    before = next(row for row in found if row["seq"] == added["seq"] and row["slot"] == "input.0")
    assert added["shape"] == [4, 8]
    assert added["mean"] == pytest.approx(before["mean"] + 1)
    assert added["digest"] != before["digest"]


def test_hooks_that_change_values_are_seen(device: str, path: Path, rows) -> None:
    run("hooks", device, path)
    found = {(r["level"], r["scope"], r["op"], r["phase"], r["slot"]): r for r in rows(step=0) if r["ordinal"] == 0}
    linear = "torch.nn.functional.linear"
    # The module level sees what the module was given and gave; the api level what its function computed with.
    assert found["api", "up", linear, "forward", "input.0"]["l2"] == pytest.approx(
        found["module", "up", "Linear", "forward", "input.0"]["l2"] / 2
    )
    assert found["api", "norm", "torch.nn.functional.layer_norm", "forward", "output.0"]["l2"] == pytest.approx(
        found["module", "norm", "LayerNorm", "forward", "output.0"]["l2"] / 2
    )
    assert found["module", "down", "Linear", "forward", "param.bias"]
    # The function's own gradients, before and after the hooks on its module's.
    inside, around = ("api", "down", linear, "backward"), ("module", "down", "Linear", "backward")
    assert found[(*inside, "grad_output.0")]["l2"] == pytest.approx(found[(*around, "grad_output.0")]["l2"] * 0.5)
    assert found[(*around, "grad_input.0")]["l2"] == pytest.approx(found[(*inside, "grad_input.0")]["l2"] * 3)


def test_layers_of_torch_record_their_gradients(device: str, path: Path, rows) -> None:
    run("sequence", device, path)
    slots = {row["slot"] for row in rows(step=1, op="torch.gru", phase="backward")}
    assert {"grad_output.0", "grad_input.0", "grad_input.2.0", "grad_input.2.3"} <= slots
    cells = Counter(row["seq"] for row in rows(step=1, op="torch.lstm_cell", phase="backward") if row["slot"] == "grad_input.2")
    assert len(cells) == 5  # one for each time step


def test_double_backward_names_its_calls(device: str, path: Path, calls) -> None:
    run("penalty", device, path)
    assert {row["phase"] for row in calls()} == {"forward", "backward", "optimizer"}
    (forward,) = [row for row in calls(step=1, phase="forward") if row["op"].endswith("Exponential.apply")]
    backward = [row for row in calls(step=1, phase="backward") if row["op"].endswith("Exponential.apply")]
    assert {row["forward_seq"] for row in backward} == {forward["seq"]}
    assert len(backward) == 2  # in torch.autograd.grad, and in loss.backward
    inner = [row for row in calls(step=1, phase="backward", level="api") if row["parent"] == backward[0]["seq"]]
    assert [row["op"] for row in inner] == ["torch.Tensor.mul"]


def test_transforms_are_calls(path: Path, rows) -> None:
    run("per sample", "cpu", path)
    silu = [row for row in rows(step=1, level="aten", op="aten::silu") if row["slot"] == "output.0"]
    assert silu[0]["shape"][0] == 4  # all samples of vmap at once
    assert all(row["l2"] is not None for row in silu)
    inside = [row for row in rows(step=1, level="api", op="torch.nn.functional.silu") if row["slot"] == "output.0"]
    assert [row["l2"] for row in inside] == [row["l2"] for row in silu]  # at any level: the bytes below the transforms


def test_complex_and_narrow_numbers_are_measured(device: str, path: Path, rows) -> None:
    run("spectral", device, path)
    (weight,) = [row for row in rows(step=0, op="Filter", phase="forward") if row["slot"] == "param.weight"]
    assert (weight["dtype"], weight["l2"] > 0) == ("complex64", True)
    run("narrow", device, path.with_name("narrow"))
    found = trueup.open_capture(path.with_name("narrow")).records(step=0, level="aten").to_pylist()
    assert {row["dtype"] for row in found if row["l2"] is not None} >= {"float8_e4m3fn", "float32"}


def test_evaluation_between_steps_belongs_to_the_step(device: str, path: Path, calls) -> None:
    run("images", device, path)
    for step in range(ITERATIONS):
        convolutions = calls(step=step, op="torch.nn.functional.conv2d", phase="forward", scope="3")
        assert len(convolutions) == 3  # without gradients, in inference mode, in training
        assert len(calls(step=step, op="torch.nn.functional.conv2d", phase="backward", scope="3")) == 1
        assert not calls(step=step, op="torch.nn.functional.conv2d", phase="backward", scope="0")  # frozen, and first


def test_sparse_operands_are_taken_apart(path: Path, rows) -> None:
    run("graph", "cpu", path)
    slots = {row["slot"]: row for row in rows(step=0, op="torch._C._sparse._sparse_mm", phase="forward")}
    assert slots["input.0.values"]["l2"] > 0
    assert slots["input.0.indices"]["dtype"] == "int64"
    csr = {row["slot"] for row in rows(step=0, phase="forward", level="api") if "matmul" in row["op"]}
    assert {"input.0.crow_indices", "input.0.col_indices", "input.0.values"} <= csr


def test_jagged_batches_are_taken_apart(path: Path, rows) -> None:
    run("ragged", "cpu", path)
    for scope in ("0", "1"):
        slots = {row["slot"]: row for row in rows(step=0, level="module", scope=scope, phase="forward")}
        assert slots["output.0.values"]["l2"] > 0
        assert slots["input.0.offsets"]["max"] == 10
    gradients = {row["slot"] for row in rows(step=0, level="module", scope="1", phase="backward")}
    assert "grad_output.0.values" in gradients


# ------------------------------------------------------------------- evaluation, fast paths
def test_fast_paths_are_off_and_the_numbers_are_those_of_the_slow_one(path: Path, calls) -> None:
    """Under any TorchFunctionMode nn.TransformerEncoderLayer takes its ordinary path; so it does here, and only here."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        fast = model(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        with trueup.capture(path, model=model, on_error="stop"):
            observed = model(x)
        assert torch.equal(observed, slow)
        assert torch.equal(model(x), fast)
    assert not calls(op="aten::_transformer_encoder_layer_fwd")
    assert Counter(row["scope"] for row in calls(op="aten::_scaled_dot_product_flash_attention_for_cpu")) == {
        "layers.0.self_attn": 1, "layers.1.self_attn": 1,
    }  # fmt: skip


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_forward_also_after_a_backward(grad: Any, device: str, path: Path, calls) -> None:
    model = Mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH).to(device)
    with trueup.capture(path, model=model, on_error="stop"):
        for _ in range(2):
            model.train()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with grad():
                model(x).argmax(1)
    linear = Counter((row["step"], row["phase"]) for row in calls(op="torch.nn.functional.linear"))
    # What follows the optimizer up to the next forward belongs to its step, so an evaluation begins the next one.
    assert linear == {(0, "forward"): 2, (0, "backward"): 2, (1, "forward"): 4, (1, "backward"): 2, (2, "forward"): 2}
    assert {row["phase"] for row in calls(op="torch.Tensor.argmax")} == {"forward"}


# ------------------------------------------------------------------- exceptions, threads, workers
class Fails(nn.Module):
    """Raises once, in forward, in backward, or while it is recomputed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = Mlp(), where

    def broken(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "recompute" and torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError("mine")
        if self.where == "first run":
            raise ZeroDivisionError("mine")
        return self.inner(x).exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(self.broken, x, use_reentrant=self.where.endswith("reentrant"))
        if self.where == "backward":
            y.register_hook(lambda gradient: 1 / 0)
        if self.where == "forward":
            raise ZeroDivisionError("mine")
        return y


@pytest.mark.parametrize("where", ["forward", "first run", "backward", "recompute"])
def test_the_step_after_an_exception_is_clean(where: str, path: Path, calls) -> None:
    """On the CPU only: what raises in a backward on the simulated device's thread ends the process, with a capture or not."""
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)

    def train(model: nn.Module, capture: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x.grad = None
            model(x).mean().backward()
            optimizer.step()
            capture.step()

    def keys(step: int) -> Counter[tuple[Any, ...]]:
        names = ("phase", "level", "scope", "op", "ordinal")
        return Counter((*(row[name] for name in names), row["forward_seq"] is None) for row in calls(step=step))

    model = Fails(where)
    caught: list[BaseException] = []
    with trueup.capture(path, model=model, on_error="stop") as capture:
        try:
            model(x).mean().backward()
        except ZeroDivisionError as error:
            caught.append(error)  # held with its traceback, as a debugger would
        state = capture._session.threads.state
        assert (state.contexts, state.modules, state.running, state.busy, state.stepping) == ([], [], [], False, None)
        capture.step()
        model.where = ""
        train(model, capture)
        assert state.runs == []
    assert len(caught) == 1
    assert keys(1) == keys(2) == keys(3)


def test_training_on_a_second_thread_stays_apart(path: Path, calls, notes) -> None:
    """Two models train at once; the main one's capture holds what a capture of it alone holds."""

    def train(model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, WIDTH)).mean().backward()
            optimizer.step()

    def record(directory: Path, other: nn.Module | None) -> Counter[tuple[Any, ...]]:
        torch.manual_seed(0)
        model = Mlp()
        thread = threading.Thread(target=train, args=(other, 10), name="second") if other is not None else None
        with trueup.capture(directory, model=model, on_error="stop"):
            if thread is not None:
                thread.start()
            train(model, 3)
            if thread is not None:
                thread.join()
        found = trueup.open_capture(directory).records(["seq", "step", "phase", "level", "scope", "op"]).to_pylist()
        rows = {row["seq"]: tuple(list(row.values())[1:]) for row in found if not row["scope"].startswith("Sequential")}
        return Counter(rows.values())

    alone = record(path.with_name("alone"), None)
    both = record(path, nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()))
    assert both == alone
    assert any("thread second runs modules" in note for note in notes())


class Numbers(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, k: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(k)).exp()


@pytest.mark.parametrize(("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True)])
def test_workers_of_a_loader(method: str, persistent: bool, path: Path, calls, notes, warm: str) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")

    def train(directory: Path | None) -> list[float]:
        torch.manual_seed(0)
        model, losses = Mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        workers = {"num_workers": 1, "multiprocessing_context": method, "persistent_workers": persistent}
        loader = DataLoader(Numbers(), 3, shuffle=True, **workers)

        def go() -> None:
            for _ in range(2):
                for batch in loader:
                    optimizer.zero_grad()
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())

        if directory is None:
            go()
        else:
            with trueup.capture(directory, model=model, level=("module", "api"), on_error="stop"):
                go()
        return losses

    expected = train(None)
    assert train(path) == expected
    assert {row["step"] for row in calls()} == {0, 1, 2, 3}
    assert not calls(op="torch.Tensor.exp")  # what the workers compute is theirs
    assert notes() == []
    assert trueup.open_capture(path).problems == []
