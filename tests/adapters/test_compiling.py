"""torch.compile under a capture: off is the run without it, through is the compiled run, and neither is a surprise."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import trueup
from adapters.conftest import Rows
from trueup.recording.adapters.torch import compiling

WIDTH, WORDS = 8, 11
Losses = list[Tensor]


class Net(nn.Module):
    """Enough for a library call, two fused kernels and a submodule, and little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.head = nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.inlet(x))))


class Broken(Net):
    """Dynamo gives up in the middle and resumes."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.inlet(x))
        torch._dynamo.graph_break()
        return self.head(self.norm(x))


class Checkpointed(Net):
    """With dropout inside: the graph has a higher-order operator that keeps the random state."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.part, x, use_reentrant=False))

    def part(self, x: Tensor) -> Tensor:
        return self.norm(F.dropout(F.gelu(self.inlet(x)), 0.3))


def gpt2() -> nn.Module:
    """Dropout included: random numbers count too."""
    from transformers import GPT2Config, GPT2LMHeadModel  # not yet when the tests are collected: it takes 3 s, in each worker

    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=2))
    model.loss_type = "ForCausalLM"  # else it logs that it takes this one, where Dynamo gives up
    return model


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        yield
    torch._dynamo.reset()


class Run:
    """A seeded training of a model that is compiled before it starts."""

    def __init__(self, make: Callable[[], nn.Module], *, compile_step: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.compiled = torch.compile(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.update = torch.compile(self.optimizer.step, **options) if compile_step else self.optimizer.step
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (8, 3, 6), generator=generator)
        self.numbers = torch.randn(8, 3, WIDTH, generator=generator)
        torch.manual_seed(2)

    def step(self, k: int) -> Tensor:
        if hasattr(self.model, "lm_head"):
            loss = self.compiled(input_ids=self.words[k], labels=self.words[k]).loss
        else:
            loss = self.compiled(self.numbers[k]).square().mean()
        loss.backward()
        self.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, *which: int) -> Losses:
        return [self.step(k) for k in which]

    def state(self) -> Losses:
        return [*self.model.state_dict().values(), torch.get_rng_state()]


def same(left: Losses, right: Losses) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def operators(rows: Rows, **where: Any) -> set[str]:
    return {row["op"] for row in rows if all(row[key] == value for key, value in where.items())}


NEEDS_COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler")

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "eager": (gpt2, {"backend": "eager"}),
    "aot_eager": (gpt2, {"backend": "aot_eager"}),
    "whole-graph": (Net, {"backend": "aot_eager", "fullgraph": True}),
    "graph-break": (Broken, {"backend": "aot_eager"}),
    "optimizer": (Net, {"backend": "aot_eager", "compile_step": True}),
    "checkpoint": (Checkpointed, {"backend": "aot_eager"}),
    "inductor": (Net, {"backend": "inductor"}),
}


