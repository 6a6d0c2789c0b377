"""How often `trueup curves` is wrong: simulated repeats, and 20 seeds of two small real trainings, healthy and faulty.

    python benchmarks/curves.py simulated                    # minutes: words at no difference and at the margin; power
    python benchmarks/curves.py trained -o runs/curves.npz   # 40 minutes on one core: two trainings, 13 ways, 20 seeds
    python benchmarks/curves.py judged runs/curves.npz       # words over 200 draws of 5 seeds a side

Each training runs on real data that comes with scikit-learn (digits) or with Python (a module's source): a classifier of three
layers, and a language model of characters with two attention layers. A way changes one thing: how numbers are computed (healthy),
or what is computed (faulty, mildly).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trueup.analysis.curves import statistics
from trueup.analysis.curves.judging import WINDOWS
from trueup.analysis.curves.statistics import equivalence, needed, power

MARGIN = 0.005
HEALTHY = ("again, other seeds", "fused optimizer", "micro-batches", "samples in other order", "bfloat16")
FAULTY = (
    "lr 2 % higher", "eps 1e-3 in norms", "gelu by tanh", "weight decay on norms", "no bias correction", "loss of one sample lost",
    "dropout scale lost",
)  # fmt: skip
SEEDS, STEPS = 20, {"digits": 600, "characters": 200}


def simulated(trials: int) -> None:
    """Print how often each word comes at a true difference, and whether the power is as computed."""
    rng = np.random.default_rng(0)
    bound = math.log1p(MARGIN)
    print("spread  runs  pair  | called equivalent at the margin | different at none | power computed  found | needed")
    for spread in (0.001, 0.002, 0.005):
        for runs in (2, 3, 5, 10):
            for paired in (False, True):
                found = {}
                for off in (0.0, bound):
                    b = rng.normal(0, spread, (trials, runs))
                    c = (b + rng.normal(off, spread, b.shape)) if paired else rng.normal(off, spread, b.shape)
                    found[off] = Counter(words(b, c, paired))
                well = [sum(found[off][word] for word in ("equivalent", "different inside the margin")) / trials for off in found]
                error = spread * math.sqrt((1 if paired else 2) / runs)
                told = power(error, runs - 1, bound, None if paired else runs)
                print(
                    f"{spread:.1%}  {runs:4}  {paired!s:5} | {well[1]:7.3f} | {found[0.0]['different'] / trials:7.4f} | "
                    f"{told:.3f} {well[0]:.3f} | {needed(spread, bound, paired)}", flush=True,
                )  # fmt: skip


def words(b: Any, c: Any, paired: bool) -> list[str]:
    """Return the words of many comparisons at once; the repeats needed are not asked for, which takes most of the time."""
    before, statistics.needed = statistics.needed, lambda *_, **__: None
    power_before, statistics.power = statistics.power, lambda *_: 0.0
    try:
        return [
            equivalence(np.exp(one).tolist(), np.exp(other).tolist(), MARGIN, logarithmic=True, paired=paired).word
            for one, other in zip(b, c, strict=True)
        ]
    finally:
        statistics.needed, statistics.power = before, power_before


def trained(into: Path, seeds: int, names: Sequence[str]) -> None:
    """Train in every way, and keep the losses: way and training -> (seeds, steps)."""
    kept: dict[str, Any] = {}
    for name in names:
        train = TRAININGS[name]
        for way in ("baseline", *HEALTHY, *FAULTY):
            begun = time.monotonic()
            shift = 1000 if way == "again, other seeds" else 0
            curves = [train(seed + shift, "baseline" if shift else way, STEPS[name]) for seed in range(seeds)]
            kept[f"{name}/{way}"] = np.array(curves)
            print(f"{name}  {way}  {time.monotonic() - begun:.0f} s  end {kept[f'{name}/{way}'][:, -60:].mean():.5f}", flush=True)
            into.parent.mkdir(parents=True, exist_ok=True)
            np.savez(into, **kept)


def digits(seed: int, way: str, steps: int) -> list[float]:
    """Train a classifier of digits: linear, norm, GELU, dropout, twice."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    data, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    eps = 1e-3 if way == "eps 1e-3 in norms" else 1e-5
    gelu = "tanh" if way == "gelu by tanh" else "none"
    model = nn.Sequential(
        nn.Linear(64, 48), nn.LayerNorm(48, eps=eps), nn.GELU(approximate=gelu), nn.Dropout(0.1),
        nn.Linear(48, 48), nn.LayerNorm(48, eps=eps), nn.GELU(approximate=gelu), nn.Dropout(0.1), nn.Linear(48, 10),
    )  # fmt: skip
    order = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, len(inputs), (64,), generator=order)
    return _train(model, way, steps, draw, lambda at: (inputs[at], targets[at]))


def characters(seed: int, way: str, steps: int) -> list[float]:
    """Train a language model of characters: two attention layers of width 32."""
    import torch
    from torch import nn

    source = Path(contextlib.__file__).read_text(encoding="utf-8")
    letters = sorted(set(source))
    text = torch.tensor([letters.index(one) for one in source])
    torch.manual_seed(seed)
    eps = 1e-3 if way == "eps 1e-3 in norms" else 1e-5

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(32, eps=eps), nn.LayerNorm(32, eps=eps)
            self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
            self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.1)
            self.act = nn.GELU(approximate="tanh" if way == "gelu by tanh" else "none")

        def forward(self, x: Any) -> Any:
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mix(self.one(x)).chunk(3, -1))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.drop(self.out(seen))
            return x + self.drop(self.down(self.act(self.up(self.two(x)))))

    model = nn.Sequential(nn.Embedding(len(letters), 32), Block(), Block(), nn.LayerNorm(32, eps=eps), nn.Linear(32, len(letters)))
    order = torch.Generator().manual_seed(seed)
    at = torch.arange(33)

    def batch(starts: Any) -> tuple[Any, Any]:
        window = text[starts[:, None] + at]
        return window[:, :-1], window[:, 1:]

    return _train(model, way, steps, lambda: torch.randint(len(text) - 34, (16,), generator=order), batch)


