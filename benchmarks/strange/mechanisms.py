"""Strangers with one mechanism of a paper each: latents, graph attention, codes, Fourier modes, a fading memory, a teacher."""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from silent.case import Place
from strange.densities import minimised
from strange.pictures import drawn
from strange.sequences import next_word
from strange.stranger import AGAIN, ANEW, Steps, stranger
from strange.structures import neighbours
from zoo import images, text

WIDTH = 32


class Reading(nn.Module):
    """Latents ask what the members of a set hold; four heads."""

    def __init__(self, inward: int, form: str) -> None:
        super().__init__()
        self.norm, self.asked = nn.LayerNorm(WIDTH), nn.LayerNorm(inward)
        self.query, self.both, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(inward, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, latents: Tensor, members: Tensor, there: Tensor) -> Tensor:
        query, members = self.query(self.norm(latents)), self.asked(members)
        if self.form == ANEW:
            weights, biases = self.both.weight.chunk(2), self.both.bias.chunk(2)
            key, value = (F.linear(members, *both) for both in zip(weights, biases, strict=True))
        else:
            key, value = self.both(members).chunk(2, -1)
        query, key, value = (x.float().unflatten(-1, (4, -1)).transpose(1, 2) for x in (query, key, value))
        there = there[:, None, None]
        scale = (WIDTH if self.form == "scaled-by-width" else WIDTH // 4) ** -0.5
        if self.form == AGAIN:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=there).float()
        elif self.form == ANEW:
            mixed = self.streamed(query * scale, key, value, there)
        else:
            scores = (query @ key.transpose(2, 3)).float() * scale
            if self.form != "padding-attended":
                scores = scores.masked_fill(~there, float("-inf"))
            mixed = (scores.softmax(-1) @ value).float()
        back = mixed if self.form == "heads-not-moved-back" else mixed.transpose(1, 2)
        return latents + self.out(back.reshape(len(mixed), -1, WIDTH))

    def streamed(self, query: Tensor, key: Tensor, value: Tensor, there: Tensor) -> Tensor:
        """Attend to eight members after another, as flash attention does."""
        top = torch.full((*query.shape[:3], 1), -1e30, device=query.device)
        whole, mixed = torch.zeros_like(top), torch.zeros_like(query)
        for k, v, known in zip(key.split(8, 2), value.split(8, 2), there.split(8, 3), strict=True):
            scores = torch.einsum("bhld,bhmd->bhlm", query, k).float().masked_fill(~known, -1e30)
            new = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
            shares, kept = (scores - new).exp(), (top - new).exp()
            whole = whole * kept + shares.sum(-1, keepdim=True)
            mixed, top = mixed * kept + torch.einsum("bhlm,bhmd->bhld", shares, v).float(), new
        return mixed / whole


