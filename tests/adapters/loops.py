"""Training loops that are not one model and one optimizer: `build("gan", "npu").iterate()`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 12


class Mlp(nn.Module):
    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(inputs, 16), nn.LayerNorm(16), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.norm(self.up(x))))


@dataclass
class Loop:
    """``iterate`` runs one iteration and returns its losses; ``models`` are what the capture is told of."""

    models: list[nn.Module]
    iterate: Callable[[], Tensor]
    optimizers: list[Any] = field(default_factory=list)

    def state(self) -> list[Tensor]:
        """Return every tensor that the training owns: parameters, buffers, gradients, optimizer state."""
        owned = [t for model in self.models for t in model.state_dict().values() if torch.is_tensor(t)]
        gradients = [p.grad for model in self.models for p in model.parameters() if p.grad is not None]
        states = [v for o in self.optimizers for s in getattr(o, "state", {}).values() for v in s.values() if torch.is_tensor(v)]
        return owned + gradients + states


class Rotation(torch.optim.Optimizer):
    """An optimizer of a user's own: loops over parameters in Python, keeps a momentum."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.add_(momentum.sign(), alpha=-group["lr"])


def simple(make: Callable[[Iterable[Tensor]], Any]) -> Callable[[str], Loop]:
    """One model and the optimizer that ``make`` makes."""

    def build(device: str) -> Loop:
        model = Mlp().to(device)
        optimizer = make(model.parameters())

        def iterate() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return Loop([model], iterate, [optimizer])

    return build


def gan(device: str) -> Loop:
    generator, critic = Mlp(4), Mlp(WIDTH, 1)
    generator.to(device), critic.to(device)
    first = torch.optim.Adam(critic.parameters(), lr=1e-3)
    second = torch.optim.Adam(generator.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    def iterate() -> Tensor:
        real, noise = torch.randn(4, WIDTH).to(device), torch.randn(4, 4).to(device)
        fake = generator(noise)
        critic.zero_grad()
        one = bce(critic(real), torch.ones(4, 1, device=device)) + bce(critic(fake.detach()), torch.zeros(4, 1, device=device))
        one.backward()
        first.step()
        generator.zero_grad()
        two = bce(critic(fake), torch.ones(4, 1, device=device))
        two.backward()
        second.step()
        return torch.stack([one, two])

    return Loop([generator, critic], iterate, [first, second])


def actor_critic(device: str) -> Loop:
    """The critic at each iteration, the actor at every second (TD3)."""
    actor, critic = Mlp().to(device), Mlp(2 * WIDTH, 1).to(device)
    slow = torch.optim.Adam(actor.parameters(), lr=1e-3)
    fast = torch.optim.Adam(critic.parameters(), lr=1e-3)
    count = 0

    def iterate() -> Tensor:
        nonlocal count
        seen = torch.randn(4, WIDTH).to(device)
        with torch.no_grad():
            done = actor(seen)
        one = critic(torch.cat((seen, done), 1)).square().mean()
        fast.zero_grad()
        one.backward()
        fast.step()
        if count % 2 == 0:
            two = -critic(torch.cat((seen, actor(seen)), 1)).mean()
            slow.zero_grad()
            two.backward()
            slow.step()
            one = torch.stack([one, two]).sum()
        count += 1
        return one

    return Loop([actor, critic], iterate, [slow, fast])


def dense_and_sparse(device: str) -> Loop:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(30, WIDTH, sparse=True), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x).mean(1))

    model = Words().to(device)
    optimizers = [torch.optim.Adam(model.head.parameters(), lr=1e-3), torch.optim.SparseAdam(model.embed.parameters(), lr=1e-3)]

    def iterate() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(torch.randint(0, 30, (4, 5)).to(device)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Loop([model], iterate, optimizers)


def in_the_backward(device: str) -> Loop:
    """An optimizer for each parameter, which steps as soon as the gradient is there."""
    model = Mlp().to(device)
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def iterate() -> Tensor:
        loss = model(torch.randn(4, WIDTH).to(device)).square().mean()
        loss.backward()
        return loss

    return Loop([model], iterate, list(optimizers.values()))


def lbfgs(device: str) -> Loop:
    model = Mlp().to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def iterate() -> Tensor:
        x = torch.randn(4, WIDTH).to(device)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Loop([model], iterate)


def by_hand(device: str) -> Loop:
    """No optimizer at all."""
    model = Mlp().to(device)

    def iterate() -> Tensor:
        loss = model(torch.randn(4, WIDTH).to(device)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        return loss

    return Loop([model], iterate)


def trimmings(device: str) -> Loop:
    """Accumulation, clipping, a schedule, an average of the weights, and an evaluation after each step."""
    model = Mlp().to(device)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def iterate() -> Tensor:
        losses = []
        for _ in range(2):
            losses.append(model(torch.randn(4, WIDTH).to(device)).square().mean() / 2)
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        mean.update_parameters(model)
        optimizer.zero_grad()
        return torch.stack(losses)

    return Loop([model, mean], iterate, [optimizer])


def scaled(dtype: torch.dtype, make: Callable[[Iterable[Tensor]], Any]) -> Callable[[str], Loop]:
    """Autocast with a GradScaler; the third iteration overflows and is skipped."""

    def build(device: str) -> Loop:
        model = Mlp().to(device)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        count = 0

        def iterate() -> Tensor:
            nonlocal count
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                out = model(torch.randn(4, WIDTH).to(device))
            loss = out.float().square().mean() * (float("inf") if count == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            count += 1
            return loss

        return Loop([model], iterate, [optimizer])

    return build


class Wrapped(torch.optim.Optimizer):
    """Holds another optimizer, like Accelerate's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


LOOPS: dict[str, Callable[[str], Loop]] = {
    "plain": simple(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False)),
    "foreach": simple(lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True)),
    "fused": simple(lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)),
    "fused sgd": simple(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True)),
    "own": simple(lambda p: Rotation(p, lr=1e-3)),
    "wrapped": simple(lambda p: Wrapped(torch.optim.SGD(p, lr=1e-2))),
    "gan": gan,
    "actor-critic": actor_critic,
    "dense and sparse": dense_and_sparse,
    "in the backward": in_the_backward,
    "lbfgs": lbfgs,
    "by hand": by_hand,
    "trimmings": trimmings,
    "scaled fp16": scaled(torch.float16, lambda p: torch.optim.SGD(p, lr=1e-2)),
    "scaled bf16": scaled(torch.bfloat16, lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "scaled fused": scaled(torch.float16, lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)),
}

ON_THE_CPU_ONLY = ("fused", "fused sgd", "scaled fused", "dense and sparse")
"""The simulated device has no fused optimizers and no sparse tensors."""


def build(name: str, device: str) -> Loop:
    """Seed everything and build a loop."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return LOOPS[name](device)


