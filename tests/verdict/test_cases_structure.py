"""Runs that compute the same with other calls: one more, renamed, recomputed, fused. They align, and a fault among them is found.

msprobe 26.2.0 makes 69 false errors of one extra call, and pairs the backward of a missing call with the backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from trueup import simdev
from verdict.cases import Change, broken, named, noisy, record, told, trained

KEPT = [("stats", "all"), ("tensor", "api")]


@dataclass(frozen=True)
class Kept:
    """What is kept of a tensor, and the levels."""

    detail: str
    level: str
    folder: Path
    runs: dict[str, tuple[dict[str, Any], Path]] = field(default_factory=dict)
    """What was recorded already, by how; that is held, for its `repr` names functions by their address."""

    @property
    def options(self) -> dict[str, Any]:
        return {"detail": self.detail, "level": "all" if self.level == "all" else ["module", "api"]}

    def run(self, how: dict[str, Any]) -> Path:
        """Record the small transformer with these options of `trained_small`, once."""
        if repr(how) not in self.runs:
            self.runs[repr(how)] = how, trained_small(self.folder / str(len(self.runs)), **self.options, **how)
        return self.runs[repr(how)][1]


@pytest.fixture(scope="module", params=KEPT, ids="-".join)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    torch.set_num_threads(1)
    return Kept(*request.param, tmp_path_factory.mktemp("runs"))


def by_turns(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test of which what is kept makes no row of its own: every other value is tried with each of `KEPT`."""
    rows = [(value, KEPT[k % len(KEPT)]) for k, value in enumerate(values)]
    ids = ["-".join((*kept, value if isinstance(value, str) else " - ".join(map(str, value)))) for value, kept in rows]
    return pytest.mark.parametrize((name, "kept"), rows, indirect=["kept"], ids=ids)


def is_aligned(result: trueup.Result) -> None:
    assert result.culprit is None, result.sentence
    assert result.verdict == "aligned", result.sentence


# ---------------------------------------------------------------- a small transformer whose structure can vary
class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(48, 144), nn.Linear(48, 48), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 12)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else F.softmax(q @ k.mT * 12**-0.5, -1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool, extra: str) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(48), Attention(fused), nn.LayerNorm(48)
        self.up, self.down, self.extra = nn.Linear(48, 96), nn.Linear(96, 48), extra

    def forward(self, x: Tensor) -> Tensor:
        if self.extra == "dead end":
            self.seen = F.softmax(x.detach(), -1).mean()
        x = x + self.attn(self.ln1(x))
        if self.extra == "in the chain":
            x = F.dropout(x, 0.0)
        if self.extra == "same operator":
            x = x + torch.zeros_like(x)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Small(nn.Module):
    """Three blocks. ``name`` is what the list of blocks is called; ``extra`` a call that only block 1 makes."""

    def __init__(self, name: str = "blocks", fused: bool = False, extra: str = "") -> None:
        super().__init__()
        self.embed, self.head, self.name = nn.Embedding(60, 48), nn.Linear(48, 60), name
        self.add_module(name, nn.ModuleList(Block(fused, extra if k == 1 else "") for k in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in getattr(self, self.name):
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def seeded(model: nn.Module) -> nn.Module:
    """Give a model the same weights whatever its modules are called."""
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=source) + (parameter.ndim == 1) * 0.5)
    return model


def trained_small(
    folder: Path, fault: tuple[str, Change, int] | None = None, *, micro: int = 1, optimizer: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] = lambda _: None, steps: int = 1, make: Callable[[], nn.Module] = Small, **options: Any
) -> Path:  # fmt: skip
    """Record the training of a model; ``micro`` batches make a step."""
    model = seeded(make())
    prepare(model)
    chosen = (optimizer or partial(torch.optim.AdamW, lr=1e-3, foreach=False))(model.parameters())
    source = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 60, (3, 12), generator=source) for _ in range(8)]

    def step() -> None:
        chosen.zero_grad()
        for k in range(micro):
            (model(batches[k]) / micro).backward()
        chosen.step()

    if fault is None:
        return record(folder, step, model, steps=steps, **options)
    with broken(*fault):
        return record(folder, step, model, steps=steps, **options)


