"""Strangers that learn in a way of their own: a critic with a penalty, learning to learn, made weights, a clipped policy."""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn, grey
from strange.stranger import AGAIN, ANEW, Steps, stranger
from strange.structures import Player, balanced
from zoo import images


class Bent(nn.Module):
    """A convolution with a stride of two and a leaky bend."""

    def __init__(self, inward: int, outward: int, form: str) -> None:
        super().__init__()
        self.conv, self.form = nn.Conv2d(inward, outward, 3, 2, 1), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == ANEW:
            rows = F.unfold(x, 3, padding=1, stride=2)
            side = math.isqrt(rows.shape[2])
            x = self.conv.weight.flatten(1) @ rows
            x = (x + self.conv.bias[:, None].to(x.dtype)).unflatten(2, (side, side))
            return torch.maximum(x, 0.2 * x)
        return F.leaky_relu(self.conv(x), 0.1 if self.form == "slope-halved" else 0.2)


class Critic(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.out = nn.Sequential(Bent(1, 8, form), Bent(8, 16, form)), nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x).flatten(1))[:, 0].float()


@stranger(
    "penalty", "A forger and a critic whose slope is kept near 1, as in WGAN-GP",
    {
        "slope-halved": Place("leaky_relu", scope=r"critic\.layers\.0"),
        "slope-of-the-batch": Place("norm|sum|square|pow|flatten|view|reshape", scope=""),
        "one-mixture-for-all": Place("rand|mul|lerp|add|sub", scope=""),
        "penalty-without-its-own-slope": Place(phase="backward|forward", scope=".*"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def penalty(form: str, device: str) -> Steps:
    forger = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.Tanh(), nn.Unflatten(1, (1, 16, 16)))
    model = nn.ModuleDict({"forger": forger, "critic": Critic(form)}).to(device)
    slow, fast = (torch.optim.Adam(model[name].parameters(), 1e-3, (0.5, 0.9), foreach=False) for name in ("forger", "critic"))
    source, chance = cycle([batch.to(device) for batch in grey(16)]), torch.Generator().manual_seed(12)

    def bent(true: Tensor, forged: Tensor) -> Tensor:
        share = torch.rand(8, 1, 1, 1, generator=chance).to(device)
        share = share[:1] if form == "one-mixture-for-all" else share
        mixed = torch.lerp(forged, true, share) if form == AGAIN else share * true + (1 - share) * forged
        mixed.requires_grad_()
        slope = torch.autograd.grad(model["critic"](mixed).sum(), mixed, create_graph=form != "penalty-without-its-own-slope")[0]
        if form == "slope-of-the-batch":
            return (slope.norm() - 1).square()
        if form == ANEW:
            long = slope.square().sum((1, 2, 3)).sqrt()
            return (long.square() - 2 * long + 1).mean()
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    def step() -> Tensor:
        true, luck = next(source), torch.randn(8, 8, generator=chance).to(device)
        fast.zero_grad()
        forged = model["forger"](luck).detach().float()
        if form == AGAIN:
            judged = model["critic"](torch.cat((forged, true)))
            loss = (judged * torch.tensor([1.0] * 8 + [-1.0] * 8, device=device)).sum() / 8 + 10 * bent(true, forged)
        else:
            loss = model["critic"](forged).mean() - model["critic"](true).mean() + 10 * bent(true, forged)
        loss.backward()
        fast.step()
        slow.zero_grad()
        fooled = -model["critic"](model["forger"](luck).float()).mean()
        fooled.backward()
        slow.step()
        return loss.detach()

    return Steps(model, step)


class Guess(nn.Module):
    """Three layers; the weights of several tasks at a time lie before those of one."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.ModuleList((nn.Linear(1, 24), nn.Linear(24, 24), nn.Linear(24, 1))), form

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if self.form == ANEW:
                x = x @ layer.weight.mT
                x = x + layer.bias[..., None, :].to(x.dtype)
            elif self.form == AGAIN:
                x = F.linear(x, layer.weight, layer.bias)
            else:
                x = layer(x)
            x = x if k == 2 else torch.tanh(x)
        return x.float()


@stranger(
    "learning-to-learn", "Sines learned from ten points by two steps that are learned through, as in MAML",
    {
        "slopes-detached": Place(phase="backward|forward", scope=".*"),
        "inner-rate-halved": Place("mul|sub|add", scope=""),
        "second-step-from-the-start": Place("sub|add|mul", scope=""),
        "summed-over-tasks": Place("div|mean|mul|sum", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def learning_to_learn(form: str, device: str) -> Steps:
    model = Guess(form).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    chance, rate = torch.Generator().manual_seed(13), 0.05 if form == "inner-rate-halved" else 0.1

    def guessed(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    def learned(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        start = dict(model.named_parameters())
        weights = {name: p.expand(len(x), *p.shape) for name, p in start.items()} if form == ANEW else start
        for _ in range(2):
            far = guessed(weights, x)
            far = (far - y).square().mean((1, 2)).sum() if form == ANEW else F.mse_loss(far, y)
            slopes = torch.autograd.grad(far, list(weights.values()), create_graph=form != "slopes-detached")
            base = start if form == "second-step-from-the-start" else weights
            if form == AGAIN:
                weights = {name: torch.add(p, slope, alpha=-rate) for (name, p), slope in zip(base.items(), slopes, strict=True)}
            else:
                weights = {name: p - rate * slope for (name, p), slope in zip(base.items(), slopes, strict=True)}
        return weights

    def step() -> Tensor:
        loud, early = 1 + torch.rand(4, 1, 1, generator=chance), 3 * torch.rand(4, 1, 1, generator=chance)
        x = 4 * torch.rand(4, 20, 1, generator=chance) - 2
        y = (loud * torch.sin(x + early)).to(device)
        x = x.to(device)
        optimizer.zero_grad()
        if form == ANEW:
            loss = F.mse_loss(guessed(learned(x[:, :10], y[:, :10]), x[:, 10:]), y[:, 10:])
        else:
            costs = [F.mse_loss(guessed(learned(x[k, :10], y[k, :10]), x[k, 10:]), y[k, 10:]) for k in range(4)]
            loss = torch.stack(costs).sum() if form == "summed-over-tasks" else torch.stack(costs).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Made(nn.Module):
    """Convolutions whose weights a small network makes from a code for each (Ha et al. 2016)."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.codes, self.form = nn.Parameter(drawn(2, 6, seed=95)), form
        self.think, self.make = nn.Linear(6, 16), nn.Linear(16, 8 * 8 * 9)
        self.first, self.gain, self.shift = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.out = nn.Linear(8, 8)

    def weight(self, code: Tensor) -> Tensor:
        made = self.make(torch.tanh(self.think(code))).float()
        return made.view(8, 8, 3, 3) / (72 if self.form == "levelled-by-inputs" else math.sqrt(72)) * 2

    def levelled(self, x: Tensor) -> Tensor:
        if self.form == AGAIN:
            return F.group_norm(x, 8, self.gain, self.shift)
        if self.form in (ANEW, "variance-unbiased"):
            spread = x.var((2, 3), keepdim=True, unbiased=self.form == "variance-unbiased")
            x = (x - x.mean((2, 3), keepdim=True)) * torch.rsqrt(spread + 1e-5)
            return x * self.gain[:, None, None] + self.shift[:, None, None]
        return F.instance_norm(x, weight=self.gain, bias=self.shift)

    def forward(self, x: Tensor) -> Tensor:
        x = self.levelled(self.first(x).float())
        for k in range(2):
            weight = self.weight(self.codes[0 if self.form == "first-code-twice" else k])
            if self.form == ANEW:
                rows = F.unfold(F.elu(x), 3, padding=1)
                moved = torch.einsum("ok,bkn->bon", weight.flatten(1), rows).view_as(x).float()
            else:
                moved = F.conv2d(F.elu(x), weight, padding=1).float()
            x = self.levelled(x + moved)
        x = F.softplus(x) if self.form == "bent-softly" else F.elu(x)
        return self.out(x.mean((2, 3)) if self.form != AGAIN else F.adaptive_avg_pool2d(x, 1).flatten(1))


@stranger(
    "made-weights", "Textures told apart by convolutions whose weights another network makes",
    {
        "levelled-by-inputs": Place("div", scope=""),
        "variance-unbiased": Place("var|instance_norm|batch_norm|rsqrt|add|mul", scope=""),
        "first-code-twice": Place("getitem|select|think", scope="(think)?"),
        "bent-softly": Place("softplus|elu", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def made_weights(form: str, device: str) -> Steps:
    model = Made(form).to(device)
    source = cycle([(batch.to(device), label.to(device)) for batch, label in images.textures(2, 12)])

    def cost() -> Tensor:
        pictures, labels = next(source)
        scores = model(pictures).float()
        return F.cross_entropy(scores, labels) if form != AGAIN else F.nll_loss(scores.log_softmax(-1), labels)

    return minimised(model, cost)


@stranger(
    "clipped-policy", "A pole balanced by a policy that may change little at a time, as in PPO",
    {
        "larger-of-both": Place("min|max", scope="", step=1),  # at first the policy is the old one
        "advantage-fades-wrongly": Place("mul|add|matmul|mv", scope=""),
        "entropy-punished": Place("sub|add|mul|neg", scope=""),
        "deviation-left-out": Place("div|std|sub|add|getitem|index", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def clipped_policy(form: str, device: str) -> Steps:
    model = Player().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    chance, games, moves, discount, fades = torch.Generator().manual_seed(15), 8, 8, 0.95, 0.9

    def advantages(rewards: Tensor, values: Tensor) -> Tensor:
        """Return the generalised advantages (Schulman et al. 2016); rewards [moves, games], values one more."""
        surprise = rewards + discount * values[1:] - values[:-1]
        if form == AGAIN:
            apart = torch.arange(moves, device=device)[None] - torch.arange(moves, device=device)[:, None]
            return torch.triu((discount * fades) ** apart.clamp(min=0)) @ surprise
        found, total = [], torch.zeros(games, device=device)
        for each in reversed(surprise.unbind(0)):
            total = each + (fades if form == "advantage-fades-wrongly" else discount * fades) * total
            found.append(total)
        return torch.stack(found[::-1])

    def played() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        state, seen, chosen, rewards = (0.1 * torch.randn(games, 4, generator=chance)).to(device), [], [], []
        for _ in range(moves):
            right = torch.rand(games, generator=chance).to(device) < model(state)[0].softmax(-1)[:, 1]
            seen.append(state)
            chosen.append(right.long())
            state = balanced(state, right)
            rewards.append(torch.cos(state[:, 2]))
        seen.append(state)
        scores, values = model(torch.stack(seen))
        gained = advantages(torch.stack(rewards), values)
        old = scores[:-1].log_softmax(-1).gather(2, torch.stack(chosen)[..., None])[..., 0]
        each = (torch.stack(seen[:-1]), torch.stack(chosen), old, gained, gained + values[:-1])
        return tuple(tensor.flatten(0, 1) for tensor in each)

    def cost(state: Tensor, chosen: Tensor, old: Tensor, gained: Tensor, wanted: Tensor) -> Tensor:
        gained = gained - gained.mean()
        if form != "deviation-left-out":
            gained = gained / (gained.std() + 1e-8)
        scores, values = model(state)
        if form == ANEW:
            policy = torch.distributions.Categorical(logits=scores)
            new, entropy = policy.log_prob(chosen), policy.entropy().mean()
        else:
            logs = scores.log_softmax(-1)
            new, entropy = logs.gather(1, chosen[:, None])[:, 0], -(logs.exp() * logs).sum(-1).mean()
        ratio = torch.exp(new - old)
        if form == AGAIN:
            bound = torch.where(gained > 0, 1.02 * gained, 0.98 * gained)
            better = torch.minimum(ratio * gained, bound)
        else:
            bound = ratio.clamp(0.98, 1.02) * gained
            better = (torch.maximum if form == "larger-of-both" else torch.minimum)(ratio * gained, bound)
        sign = -1.0 if form == "entropy-punished" else 1.0
        return -better.mean() + 0.5 * F.mse_loss(values, wanted) - sign * 0.01 * entropy

    def step() -> Tensor:
        with torch.no_grad():
            every = played()
        order, total = torch.randperm(games * moves, generator=chance).to(device), torch.zeros((), device=device)
        for _ in range(2):
            for rows in order.chunk(2):
                optimizer.zero_grad()
                loss = cost(*(tensor[rows] for tensor in every))
                loss.backward()
                optimizer.step()
                total = total + loss.detach()
        return total

    return Steps(model, step)
