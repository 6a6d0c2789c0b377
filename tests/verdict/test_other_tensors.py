"""Layers written by hand that read another tensor than they should, or another view of it; and gradients of which a term lacks, or
is too many. Each is one culprit at the user's line. A formula of one's own, with its own backward, is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup

HALVES: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: x.chunk(2, -1)  # noqa: E731
EVERY_OTHER: Callable[[Tensor], tuple[Tensor, ...]] = lambda x: (x[..., ::2], x[..., 1::2])  # noqa: E731


class OwnGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad * (0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5)


class Gated(nn.Module):
    """Turns halves of its input, normalises before or after a gated layer, and predicts a value beside the tokens."""

    def __init__(
        self, parts: Callable[[Tensor], tuple[Tensor, ...]] = HALVES, *, before: bool = True, swapped: bool = False,
        own: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.parts, self.before, self.swapped = parts, before, swapped
        self.gelu: Callable[[Tensor], Tensor] = OwnGelu.apply if own else F.gelu
        self.embed, self.norm = nn.Embedding(40, 16, padding_idx=0), nn.LayerNorm(16)
        self.gate, self.up, self.down, self.value = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        one, two = self.parts(x)
        x = torch.cat((one * 0.8 - two * 0.6, one * 0.6 + two * 0.8), -1)
        y = self.norm(x) if self.before else x
        gate, up = self.gate(y), self.up(y)
        gate, up = (up, gate) if self.swapped else (gate, up)
        y = x + self.down(self.gelu(gate) * up)
        y = y if self.before else self.norm(y)
        return y @ self.embed.weight.T, self.value(y).mean((1, 2))


def trained(
    into: Path, model: Callable[[], nn.Module] = Gated, *, clears: bool = True, detached: bool = True, flipped: bool = False
) -> Path:
    torch.manual_seed(0)
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with trueup.capture(into, level="api", detail="stats") as capture:
        for step in range(2):
            ids = torch.randint(1, 40, (4, 12), generator=torch.Generator().manual_seed(step))
            ids = ids * (torch.arange(12) < torch.tensor([[12], [7], [10], [5]]))
            logits, value = made(ids.flip(1) if flipped else ids)
            target = 0.9 * (value.detach() if detached else value).roll(1) + 1
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0) + F.mse_loss(value, target)
            loss.backward()
            nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            if clears:
                optimizer.zero_grad()
            capture.step()
    return into


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return trained(tmp_path_factory.mktemp("base") / "run")


@pytest.mark.parametrize(("train", "cause", "line"), [
    (
        lambda into: trained(into, lambda: Gated(EVERY_OTHER)),
        "the candidate runs torch.Tensor.__getitem__ where the baseline runs torch.Tensor.chunk", "EVERY_OTHER",
    ),
    (
        lambda into: trained(into, lambda: Gated(before=False)),
        "torch.nn.functional.linear (gate) reads the result of torch.nn.functional.layer_norm (norm) in the baseline, of torch.cat "
        "in the candidate", "gate, up = self.gate(y), self.up(y)",
    ),
    (
        lambda into: trained(into, lambda: Gated(swapped=True)),
        "verdict.test_other_tensors.OwnGelu.apply reads the result of torch.nn.functional.linear (gate) in the baseline, of "
        "torch.nn.functional.linear (up) in the candidate", "self.gelu(gate) * up",
    ),
    (
        lambda into: trained(into, clears=False),
        "in the candidate only, from step 1 on, the optimizer reads gradients that no recorded backward call made",
        "clip_grad_norm_",
    ),
    (
        lambda into: trained(into, detached=False),
        "the candidate runs torch.Tensor.add, torch.Tensor.mul, torch.Tensor.roll where the baseline runs torch.Tensor.detach",
        "value.detach()",
    ),
    (lambda into: trained(into, flipped=True), "only the candidate runs torch.Tensor.flip", "ids.flip(1)"),
])  # fmt: skip
def test_what_reads_another_tensor_is_one_culprit(
    train: Callable[[Path], Path], cause: str, line: str, base: Path, tmp_path: Path
) -> None:
    result = trueup.compare(base, train(tmp_path / "run"))
    assert [one.cause.startswith(cause) for one in result.culprits] == [True], result.sentence
    assert line in Path(__file__).read_text().splitlines()[int(result.culprits[0].source.split(":")[1].split()[0]) - 1]


def test_an_own_function_with_its_own_backward_is_no_difference(base: Path, tmp_path: Path) -> None:
    result = trueup.compare(base, trained(tmp_path / "run", lambda: Gated(own=False)))
    assert result.verdict == "aligned", result.sentence


def penalised(into: Path, times: float) -> Path:
    """Train a critic whose loss has a penalty on its gradient, as WGAN-GP has."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    with trueup.capture(into, model=critic, level="api", detail="stats") as capture:
        for step in range(2):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            (critic(x.detach()).mean() + times * (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
            capture.step()
    return into


def test_the_gradient_of_a_gradient_is_no_second_culprit(tmp_path: Path) -> None:
    result = trueup.compare(penalised(tmp_path / "one", 1.0), penalised(tmp_path / "ten", 10.0))
    assert [(one.op, one.phase) for one in result.culprits] == [("torch.Tensor.mul", "forward")], result.sentence


def attending(into: Path, optimizer: Callable[..., torch.optim.Optimizer], *, weights: bool = False) -> Path:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    stepper = optimizer(attention.parameters())
    with trueup.capture(into, model=attention, level="api", detail="stats") as capture:
        for step in range(2):
            x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(step))
            attention(x, x, x, need_weights=weights)[0].square().mean().backward()
            stepper.step()
            stepper.zero_grad()
            capture.step()
    return into


def test_keys_without_a_gradient_are_no_fault_of_the_optimizer(tmp_path: Path) -> None:
    """The bias of keys, packed with those of queries and values, has none but rounding; Adam makes a whole step of it."""
    runs = [attending(tmp_path / str(asked), lambda p: torch.optim.Adam(p, eps=1e-9), weights=asked) for asked in (False, True)]
    assert trueup.compare(*runs).verdict == "aligned"


def test_another_first_state_of_an_optimizer_is_open(tmp_path: Path) -> None:
    zeros = attending(tmp_path / "zeros", torch.optim.Adagrad)
    result = trueup.compare(zeros, attending(tmp_path / "tenths", lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1)))
    assert result.verdict == "inconclusive"
    assert "Adagrad initial_accumulator_value: 0 in the baseline, 0.1 in the candidate" in result.sentence