def compared(kept: Kept, baseline: dict[str, Any], candidate: dict[str, Any]) -> trueup.Result:
    """Compare two runs with these options of `trained_small`."""
    return trueup.compare(kept.run(baseline), kept.run(candidate))


GELU_OFF = ("aten::gelu", noisy(1e-2), 2)
"""A fault in the forward of the third block."""


def blames_gelu(result: trueup.Result, scope: str = "blocks.2") -> None:
    first = named(result)
    assert first.scope == scope, first.sentence
    assert "gelu" in first.op, first.sentence


# ---------------------------------------------------------------- one extra call
@by_turns("side", ["baseline", "candidate"])
def test_one_extra_call_that_nobody_reads(side: str, kept: Kept) -> None:
    """It changes nothing that was recorded, but a branch that one run lacks is no other implementation; it shifts no later call."""
    more = partial(Small, extra="dead end")
    sides: dict[str, dict[str, Any]] = {"baseline": {}, "candidate": {}}
    sides[side]["make"] = more
    result = compared(kept, **sides)
    assert result.verdict == "inconclusive"
    assert {(call.side, call.scope) for call in result.unmatched} == {(side, "blocks.1")}
    assert any("in one run only compute what no recorded call reads" in note for note in result.notes)
    blames_gelu(compared(kept, {}, {"make": more, "fault": GELU_OFF}))


@by_turns("extra", ["in the chain", "same operator"])
def test_one_extra_call(extra: str, kept: Kept) -> None:
    """It changes nothing, so the runs are aligned; and it shifts no later call."""
    more = partial(Small, extra=extra)
    is_aligned(compared(kept, {}, {"make": more}))
    is_aligned(compared(kept, {"make": more}, {}))
    blames_gelu(compared(kept, {}, {"make": more, "fault": GELU_OFF}))


# ---------------------------------------------------------------- a renamed module
def test_a_renamed_module(kept: Kept) -> None:
    is_aligned(compared(kept, {}, {"make": partial(Small, "layers")}))


def test_a_renamed_module_is_matched(kept: Kept) -> None:
    """Each of its calls has a counterpart."""
    plain = compared(kept, {}, {})
    renamed = compared(kept, {}, {"make": partial(Small, "layers")})
    assert renamed.counts["compared"] == plain.counts["compared"]


def test_a_fault_in_a_renamed_module(kept: Kept) -> None:
    blames_gelu(compared(kept, {}, {"make": partial(Small, "layers"), "fault": GELU_OFF}), "layers.2")


# ---------------------------------------------------------------- recomputation on one side
def recomputing(model: Any) -> None:
    """Checkpoint each block."""
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)


@by_turns("side", ["candidate", "baseline"])
def test_recompute_on_one_side_only(side: str, kept: Kept) -> None:
    sides: dict[str, dict[str, Any]] = {"baseline": {}, "candidate": {}}
    sides[side]["prepare"] = recomputing
    is_aligned(compared(kept, **sides))
    sides["candidate"]["fault"] = GELU_OFF
    blames_gelu(compared(kept, **sides))


def test_recompute_in_transformers(kept: Kept, tmp_path: Path) -> None:
    """GPT-2's own switch, with dropout whose masks the recomputation draws again."""

    def checkpointing(training: Any) -> None:
        training.model.gradient_checkpointing_enable({"use_reentrant": False})

    sides = [trained(tmp_path / str(k), "gpt2", alter, **kept.options) for k, alter in enumerate((None, checkpointing))]
    is_aligned(trueup.compare(*sides))


# ---------------------------------------------------------------- an extra micro-batch
@by_turns("counts", [(2, 3), (3, 2)])
def test_an_extra_micro_batch(counts: tuple[int, int], kept: Kept) -> None:
    """The gradients of a step differ because more was summed: that is no operator's fault, and never aligned."""
    result = compared(kept, *({"micro": n} for n in counts))
    assert result.verdict != "aligned"
    found = result.culprit
    assert found is None or found.kind != "operator", result.sentence


