"""Strangers that learn from graphs, tables, equations and play, and one that is only deep."""

from __future__ import annotations

import math
from itertools import cycle, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from silent.language import batches
from strange.stranger import AGAIN, Steps, stranger
from zoo import text

WIDTH = 24


def neighbours() -> tuple[Tensor, Tensor]:
    """Return which word follows which in the LICENSE, int64 [2, edges], and how each word is written there, [words]."""
    words = text.vocabulary()
    pairs, written = set(), torch.zeros(len(words), dtype=torch.int64)
    for sentence in text.sentences()[:40]:
        numbers = text.ids(sentence)
        written[numbers] = torch.tensor(sentence.case)
        pairs |= {edge for one, other in pairwise(numbers) for edge in ((one, other), (other, one))}
    return torch.tensor(sorted(pairs)).t().contiguous(), written


class Passing(nn.Module):
    """Messages along edges, averaged where they arrive and taken up by a gate."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.message, self.take = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.form = form

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges.flip(0) if self.form == "messages-flow-backwards" else edges
        sent = F.relu(self.message(torch.cat((x[source], x[target]), -1))).float()
        count = torch.zeros(len(x), device=x.device).index_add(0, target, torch.ones(len(target), device=x.device))
        count = count + 1 if self.form == "self-counted-in-degree" else count.clamp(min=1)
        if self.form == AGAIN:
            rows, shares = target[:, None].expand_as(sent), sent / count[target, None]
            heard = torch.zeros(x.shape, device=x.device).scatter_add(0, rows, shares)
        else:
            heard = torch.zeros(x.shape, device=x.device).index_add(0, target, sent) / count[:, None]
        return self.take(heard, x)


class Graph(nn.Module):
    def __init__(self, nodes: int, form: str) -> None:
        super().__init__()
        self.nodes, self.rounds = nn.Embedding(nodes, WIDTH), nn.ModuleList(Passing(form) for _ in range(3))
        self.head = nn.Linear(WIDTH, len(text.CASES))

    def forward(self, edges: Tensor) -> Tensor:
        x = self.nodes.weight
        for one in self.rounds:
            x = one(x, edges).to(x.dtype)
        return self.head(x)


@stranger(
    "graph", "Words that follow each other exchange messages",
    {
        "messages-flow-backwards": Place("flip|getitem|index|unbind", scope=r"rounds\.0"),
        "self-counted-in-degree": Place("add|clamp|div", scope=r"rounds\.0"),
    },
)  # fmt: skip
def graph(form: str, device: str) -> Steps:
    edges, written = (each.to(device) for each in neighbours())
    edges = edges[:, edges[0] < edges[1]]
    model = Graph(len(written), form).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(edges).float(), written)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Factors(nn.Module):
    """A factorisation machine over the words of a sentence, with sparse gradients."""

    def __init__(self, form: str) -> None:
        super().__init__()
        rows = len(text.vocabulary())
        mode = "mean" if form == "bag-averaged" else "sum"
        self.weights = nn.EmbeddingBag(rows, 1, mode=mode, sparse=True)
        self.factors = nn.Embedding(rows, WIDTH, sparse=True)
        self.tower, self.form = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1)), form
        nn.init.normal_(self.factors.weight, std=0.1)
        nn.init.normal_(self.weights.weight, std=0.1)

    def forward(self, items: Tensor) -> Tensor:
        each = self.factors(items)
        total = each.sum(1)
        if self.form == AGAIN:
            crossed = torch.triu(each @ each.transpose(1, 2), 1).float().sum((1, 2))
        else:
            share = 1.0 if self.form == "pairs-counted-twice" else 0.5
            crossed = share * (total.square() - each.square().sum(1)).sum(-1)
        return self.weights(items)[:, 0] + crossed + self.tower(total)[:, 0]


@stranger(
    "recommender", "Pairs of items scored by sparse embeddings",
    {
        "pairs-counted-twice": Place("mul|sub|sum", scope=""),
        "bag-averaged": Place("embedding_bag", scope="weights", setting="mode"),
    },
    dense=False,
)  # fmt: skip
def recommender(form: str, device: str) -> Steps:
    model = Factors(form).to(device)
    dense = torch.optim.Adagrad(model.tower.parameters(), lr=1e-2, foreach=False)
    sparse = torch.optim.SparseAdam([*model.weights.parameters(), *model.factors.parameters()], lr=1e-2)
    source = batches()

    def step() -> Tensor:
        batch = next(source)
        items, long = batch["input_ids"][:, :8].to(device), (batch["attention_mask"].sum(1) > 12).float().to(device)
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(items).float(), long)
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Heat(nn.Module):
    """The temperature of a rod at a place and time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, place: Tensor, time: Tensor) -> Tensor:
        return self.layers(torch.stack((place, time), -1))[:, 0].float()


