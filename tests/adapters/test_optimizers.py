"""Optimizers of all kinds: the run is unchanged, an iteration is a step, and each call has its phase."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trueup
from adapters.loops import LOOPS, ON_THE_CPU_ONLY, build
from adapters.running import everywhere, outcome

ITERATIONS = 5


def run(name: str, device: str, directory: Path | None, **options: Any) -> dict[str, Any]:
    return outcome(build(name, device), ITERATIONS, directory, without_zeros, **options)


def without_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


@functools.cache
def unobserved(name: str, device: str) -> dict[str, Any]:
    return run(name, device, None)


def skip_where_impossible(name: str, device: str) -> None:
    if device == "npu" and name in ON_THE_CPU_ONLY:
        pytest.skip("the simulated device has no such kernels")


@pytest.mark.parametrize(("name", "device"), everywhere(LOOPS))
def test_run_is_unchanged(name: str, device: str, path: Path) -> None:
    skip_where_impossible(name, device)
    observed = run(name, device, path, detail="tensor")
    assert [key for key, value in unobserved(name, device).items() if observed[key] != value] == []
    assert trueup.open_capture(path).problems == []


IRREGULAR = ("actor-critic",)
"""Loops whose iterations cannot be told from their optimizers."""


@pytest.mark.parametrize(("name", "device"), everywhere(name for name in LOOPS if name not in IRREGULAR))
def test_an_iteration_is_a_step(name: str, device: str, path: Path, calls, notes) -> None:
    skip_where_impossible(name, device)
    run(name, device, path, level="api")
    backwards = Counter(row["step"] for row in calls(op="torch.Tensor.backward"))
    assert sorted(backwards) == list(range(ITERATIONS))
    if name != "lbfgs":  # whose closure runs as often as it takes
        assert set(backwards.values()) == {2 if name in ("gan", "trimmings") else 1}
    assert notes() == []


def test_optimizers_of_different_frequency_are_noted(path: Path, calls, notes) -> None:
    run("actor-critic", "cpu", path, level="api")
    assert len(notes()) == 1
    assert notes()[0].startswith("the optimizers do not step in one pattern, so from step 2 on each optimizer's step ")
    # Iteration 0 is a step, 1 and the critic of 2 are one, since the actor was waited for; from there on each optimizer's step.
    assert Counter(row["step"] for row in calls(op="torch.Tensor.backward")) == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize("name", ["actor-critic", "by hand", "gan"])
def test_explicit_steps_count_iterations(name: str, device: str, path: Path, calls, notes) -> None:
    loop = build(name, device)
    with trueup.capture(path, model=loop.models, level="api", on_error="stop") as capture:
        for _ in range(ITERATIONS):
            loop.iterate()
            capture.step()
    assert {row["step"] for row in calls()} == set(range(ITERATIONS))
    assert Counter(row["step"] for row in calls(op="torch.Tensor.backward"))[1] == (2 if name == "gan" else 1)
    assert notes() == []


def test_a_loop_without_an_optimizer(device: str, path: Path, calls, notes) -> None:
    """Its weights say where a step ends: ``p.data.sub_`` counts in no version, and is seen."""
    run("by hand", device, path, level="api")
    assert notes() == []
    found = [(row["step"], row["phase"]) for row in calls(op="torch.Tensor.sub_")]
    assert set(found) == {(step, "optimizer") for step in range(ITERATIONS)}
    assert {row["phase"] for row in calls(op="torch.nn.functional.linear")} == {"forward", "backward"}


def test_a_loop_whose_weights_stay_is_noted(device: str, path: Path, notes) -> None:
    model = torch.nn.Linear(2, 2).to(device)
    with trueup.capture(path, model=model, level="api", on_error="stop"):
        for _ in range(2):
            model(torch.ones(1, 2).to(device)).sum().backward()
            model.zero_grad()
    assert notes() == [
        "no optimizer of torch.optim stepped and step() was never called, so everything is step 0; call step() at the end of an "
        "iteration"
    ]


OPTIMIZER_CALLS = {
    "plain": "torch.Tensor.add_", "foreach": "torch._foreach_addcdiv_", "fused": "torch._fused_adam_",
    "fused sgd": "torch._fused_sgd_", "own": "torch.Tensor.sign", "wrapped": "torch.Tensor.add_", "lbfgs": "torch.Tensor.dot",
    "gan": "torch.Tensor.addcdiv_", "in the backward": "torch.Tensor.add_",
}  # fmt: skip


@pytest.mark.parametrize("level", ["api", "aten"])
@pytest.mark.parametrize("name", OPTIMIZER_CALLS)
def test_what_an_optimizer_executes_is_of_its_phase(name: str, level: str, path: Path, calls, rows) -> None:
    run(name, "cpu", path, level=level)
    op = OPTIMIZER_CALLS[name]
    if level == "aten":
        op = f"aten::{op.rpartition('.')[2]}"
    found = calls(op=op, phase="optimizer")
    assert {row["step"] for row in found} >= {0, ITERATIONS - 1}, sorted({row["op"] for row in calls(phase="optimizer")})
    written = [row for row in rows(op=op, phase="optimizer") if row["slot"].startswith("output")]
    assert written or name == "lbfgs"
    assert {row["scope"] for row in found} == {""}


def test_clipping_and_averages_are_of_phase_optimizer(device: str, path: Path, calls) -> None:
    run("trimmings", device, path)
    by_phase = Counter((row["phase"], row["op"].replace("linalg.", "")) for row in calls(step=1, level="api"))
    norms = "torch._foreach_norm" if device == "cpu" else "torch.vector_norm"
    assert by_phase["optimizer", norms] >= 1
    assert by_phase["optimizer", "torch.clamp"] == 1  # the factor by which the gradients are scaled
    assert by_phase["optimizer", "torch._foreach_lerp_"] == 1  # the average of the weights
    assert by_phase["forward", "torch.nn.functional.linear"] == 4  # two micro-batches through two layers
    assert not [op for phase, op in by_phase if phase == "forward" and ("_foreach_" in op or "vector_norm" in op)]


class Outside(torch.optim.Optimizer):
    """Writes past PyTorch, as the kernels of an extension do: it got hold of the memory before the capture began."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.memory = {p: p.detach().numpy() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> None:
        for parameter, memory in self.memory.items():
            memory -= 0.1 * np.array(parameter.grad.tolist(), dtype=np.float32)