def test_a_fault_in_the_micro_batch_before_an_extra_one(kept: Kept) -> None:
    blames_gelu(compared(kept, {"micro": 2}, {"micro": 3, "fault": GELU_OFF}))


# ---------------------------------------------------------------- fused against parts
def test_fused_attention_against_its_parts(kept: Kept) -> None:
    fused, parts = {"make": partial(Small, fused=True)}, dict[str, Any]()
    is_aligned(compared(kept, parts, fused))
    is_aligned(compared(kept, fused, parts))
    blames_gelu(compared(kept, parts, fused | {"fault": GELU_OFF}))


def test_a_fault_inside_what_the_other_side_fuses(kept: Kept) -> None:
    fault = ("aten::_softmax", noisy(3e-2), 2)  # the baseline's attention runs no such kernel
    fused, parts = {"make": partial(Small, fused=True)}, dict[str, Any]()
    first = named(compared(kept, fused, parts | {"fault": fault}))
    assert first.scope == "blocks.2.attn", first.sentence
    assert first.kind == "region" or "softmax" in first.op or first.op == "Attention", first.sentence


def test_attention_of_transformers_in_both_forms(kept: Kept, tmp_path: Path) -> None:
    def fault(training: Any) -> Any:
        quiet(training)
        return broken("aten::native_layer_norm", lambda right, *_: (right[0] * 1.01, *right[1:]), 1)

    def quiet(training: Any) -> None:
        for module in training.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    eager = trained(tmp_path / "eager", "gpt2-eager", quiet, **kept.options)
    is_aligned(trueup.compare(eager, trained(tmp_path / "right", "gpt2", quiet, **kept.options)))
    result = trueup.compare(eager, trained(tmp_path / "wrong", "gpt2", fault, **kept.options))
    assert named(result).scope == "transformer.h.0.ln_2", result.sentence


class Looking(nn.Module):
    """PyTorch's own attention, which takes its parts where it is asked for the weights, and a fused kernel where it is not."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(48, 4, batch_first=True), nn.Linear(48, 60)
        self.embed, self.weights = nn.Embedding(60, 48), weights

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        seen, _ = self.attention(x, x, x, need_weights=self.weights)
        return F.cross_entropy(self.head(x + seen).flatten(0, 1), tokens.flatten())


@by_turns("asks", ["baseline", "candidate"])
def test_multihead_attention_with_and_without_weights(asks: str, kept: Kept) -> None:
    """Its argument differs, and its result by a rounding: that is worth a note, and no reason for anything."""
    sides: dict[str, dict[str, Any]] = {s: {"make": partial(Looking, s == asks)} for s in ("baseline", "candidate")}
    result = compared(kept, **sides)
    is_aligned(result)
    first, second = ("true", "false") if asks == "baseline" else ("false", "true")
    said = f"argument need_weights differs: {first} in the baseline, {second} in the candidate; its outputs agree within rounding"
    assert said in told(result)


def test_the_fast_path_of_an_encoder_layer(kept: Kept, tmp_path: Path) -> None:
    """In evaluation PyTorch fuses a whole layer; in training, with no dropout, it computes the same from parts."""
    sides = []
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(4))
    for fast in (True, False):
        model = seeded(nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True))
        model.train(not fast)

        def step(model: nn.Module = model) -> None:
            with torch.no_grad():
                model(x)

        sides.append(record(tmp_path / str(fast), step, model, **kept.options))
    is_aligned(trueup.compare(*sides))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "one by one": partial(torch.optim.AdamW, lr=1e-3, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}


@by_turns("forms", [("one by one", "fused"), ("foreach", "fused"), ("fused", "foreach")])
def test_a_fused_optimizer_against_its_parts(forms: tuple[str, str], kept: Kept) -> None:
    is_aligned(compared(kept, *({"optimizer": OPTIMIZERS[form], "steps": 2} for form in forms)))


@by_turns("forms", [("one by one", "fused"), ("foreach", "fused"), ("fused", "one by one")])
def test_a_fault_of_a_fused_optimizer(forms: tuple[str, str], kept: Kept) -> None:
    """Another epsilon: the first thing that differs is what the optimizer made of the weights, which nobody has read yet."""
    other = partial(OPTIMIZERS[forms[1]], eps=1e-3)
    first = named(compared(kept, {"optimizer": OPTIMIZERS[forms[0]]}, {"optimizer": other}))
    assert (first.phase, first.step, first.kind, first.op) == ("optimizer", 0, "operator", "optimizer.step")
    assert ("_fused_adamw_" in first.aten[0]) == (forms[1] == "fused")
    assert "what the optimizer made of" in first.sentence
    assert first.error_in < 1e-6 < first.error_out


@by_turns("forms", [("one by one", "fused"), ("fused", "foreach")])
def test_errors_of_gradients_explain_what_another_optimizer_makes_of_weights(
    forms: tuple[str, str], kept: Kept
) -> None:
    """The fault is in the forward: what every optimizer makes of other gradients is no fault of its own."""
    first, second = (OPTIMIZERS[form] for form in forms)
    blames_gelu(compared(kept, {"optimizer": first}, {"optimizer": second, "fault": GELU_OFF}))


class Encoder(nn.Module):
    """Two layers of PyTorch's own, whose bias of query, key and value begins at zero, as other biases do."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Record the training of an encoder with these arguments of `train_encoder`, once."""
    return cache(lambda *how: train_encoder(tmp_path_factory.mktemp("encoder"), *how))