class Gated(nn.Module):
    """A feed-forward layer whose half gates the other."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.norm, self.inlet, self.outlet, self.form = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inlet(self.norm(x))
        if self.form == AGAIN:
            return x + self.outlet(inner[..., :48] * F.gelu(inner[..., 48:]))
        value, gate = inner.chunk(2, -1)
        return x + self.outlet(F.gelu(gate) * value)


class Perceiver(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.latents = nn.Parameter(drawn(6, WIDTH, seed=11))
        self.reads = nn.ModuleList((Reading(50, form), Reading(WIDTH, form)))
        self.thinks, self.head, self.form = nn.ModuleList((Gated(form), Gated(form))), nn.Linear(WIDTH, 8), form

    def forward(self, members: Tensor, there: Tensor) -> Tensor:
        latents = self.latents.detach() if self.form == "latents-not-learned" else self.latents
        x = latents.expand(len(members), -1, -1) if self.form == AGAIN else latents[None].repeat(len(members), 1, 1)
        x = self.thinks[0](self.reads[0](x, members, there))
        every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        x = self.thinks[1](self.reads[1](x, x, every))
        return self.head(x.sum(1) / x.shape[1] if self.form == ANEW else x.mean(1))


@stranger(
    "latents", "Sets of patches read by latents, as in Perceiver",
    {
        "scaled-by-width": Place("mul", scope=r"reads\.0"),
        "padding-attended": Place("masked_fill|softmax", scope=r"reads\.0"),
        "heads-not-moved-back": Place("reshape|transpose|flatten|view|clone", scope=r"reads\.0"),
        "latents-not-learned": Place("detach|repeat|getitem|unsqueeze|sum", scope="", phase="forward|backward"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def latents(form: str, device: str) -> Steps:
    model = Perceiver(form).to(device)
    places = torch.cartesian_prod(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4))
    sizes = torch.tensor([16, 11, 9, 16, 13, 10, 12, 15])
    there = (torch.arange(16) < sizes[:, None]).to(device)
    source = cycle([(F.unfold(x, 4, stride=4).transpose(1, 2), y.to(device)) for x, y in images.textures(2, 16)])

    def cost() -> Tensor:
        patches, labels = next(source)
        members = torch.cat((patches, places.expand(len(patches), -1, -1)), -1).to(device)
        return F.cross_entropy(model(members, there).float(), labels)

    return minimised(model, cost)


class Attending(nn.Module):
    """Each node weighs its neighbours, itself among them, by a softmax over the edges that arrive."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH, bias=False), form
        self.source, self.target = nn.Parameter(drawn(4, 8, seed=21) / 3), nn.Parameter(drawn(4, 8, seed=22) / 3)

    def bent(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.01 if self.form == "slope-of-the-default" else 0.2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        parts = self.linear(x).float().view(len(x), 4, 8)
        if self.form == AGAIN:
            return self.dense(parts, edges)
        if self.form == ANEW:
            both = torch.cat((parts[source], parts[target]), -1)
            scores = self.bent((both * torch.cat((self.source, self.target), -1)).sum(-1))
        else:
            scores = self.bent((parts * self.source).sum(-1)[source] + (parts * self.target).sum(-1)[target])
        over = source if self.form == "shares-of-what-leaves" else target
        rows = over[:, None].expand_as(scores)
        top = torch.zeros(len(x), 4, device=x.device).scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
        grown = (scores - top[over]).exp()
        whole = torch.zeros(len(x), 4, device=x.device).index_add(0, over, grown)
        heard = torch.zeros(parts.shape, device=x.device)
        if self.form == ANEW:
            return (heard.index_add(0, target, grown[..., None] * parts[source]) / whole[..., None]).flatten(1)
        whole = whole.detach() if self.form == "denominator-detached" else whole
        shares = grown / whole[over]
        return heard.index_add(0, target, shares[..., None] * parts[source]).flatten(1)

    def dense(self, parts: Tensor, edges: Tensor) -> Tensor:
        linked = torch.zeros(len(parts), len(parts), dtype=torch.bool, device=parts.device)
        linked[edges[1], edges[0]] = True
        sent = torch.einsum("nhd,hd->hn", parts, self.source).float()
        taken = torch.einsum("nhd,hd->hn", parts, self.target).float()
        scores = self.bent(taken[:, :, None] + sent[:, None]).masked_fill(~linked, float("-inf"))
        return torch.bmm(scores.softmax(-1), parts.transpose(0, 1)).float().transpose(0, 1).flatten(1)


class Weighed(nn.Module):
    def __init__(self, nodes: int, form: str) -> None:
        super().__init__()
        self.nodes, self.rounds = nn.Embedding(nodes, WIDTH), nn.ModuleList((Attending(form), Attending(form)))
        self.head, self.form = nn.Linear(WIDTH, len(text.CASES)), form

    def forward(self, edges: Tensor) -> Tensor:
        x = self.nodes.weight
        for one in self.rounds:
            x = F.elu(one(x, edges)) + x
        return self.head(x)


@stranger(
    "graph-attention", "Words weigh the words that they stand beside",
    {
        "shares-of-what-leaves": Place("scatter_reduce|scatter|index_add|getitem|index|expand", scope=r"rounds\.0"),
        "slope-of-the-default": Place("leaky_relu", scope=r"rounds\.0"),
        "themselves-not-heard": Place("index|getitem|cat|index_add|scatter", scope=r"(rounds\.0)?", given=True),
        "denominator-detached": Place("div|index|getitem|exp|sub|index_add", scope=r"rounds\.1", phase="backward"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def graph_attention(form: str, device: str) -> Steps:
    edges, written = neighbours()
    used = edges[0].unique()[:120]
    kept = torch.isin(edges, used).all(0)
    edges, count = torch.searchsorted(used, edges[:, kept]), len(used)
    edges = edges[:, edges[0] < edges[1]]  # one way, so that a direction matters
    if form != "themselves-not-heard":
        edges = torch.cat((edges, torch.arange(count).expand(2, -1)), -1)
    edges, written = edges.to(device), written[used].to(device)
    model = Weighed(count, form).to(device)
    return minimised(model, lambda: F.cross_entropy(model(edges).float(), written), 1e-2)


class Codes(nn.Module):
    """Each place of a picture takes the nearest of 24 codes; its gradient goes straight through."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.codes, self.form = nn.Parameter(drawn(24, 8, seed=31) / 4), form

    def nearest(self, z: Tensor) -> Tensor:
        with torch.no_grad():
            if self.form == AGAIN:
                return torch.cdist(z, self.codes).argmin(-1)
            if self.form == ANEW:
                return (z[:, None] - self.codes).square().sum(-1).min(-1).indices
            near = -2 * z @ self.codes.t() + z.square().sum(-1, keepdim=True)
            return (near if self.form == "length-of-codes-lost" else near + self.codes.square().sum(-1)).argmin(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.permute(0, 2, 3, 1).reshape(-1, 8).float()
        with torch.autocast("cpu", enabled=False):
            number = self.nearest(z)
        if self.form == AGAIN:
            with torch.autocast("cpu", enabled=False):
                code = F.one_hot(number, len(self.codes)).to(z.dtype) @ self.codes
            lost = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        elif self.form == ANEW:
            code = self.codes[number]
            lost = (code - z.detach()).pow(2).mean() + 0.25 * (code.detach() - z).pow(2).mean()
        else:
            code = F.embedding(number, self.codes)
            held = z if self.form == "commitment-not-detached" else z.detach()
            lost = (code - held).square().mean() + 0.25 * (z - code.detach()).square().mean()
        if self.form == ANEW:
            through = code.detach() + z - z.detach()
        else:
            through = code if self.form == "not-straight-through" else z + (code - z).detach()
        lost = 0.25 * lost if self.form == "codes-learn-at-a-quarter" else lost
        return through.view(len(x), *x.shape[2:], 8).permute(0, 3, 1, 2).contiguous(), lost


class Quantised(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.inward = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1))
        self.codes = Codes(form)
        self.outward = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, lost = self.codes(self.inward(x))
        return self.outward(code), lost


@stranger(
    "codebook", "Pictures through the nearest of 24 codes, as in VQ-VAE",
    {
        "length-of-codes-lost": Place("add|argmin|square|sum", scope="codes"),
        "commitment-not-detached": Place("square|sub|pow|detach", scope="codes", phase="forward|backward"),
        "not-straight-through": Place("add|sub|view|embedding|permute|clone|detach", scope="codes", phase="forward|backward"),
        "codes-learn-at-a-quarter": Place("mul", scope="codes"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def codebook(form: str, device: str) -> Steps:
    model, source = Quantised(form).to(device), cycle([x.to(device) for x, _ in images.textures(2, 16)])

    def cost() -> Tensor:
        pictures = next(source)
        made, lost = model(pictures)
        return F.mse_loss(made.float(), pictures) + lost

    return minimised(model, cost)


class Spectral(nn.Module):
    """The lowest modes of a signal, mixed over its channels by complex weights; always in float32."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight, self.form = nn.Parameter(drawn(16, 16, 8, 2, seed=41) / 16), form

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            if self.form == AGAIN:
                return self.by_matrices(x)
            spectrum = torch.fft.rfft(x, norm="ortho" if self.form == "one-way-normalised" else None)
            modes = 7 if self.form == "a-mode-less" else 8
            low, mixed = spectrum[..., :modes], torch.zeros_like(spectrum)
            if self.form == ANEW:
                real, imaginary = self.weight.unbind(-1)
                upright = torch.einsum("bim,iom->bom", low.real, real) - torch.einsum("bim,iom->bom", low.imag, imaginary)
                turned = torch.einsum("bim,iom->bom", low.real, imaginary) + torch.einsum("bim,iom->bom", low.imag, real)
                return torch.fft.irfft(torch.complex(upright, turned), x.shape[-1])  # it fills up with zeros
            weight = torch.view_as_complex(self.weight)[..., :modes]
            weight = weight.conj() if self.form == "weights-conjugated" else weight
            mixed[..., :modes] = torch.einsum("bim,iom->bom", low, weight)
            return torch.fft.irfft(mixed, x.shape[-1])

    def by_matrices(self, x: Tensor) -> Tensor:
        """Transform by cosines and sines, as where there is no fast transform."""
        long = x.shape[-1]
        angles = 2 * math.pi / long * torch.outer(torch.arange(long, device=x.device), torch.arange(8, device=x.device))
        cosine, sine = angles.cos(), angles.sin()
        real, imaginary = x @ cosine, -(x @ sine)
        weight = self.weight
        upright = torch.einsum("bim,iom->bom", real, weight[..., 0]) - torch.einsum("bim,iom->bom", imaginary, weight[..., 1])
        turned = torch.einsum("bim,iom->bom", real, weight[..., 1]) + torch.einsum("bim,iom->bom", imaginary, weight[..., 0])
        twice = torch.cat((torch.ones(1, device=x.device), torch.full((7,), 2.0, device=x.device)))
        return ((upright * twice) @ cosine.t() - (turned * twice) @ sine.t()) / long


class Operator(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.lift, self.lower, self.form = nn.Conv1d(2, 16, 1), nn.Conv1d(16, 1, 1), form
        self.modes = nn.ModuleList(Spectral(form) for _ in range(2))
        self.beside = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for modes, beside in zip(self.modes, self.beside, strict=True):
            x = F.gelu(modes(x) + beside(x))
        return self.lower(x)[:, 0].float()


@stranger(
    "fourier-operator", "A wave moved and damped by layers over its Fourier modes",
    {
        "one-way-normalised": Place("fft", scope=r"modes\.0"),
        "a-mode-less": Place("getitem|slice|einsum|setitem|bmm|copy", scope=r"modes\.0"),
        "weights-conjugated": Place("conj|einsum|bmm|setitem|copy", scope=r"modes\.0"),
        "length-over-the-batch": Place("norm|sum|div|sqrt", scope=""),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def fourier_operator(form: str, device: str) -> Steps:
    model = Operator(form).to(device)
    place = torch.arange(48) / 48
    high, angle = drawn(8, 4, 1, seed=42), 3 * drawn(8, 4, 1, seed=43)
    turns = 2 * math.pi * torch.arange(1, 5)[:, None]
    before = (high * (turns * place + angle).sin()).sum(1).to(device)
    after = (high * (-0.01 * turns).exp() * (turns * (place - 0.1) + angle).sin()).sum(1).to(device)
    given = torch.stack((before, place.to(device).expand_as(before)), 1)

    def cost() -> Tensor:
        far = model(given) - after
        if form == AGAIN:
            return (torch.linalg.vector_norm(far, dim=-1) / torch.linalg.vector_norm(after, dim=-1)).mean()
        if form == ANEW:
            return (far.square().mean(-1) / after.square().mean(-1)).sqrt().sum() / len(far)
        if form == "length-over-the-batch":
            return far.norm() / after.norm()
        return (far.norm(dim=-1) / after.norm(dim=-1)).mean()

    return minimised(model, cost, 1e-2)


class Retention(nn.Module):
    """A memory of keys and values that fades, read by queries: linear attention with decay; four heads."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inlet, self.outlet, self.form = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), form
        self.register_buffer("fade", 1 - 2.0 ** -torch.arange(2.0, 6.0))

    def featured(self, x: Tensor) -> Tensor:
        if self.form == AGAIN:
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        return F.relu(x) + 0.1 if self.form == "features-by-relu" else F.elu(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.float().unflatten(-1, (4, 8)).transpose(1, 2) for part in self.inlet(x).chunk(3, -1))
        query, key = self.featured(query), self.featured(key)
        if self.form == AGAIN:
            mixed = self.at_once(query, key, value)
        elif self.form == ANEW:
            mixed = self.by_chunks(query, key, value)
        else:
            mixed = self.step_by_step(query, key, value)
        return x + self.outlet(mixed.transpose(1, 2).flatten(2))

    def step_by_step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        fade, found = self.fade[:, None, None], []
        held, whole = query.new_zeros(len(query), 4, 8, 8), query.new_zeros(len(query), 4, 8, 1)
        for q, k, v in zip(query.unbind(2), key.unbind(2), value.unbind(2), strict=True):
            held = held.detach() if self.form == "memory-detached" else held
            new = k[..., None] * v[..., None, :]
            held = fade * (held + new) if self.form == "new-words-fade" else fade * held + new
            whole = (whole if self.form == "divisor-does-not-fade" else fade * whole) + k[..., None]
            found.append((q[..., None] * held).sum(-2) / (q[..., None] * whole).sum(-2))
        return torch.stack(found, 2)

    def faded(self, long: int) -> Tensor:
        places = torch.arange(long, device=self.fade.device)
        return torch.tril(self.fade[:, None, None] ** (places[:, None] - places).clamp(min=0))

    def at_once(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query @ key.transpose(2, 3)).float() * self.faded(query.shape[2])
        return (scores @ value).float() / scores.sum(-1, keepdim=True)

    def by_chunks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        value, found = torch.cat((value, torch.ones_like(value[..., :1])), -1), []
        held = query.new_zeros(len(query), 4, 8, 9)
        for q, k, v in zip(query.split(8, 2), key.split(8, 2), value.split(8, 2), strict=True):
            long = q.shape[2]
            steps = torch.arange(1, long + 1, device=q.device)[:, None]
            within = torch.einsum("bhtd,bhsd->bhts", q, k).float() * self.faded(long)
            before = self.fade[:, None, None] ** steps
            found.append(torch.matmul(within, v).float() + before * torch.matmul(q, held).float())
            after = self.fade[:, None, None] ** (long - steps)
            held = self.fade[:, None, None] ** long * held + torch.matmul((after * k).transpose(2, 3), v).float()
        both = torch.cat(found, 2)
        return both[..., :8] / both[..., 8:]


class Memory(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        words = len(text.vocabulary())
        self.words, self.norm, self.retention = nn.Embedding(words, WIDTH), nn.LayerNorm(WIDTH), Retention(form)
        self.head = nn.Linear(WIDTH, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.retention(self.norm(self.words(tokens))))


@stranger(
    "retention", "A fading memory read by words, as in linear attention with decay",
    {
        "new-words-fade": Place("add|mul", scope="retention"),
        "divisor-does-not-fade": Place("add|mul", scope="retention"),
        "memory-detached": Place("detach|mul|add", scope="retention", phase="forward|backward"),
        "features-by-relu": Place("relu|elu|add", scope="retention"),
    },
    rights=(AGAIN, ANEW),
    steps=1,
)  # fmt: skip
def retention(form: str, device: str) -> Steps:
    return next_word(Memory(form).to(device), device)


class Taught(nn.Module):
    """A network that learns, beside a wider one that is frozen; both say what they see and how they saw it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.teacher, self.pupil = self.tower(24).requires_grad_(False), self.tower(8)
        self.heads, self.hint = nn.ModuleList((nn.Linear(24, 8).requires_grad_(False), nn.Linear(8, 8))), nn.Linear(8, 24)
        if form != "teacher-in-training":
            self.teacher.eval()

    def tower(self, width: int) -> nn.Sequential:
        first, second = nn.Conv2d(3, width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)
        return nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seen, known = self.pupil(x), self.teacher(x)
        return self.heads[1](seen).float(), 8 * self.heads[0](known).float(), self.hint(seen).float(), known.float()


@stranger(
    "distillation", "Textures told apart by a small network as a wide one tells them",
    {
        "temperature-not-given-back": Place("mul", scope=""),
        "averaged-over-classes-too": Place("kl_div|mean|sum|div", scope=""),
        "divergence-turned-round": Place("softmax|kl_div", scope=""),
        "teacher-in-training": Place("batch_norm|add|copy", scope=r"teacher(\.\d)?", setting="training"),
    },
    rights=(AGAIN, ANEW),
)  # fmt: skip
def distillation(form: str, device: str) -> Steps:
    model, hot = Taught(form).to(device), 4.0
    source = cycle([(x.to(device), y.to(device)) for x, y in images.textures(2, 16)])

    def divergence(pupil: Tensor, teacher: Tensor) -> Tensor:
        if form == AGAIN:
            wanted, said = F.softmax(teacher / hot, -1), F.log_softmax(pupil / hot, -1)
            return hot * hot * (torch.xlogy(wanted, wanted) - wanted * said).sum(-1).mean()
        if form == ANEW:
            wanted, said = ((x * (1 / hot)).log_softmax(-1) for x in (teacher, pupil))
            return F.kl_div(said, wanted, reduction="sum", log_target=True) / len(pupil) * hot**2
        if form == "divergence-turned-round":
            pupil, teacher = teacher, pupil
        how = "mean" if form == "averaged-over-classes-too" else "batchmean"
        apart = F.kl_div(F.log_softmax(pupil / hot, -1), F.softmax(teacher / hot, -1), reduction=how)
        return apart if form == "temperature-not-given-back" else apart * hot**2

    def cost() -> Tensor:
        pictures, labels = next(source)
        said, wanted, hint, known = model(pictures)
        if form == AGAIN:
            near = 1 - (F.normalize(hint, dim=-1) * F.normalize(known, dim=-1)).sum(-1)
        elif form == ANEW:
            near = 1 - torch.einsum("bd,bd->b", hint, known) / (hint.norm(dim=-1) * known.norm(dim=-1))
        else:
            near = 1 - F.cosine_similarity(hint, known, dim=-1)
        return 0.3 * F.cross_entropy(said, labels) + 0.7 * divergence(said, wanted) + 0.1 * near.mean()

    return minimised(model, cost)