@stranger(
    "physics", "The heat equation solved by a network, with second derivatives",
    {
        "conductivity-squared": Place("mul|square|pow", scope=""),
        "time-derivative-by-place": Place("autograd|grad|sub|mul|backward|square|pow", phase="forward|backward", scope=""),
    },
)  # fmt: skip
def physics(form: str, device: str) -> Steps:
    model, conductivity = Heat().to(device), 0.3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    place, time = (torch.rand(64).to(device).requires_grad_() for _ in range(2))
    ends, start = torch.tensor([0.0, 1.0] * 8).to(device), torch.linspace(0, 1, 16).to(device)

    def slope(of: Tensor, by: Tensor) -> Tensor:
        if form == AGAIN:
            return torch.autograd.grad(of.sum(), by, create_graph=True)[0]
        return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]

    def step() -> Tensor:
        optimizer.zero_grad()
        warm = model(place, time)
        across = slope(warm, place)
        rate = across if form == "time-derivative-by-place" else slope(warm, time)
        factor = conductivity**2 if form == "conductivity-squared" else conductivity
        residual = rate - factor * slope(across, place)
        known = model(start, torch.zeros_like(start)) - torch.sin(math.pi * start)
        loss = residual.square().mean() + known.square().mean() + model(ends, start).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Player(nn.Module):
    """What to do, and how well the game stands."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(state))
        return self.actor(x).float(), self.critic(x)[..., 0].float()


def balanced(state: Tensor, right: Tensor) -> Tensor:
    """Push a cart with a pole on it to one side or the other for a fiftieth of a second; state [games, 4]."""
    _place, speed, angle, turn = state.unbind(1)
    force = torch.where(right, 10.0, -10.0)
    pushed = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    bent = (9.8 * angle.sin() - angle.cos() * pushed) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    moved = pushed - 0.05 * bent * angle.cos() / 1.1
    return state + 0.02 * torch.stack((speed, moved, turn, bent), 1)


@stranger(
    "actor-critic", "A pole balanced on a cart, by policy gradient",
    {
        "advantage-not-detached": Place(phase="backward", scope=r"(critic)?"),
        "reward-discounted-twice": Place("mul|add", scope=""),
    },
    held_out=True,
)  # fmt: skip
def actor_critic(form: str, device: str) -> Steps:
    model = Player().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    chance = torch.Generator().manual_seed(5)
    games, moves, discount = 8, 10, 0.95

    def returns(rewards: list[Tensor], last: Tensor) -> Tensor:
        if form == AGAIN:
            powers = discount ** (torch.arange(moves)[None] - torch.arange(moves)[:, None]).clamp(min=0)
            table = torch.triu(torch.as_tensor(powers)).to(last.device)
            rest = (discount ** torch.arange(moves, 0, -1)).to(last.device)
            return table @ torch.stack(rewards) + rest[:, None] * last
        found, total = [], last
        for reward in reversed(rewards):
            total = discount * (reward + total) if form == "reward-discounted-twice" else reward + discount * total
            found.append(total)
        return torch.stack(found[::-1])

    def step() -> Tensor:
        state = (0.1 * torch.randn(games, 4, generator=chance)).to(device)
        logs, values, rewards = [], [], []
        for _ in range(moves):
            scores, value = model(state)
            likely = scores.log_softmax(-1)
            luck = torch.rand(games, generator=chance).to(device)
            right = luck < likely.detach()[:, 1].exp()
            state = balanced(state, right)
            logs.append(likely.gather(1, right.long()[:, None])[:, 0])
            values.append(value)
            rewards.append(torch.cos(state[:, 2]))
        wanted = returns(rewards, model(state)[1].detach())
        stood = torch.stack(values)
        gained = wanted - (stood if form == "advantage-not-detached" else stood.detach())
        optimizer.zero_grad()
        loss = -(torch.stack(logs) * gained).mean() + 0.5 * F.mse_loss(stood, wanted)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)


class Layer(nn.Module):
    def __init__(self, form: str, wrong: bool) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form, self.wrong = form, wrong

    def normed(self, x: Tensor) -> Tensor:
        if self.form != "variance-unbiased":
            return self.norm(x)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True) + self.norm.eps).sqrt() * self.norm.weight + self.norm.bias

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        summed = self.linear(self.normed(x))
        bent = summed * 0.5 * (1 + torch.erf(summed / math.sqrt(2))) if self.form == AGAIN else F.gelu(summed)
        return x + (1.002 if self.wrong else 1.0) * 0.1 * bent


@stranger(
    "hundred-layers", "A residual network of a hundred layers on the words of a sentence",
    {
        "variance-unbiased": Place("var|mean|layer_norm|div|sqrt", scope=r"layers\.0(\.norm)?"),
        "one-layer-scaled": Place("mul|add", scope=r"layers\.57"),
    },
    steps=1,
)  # fmt: skip
def hundred_layers(form: str, device: str) -> Steps:
    words = nn.EmbeddingBag(len(text.vocabulary()), WIDTH)
    layers = [Layer(form, form == "one-layer-scaled" and k == 57) for k in range(100)]
    model = nn.ModuleDict({"words": words, "layers": nn.ModuleList(layers), "head": nn.Linear(WIDTH, len(text.MARKS))}).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, foreach=True)
    source = cycle(text.batches(2, 16))

    def step() -> Tensor:
        sentences = next(source)
        tokens = text.padded(map(text.ids, sentences), text.PAD).to(device)
        marks = torch.tensor([max(sentence.mark) for sentence in sentences]).to(device)
        optimizer.zero_grad()
        x = model["words"](tokens)
        for layer in model["layers"]:
            x = layer(x)
        loss = F.cross_entropy(model["head"](x).float(), marks)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Steps(model, step)