def _train(model: Any, way: str, steps: int, draw: Callable[[], Any], batch: Callable[[Any], tuple[Any, Any]]) -> list[float]:
    import torch
    from torch import nn

    if way == "dropout scale lost":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda one, _, made: made * (1 - one.p) if one.training else made)
    norms = [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]
    rest = [p for p in model.parameters() if not any(p is norm for norm in norms)]
    rate = 3e-3 * (1.02 if way == "lr 2 % higher" else 1)
    decay = 0.1
    others = decay if way == "weight decay on norms" else 0
    groups = [{"params": rest, "weight_decay": decay}, {"params": norms, "weight_decay": others}]
    fused = way == "fused optimizer"
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=fused, foreach=None if fused else False)
    loss_of = nn.CrossEntropyLoss(reduction="none")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for _ in range(steps):
        x, y = batch(draw())
        optimizer.zero_grad()
        parts = 2 if way == "micro-batches" else 1
        total = 0.0
        for some, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            if way == "samples in other order":
                some, wanted = some.flip(0), wanted.flip(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "bfloat16"):
                made = model(some)
            each = loss_of(made.float().flatten(0, -2), wanted.flatten())
            loss = each.mean() / parts
            if way == "loss of one sample lost":
                loss = each[: -each.numel() // len(some)].sum() / each.numel()
            loss.backward()
            total += float(each.detach().mean() / parts)
        if way == "no bias correction":
            for group in optimizer.param_groups:
                for p in group["params"]:
                    state = optimizer.state[p]
                    if state:
                        state["step"].fill_(1e9)
        optimizer.step()
        schedule.step()
        losses.append(total)
    return losses


TRAININGS: dict[str, Callable[[int, str, int], list[float]]] = {"digits": digits, "characters": characters}


def judged(file: Path, draws: int, runs: int) -> None:
    """Print the words of the last window over draws of seeds, paired and not, and how early a difference is known for good."""
    held = np.load(file, allow_pickle=False)
    rng = np.random.default_rng(1)
    for name in dict.fromkeys(key.partition("/")[0] for key in held):
        print(f"\n{name}, {runs} runs a side, {draws} draws: shares (e equivalent, i inside, d different, ? could not tell)")
        print("way | difference over all seeds | paired e i d ? | not paired e i d ? | known from step (paired)")
        base = held[f"{name}/baseline"]
        for way in (*HEALTHY, *FAULTY):
            cand = held[f"{name}/{way}"]
            whole = ends(cand) - ends(base)
            pairs, singles, since = Counter(), Counter(), []
            for _ in range(draws):
                chosen, other = rng.permutation(len(base))[:runs], rng.permutation(len(cand))[:runs]
                if way != "again, other seeds":
                    pairs[words([ends(base)[chosen]], [ends(cand)[chosen]], True)[0]] += 1
                    since.append(known(base[chosen], cand[chosen]))
                left = other if way == "again, other seeds" else np.setdiff1d(other, chosen, assume_unique=True)
                left = left if len(left) > 1 else np.setdiff1d(np.arange(len(cand)), chosen)[:runs]
                singles[words([ends(base)[chosen]], [ends(cand)[left]], False)[0]] += 1
            steps = [one for one in since if one is not None]
            at = "–" if len(steps) <= len(since) / 2 else f"{int(np.median(steps))}"
            print(
                f"{way} | {100 * whole.mean():+.2f} % ± {100 * whole.std(ddof=1) / math.sqrt(len(whole)):.2f} | {shares(pairs)} | "
                f"{shares(singles)} | {at}", flush=True,
            )  # fmt: skip


def ends(curves: Any) -> Any:
    """Return the logarithm of a run's geometric mean over the last window, as `judge` takes it."""
    at = int(WINDOWS[-1][0] * curves.shape[1])
    return np.log(curves[:, at:]).mean(axis=1)


def known(base: Any, cand: Any) -> int | None:
    """Return the step from which the verdict on what was trained until then is different for good."""
    steps = base.shape[1]
    first = None
    for until in range(steps // 20, steps + 1, steps // 20):
        word = words([ends(base[:, :until])], [ends(cand[:, :until])], True)[0]
        first = (first or until) if word == "different" else None
    return first


def shares(found: Counter[str]) -> str:
    total = sum(found.values()) or 1
    return " ".join(
        f"{found[word] / total:.2f}" for word in ("equivalent", "different inside the margin", "different", "could not tell")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulated", "trained", "judged"))
    parser.add_argument("file", nargs="?", type=Path, default=Path("runs/curves.npz"))
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/curves.npz"))
    parser.add_argument("--training", choices=list(TRAININGS), action="append")
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    if given.what == "simulated":
        simulated(given.trials)
    elif given.what == "trained":
        trained(given.output, given.seeds, given.training or list(TRAININGS))
    else:
        judged(given.file, given.draws, given.runs)


if __name__ == "__main__":
    main()