MAKERS = {
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "outside": Outside,
}


@pytest.mark.parametrize("level", ["module", "api", "aten", "all"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_are_those_of_the_step(name: str, level: str, path: Path, rows) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = MAKERS[name](model.parameters())
    norms = []
    with trueup.capture(path, model=model, level=level, on_error="stop"):
        for _ in range(4):
            model(torch.ones(1, 3)).square().sum().backward()
            norms.append(float(model.weight.detach().double().norm()))
            optimizer.step()
            optimizer.zero_grad()
    slots = {"module": "param.weight", "api": "input.1", "all": "param.weight"}
    ops = {"module": "Linear", "api": "torch.nn.functional.linear", "aten": "aten::t", "all": "Linear"}
    found = [row["l2"] for row in rows(op=ops[level], phase="forward") if row["slot"] == slots.get(level, "input.0")]
    assert found == pytest.approx(norms)
    assert len(set(norms)) == 4


def test_gradients_of_an_embedding_are_sparse(path: Path, rows) -> None:
    run("dense and sparse", "cpu", path)
    (gradient, *_) = [row for row in rows(op="torch.nn.functional.embedding", phase="backward") if row["slot"] == "grad_input.1"]
    assert (gradient["shape"], gradient["strides"]) == ([30, 12], None)


def test_second_thread_does_not_end_steps(path: Path, calls, notes) -> None:
    import threading

    main, other = build("plain", "cpu"), build("gan", "cpu")

    def side() -> None:
        for _ in range(3):
            other.iterate()

    with trueup.capture(path, model=main.models, on_error="stop"):
        for _ in range(2):
            main.iterate()
            thread = threading.Thread(target=side, name="side")
            thread.start()
            thread.join()
    assert {row["step"] for row in calls()} == {0, 1}
    assert {row["level"] for row in calls() if row["scope"].startswith("Mlp")} <= {"module"}
    assert notes() == [
        "thread side runs modules; only its module calls are seen, not its api and aten calls",
        "an optimizer stepped on thread side; only those on the thread that began the capture end steps",
    ]