@pytest.fixture
def scalar(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Inductor write kernels without vectors, of which three are compiled here: it compiles six programs to find out which
    vectors there are, and before them headers that pay from the sixth on."""
    from torch._inductor import config, cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    with config.patch(cpp_cache_precompile_headers=False):
        yield


WARM = ["eager", "whole-graph", "optimizer"]
COLD = ["aot_eager", "graph-break", "checkpoint"]


@pytest.mark.parametrize(
    ("case", "warm"),
    [*((name, True) for name in WARM), *((name, False) for name in COLD), pytest.param("inductor", False, marks=NEEDS_COMPILER)],
)
def test_through_changes_nothing(
    case: str, warm: bool, path: Path, rows: Callable[..., Rows], request: pytest.FixtureRequest
) -> None:
    make, options = CASES[case]
    if case == "inductor":
        request.getfixturevalue("scalar")
    plain = Run(make, **options)
    expected = plain.steps(0, 1, 2, 3), plain.state()
    compiled = graphs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    run = Run(make, **options)
    losses = run.steps(0) if warm else []
    with trueup.capture(path, compile="through", on_error="stop"):
        losses += run.steps(1, 2) if warm else run.steps(0, 1, 2)
    losses += run.steps(3)
    assert same(losses, expected[0])
    assert same(run.state(), expected[1])
    assert (graphs(), compiled > 0) == (compiled, True)
    found = rows(step=1)
    assert not operators(found, level="module") - {type(run.model).__name__}
    assert {row["phase"] for row in found} == {"forward", "backward", "optimizer"}
    assert trueup.open_capture(path).steps == ([0, 1] if warm else [0, 1, 2])


@pytest.mark.parametrize("level", ["module", "api", "aten"])
def test_through_changes_nothing_at_a_level(level: str, path: Path) -> None:
    plain = Run(Net, backend="aot_eager")
    expected = plain.steps(0, 1, 2), plain.state()
    torch._dynamo.reset()
    run = Run(Net, backend="aot_eager")
    with trueup.capture(path, compile="through", level=level, steps=[1], on_error="stop"):
        losses = run.steps(0, 1, 2)  # compiled in an idle step
    assert same(losses, expected[0])
    assert same(run.state(), expected[1])
    assert trueup.open_capture(path).rows > 0


@NEEDS_COMPILER
@pytest.mark.usefixtures("scalar")
def test_inside_of_what_inductor_made_is_seen(path: Path, rows: Callable[..., Rows]) -> None:
    run = Run(Net, backend="inductor")
    with trueup.capture(path, compile="through", on_error="stop"):
        run.steps(0)
    with trueup.capture(path.with_name("again"), compile="through", on_error="stop"):
        Run(Net, backend="inductor").steps(0)
    found = rows(step=0)
    for phase, library in (("forward", "aten::addmm"), ("backward", "aten::mm")):
        assert {"inductor::graph", library} <= operators(found, phase=phase, level="aten")
        kernels = [row for row in found if row["phase"] == phase and row["op"].startswith("inductor::cpp_fused")]
        assert {row["slot"].partition(".")[0] for row in kernels} == {"input", "output"}
        assert all(row["l2"] is not None for row in kernels if row["slot"].startswith("output"))
    # What was allocated and not written yet is noise: two runs agree in everything else.
    assert trueup.compare(path, path.with_name("again")).verdict == "aligned"
    (forward,) = {row["seq"] for row in found if row["op"] == "Net" and row["phase"] == "forward"}
    slots = {row["slot"] for row in found if row["seq"] == forward}
    assert {"input.0", "param.inlet.weight", "param.head.bias", "output.0"} <= slots
    assert {row["slot"] for row in found if row["op"] == "Net" and row["phase"] == "backward"} == {"grad_output.0"}


def test_compiled_function_is_a_call(path: Path, rows: Callable[..., Rows]) -> None:
    @torch.compile(backend="aot_eager")
    def distance(left: Tensor, right: Tensor, *, power: int) -> Tensor:
        return (left - right).abs().pow(power).mean()

    weight = torch.randn(3, 4, requires_grad=True)
    with trueup.capture(path, compile="through", on_error="stop"):
        distance(weight.tanh(), torch.ones(3, 4), power=3).backward()
    name = f"torch.compile:{test_compiled_function_is_a_call.__name__}.<locals>.distance"
    found = [row for row in rows(level="api") if row["op"] == name]
    slots = [(row["phase"], row["slot"]) for row in found]
    assert slots == [
        ("forward", "input.0"), ("forward", "input.1"), ("forward", "arguments"), ("forward", "output.0"),
        ("backward", "grad_output.0"), ("backward", "grad_input.0"),
    ]  # fmt: skip
    backward = {row["op"] for row in rows(level="aten", phase="backward") if row["scope"] == ""}
    assert "aten::sign" in backward or "aten::sgn" in backward


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_off_is_the_eager_run(warm: bool, path: Path, rows: Callable[..., Rows], notes: Callable[[], list[str]]) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        expected = Run(gpt2, backend="aot_eager", fullgraph=True).steps(0, 1)
    finally:
        torch.compiler.set_stance("default")
    run = Run(gpt2, backend="aot_eager", fullgraph=True)
    if warm:
        run.model(input_ids=run.words[0])
        run.compiled(input_ids=run.words[0])
        torch.manual_seed(2)
    compiled = graphs()
    with trueup.capture(path, on_error="stop"):
        losses = run.steps(0, 1)
    assert same(losses, expected)
    assert notes() == [compiling.OFF]
    assert {"transformer.h.0.attn", ""} <= {row["scope"] for row in rows(step=1, level="module")}
    assert operators(rows(step=1), scope="", level="module") == {"GPT2LMHeadModel"}
    assert graphs() == compiled
    run.steps(2)
    assert graphs() > 0  # afterwards it compiles again


def test_eager_and_compiled_modules_are_compared(path: Path) -> None:
    with trueup.capture(path, compile="through", level="module", on_error="stop"):
        Run(Net, backend="aot_eager").steps(0)
    with trueup.capture(path.with_name("eager"), level="module", on_error="stop"):
        Run(Net, backend="aot_eager").steps(0)
    pair = trueup.compare(path.with_name("eager"), path)
    assert not pair.culprits


def test_higher_order_operator_outside_compiled_code_is_a_call(path: Path, rows: Callable[..., Rows]) -> None:
    query = torch.randn(1, 2, 16, 16)
    expected = flex_attention(query, query, query)
    with trueup.capture(path, on_error="stop"):
        found = flex_attention(query, query, query)
    assert torch.equal(found, expected)
    slots = {row["slot"] for row in rows(level="aten") if row["op"] == "higher_order::flex_attention"}
    assert {"input.0", "input.1", "input.2", "output.0"} <= slots


def test_the_choice_is_checked() -> None:
    with pytest.raises(trueup.TrueupError, match="compile 'on' is unknown: expected off or through"):
        trueup.capture("anywhere", compile="on")


def test_exception_in_compiled_code_leaves_the_next_call_clean(path: Path, rows: Callable[..., Rows]) -> None:
    @torch.compile(backend="eager")
    def risky(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ValueError("two")
        return x * 2

    with trueup.capture(path, compile="through", on_error="stop"):
        for size in (2, 3):
            try:
                risky(torch.ones(size))
            except ValueError:
                torch.ones(size).exp()
        torch.ones(5).log()
    found = rows(level="api")
    assert [row["op"] for row in found if row["slot"] == "output.0" and "ones" not in row["op"]] == [
        "torch.Tensor.exp", "torch.compile:" + risky.__qualname__, "torch.Tensor.log",
    ]  # fmt: skip