def train_encoder(into: Path, form: str, device: str, noise: Sequence[str] = (), fault: str = "") -> Path:
    simdev.install()
    with ExitStack() as stack:
        for name in noise:
            stack.enter_context(simdev.noise(name))
        if fault:
            stack.enter_context(simdev.inject(fault))
        torch.manual_seed(0)
        model = Encoder().to(device)
        optimizer = OPTIMIZERS[form](model.parameters())
        batches = [(torch.randn(4, 12, 48).to(device), torch.randint(0, 5, (48,)).to(device)) for _ in range(3)]
        with trueup.capture(into, model=model):
            for x, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, 1), labels).backward()
                optimizer.step()
    return into


NOISE = ("reordered-reductions", "fused-multiply-add")


@pytest.mark.parametrize(("forms", "noise"), [
    (("one by one", "fused"), ()), (("one by one", "foreach"), NOISE), (("foreach", "fused"), NOISE),
], ids=lambda names: " - ".join(names) or "exact")  # fmt: skip
def test_another_optimizer_of_a_bias_whose_gradient_is_part_rounding(
    forms: tuple[str, str], noise: Sequence[str], encoder: Callable[..., Path]
) -> None:
    """A third of a packed bias has a gradient of nothing but rounding, and Adam makes full steps of it, in every step anew."""
    sides = encoder(forms[0], "cpu"), encoder(forms[1], "npu", noise)
    for level in (None, ("module", "api")):
        is_aligned(trueup.compare(*sides, level=level))


@pytest.mark.parametrize("forms", [("one by one", "foreach"), ("fused", "one by one")], ids=" - ".join)
def test_a_fault_of_another_optimizer_of_such_a_bias(forms: tuple[str, str], encoder: Callable[..., Path]) -> None:
    first = named(trueup.compare(encoder(forms[0], "cpu"), encoder(forms[1], "npu", (), "adam-second-moment-value")))
    assert (first.phase, first.step, first.kind) == ("optimizer", 0, "operator")


def test_what_stays_unmatched_is_told(kept: Kept) -> None:
    """An extra call that feeds the result is counted and shown, on the side that has it."""
    result = compared(kept, {}, {"make": partial(Small, extra="in the chain")})
    assert "in only one run" in told(result), told(result)
