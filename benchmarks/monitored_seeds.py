"""How often `trueup compare` of two monitored trainings is wrong: healthy seeds that deviate, mild faults that are not named.

    python benchmarks/monitored_seeds.py run -o /tmp/seeds --seeds 11,12,13,14     # 15 minutes on one core
    python benchmarks/monitored_seeds.py judge -o /tmp/seeds --seeds 11,12,13,14   # seconds

Three trainings of 300 steps on real data: a vision transformer (digits of scikit-learn) and a T5 (characters of Python's own
sources), both under the Trainer of transformers, and a convolutional net with batch norms in a plain loop (patches of two
photographs of scikit-learn's). A way changes one thing. Healthy pairs: two seeds; other data or other weights alone; bfloat16 or a
fused optimizer on the same seed and on another. A fault is compared on the baseline's seed and on another one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS = 300
HEALTHY = ("bfloat16", "fused")
FAULTY = (
    "warmup lost", "schedule lost", "lr 2 % higher", "lr 10 % higher", "weight decay lost", "no clipping", "dropout off",
    "dropout unscaled", "label smoothing", "not shuffled", "beta2 0.95", "eps 1e-3", "gradient of a layer", "sample lost",
)  # fmt: skip


def record(training: str, way: str, weights: int, data: int, into: Path) -> None:
    """Train once, monitored as under the command."""
    import torch

    from trueup.analysis.monitor.session import Monitor, MonitorOptions, root_manifest
    from trueup.recording.registry import adapter

    torch.manual_seed(weights)
    options = MonitorOptions(alerts=False)
    monitor = Monitor(into, options, adapter("torch"), root_manifest(options, [])).start(at_once=False)
    try:
        TRAININGS[training](way, weights, data)
    finally:
        monitor.close()


def rate(way: str, base: float) -> float:
    return base * {"lr 2 % higher": 1.02, "lr 10 % higher": 1.1}.get(way, 1.0)


def factor(way: str, step: int, warm: int = 30) -> float:
    """Return the schedule: a line up, half a cosine down."""
    if step < warm and way != "warmup lost":
        return (step + 1) / warm
    return 1.0 if way == "schedule lost" else 0.5 * (1 + math.cos(math.pi * max(step - warm, 0) / (STEPS - warm)))


def spoil(model: Any, way: str, layer: Any) -> None:
    """Plant what is a matter of the model."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout) and way == "dropout off":
            module.p = 0.0
        if isinstance(module, nn.Dropout) and way == "dropout unscaled":
            module.register_forward_hook(lambda one, _, made: made * (1 - one.p) if one.training else made)
        if way == "eps 1e-3":
            for name in ("eps", "variance_epsilon"):
                if hasattr(module, name):
                    setattr(module, name, 1e-3)
    if way == "gradient of a layer":
        layer.register_hook(lambda grad: grad * 0.9)


def under_trainer(model: Any, rows: Any, way: str, seed: int, layer: Any, base: float, loss_of: Any) -> None:
    import torch
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)  # else all that follows a bfloat16 training is one
    spoil(model, way, layer)

    class Own(Trainer):
        def _get_train_sampler(self, *given: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows) if way == "not shuffled" else super()._get_train_sampler(*given)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            made = model(**inputs)
            loss = loss_of(made.logits, inputs["labels"], way)
            return (loss, made) if return_outputs else loss

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=16, seed=seed, data_seed=seed, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, logging_steps=1000, max_grad_norm=0 if way == "no clipping" else 1.0,
            bf16=way == "bfloat16", optim="adamw_torch_fused" if way == "fused" else "adamw_torch",
        )  # fmt: skip
        settings = {"lr": rate(way, base), "betas": (0.9, 0.95 if way == "beta2 0.95" else 0.999), "fused": way == "fused"}
        decay = 0.0 if way == "weight decay lost" else 0.1
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay, **settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(way, step))
        Own(model, given, train_dataset=rows, optimizers=(optimizer, schedule)).train()


def smoothed(logits: Any, labels: Any, way: str) -> Any:
    """Return the loss, of a batch or of all of it but one sample."""
    from torch.nn import functional

    each = functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), label_smoothing=0.1 if way == "label smoothing" else 0.0, reduction="none"
    )
    return each[: -each.numel() // len(labels)].sum() / each.numel() if way == "sample lost" else each.mean()


def vit(way: str, weights: int, data: int) -> None:
    """A vision transformer of three layers, digits."""
    import torch
    from sklearn.datasets import load_digits
    from transformers import ViTConfig, ViTForImageClassification

    pictures, labels = load_digits(return_X_y=True)
    rows = [
        {"pixel_values": torch.tensor(one, dtype=torch.float32).reshape(1, 8, 8) / 8 - 1, "labels": int(label)}
        for one, label in zip(pictures, labels, strict=True)
    ]
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=8, patch_size=2,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(weights)
    model = ViTForImageClassification(config)
    under_trainer(model, rows, way, data, model.vit.encoder.layer[1].output.dense.weight, 2e-3, smoothed)


def t5(way: str, weights: int, data: int) -> None:
    """A T5 of two and two layers: 32 characters of a source file, and the 16 that follow."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    text = Path(contextlib.__file__).read_bytes()[:20000]
    rows = [
        {"input_ids": torch.tensor(list(text[at : at + 32])), "labels": torch.tensor(list(text[at + 32 : at + 48]))}
        for at in range(0, len(text) - 48, 8)
    ]
    config = T5Config(
        vocab_size=256, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.1, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    torch.manual_seed(weights)
    model = T5ForConditionalGeneration(config)
    under_trainer(model, rows, way, data, model.decoder.block[1].layer[2].DenseReluDense.wo.weight, 3e-3, smoothed)


def conv(way: str, weights: int, data: int) -> None:
    """A convolutional net in a plain loop, SGD with momentum: which of the photographs, and which half of it, is a patch from?"""
    import torch
    from sklearn.datasets import load_sample_images
    from torch import nn

    patches, labels = [], []
    for label, picture in enumerate(load_sample_images().images):
        small = torch.tensor(picture).permute(2, 0, 1).float() / 128 - 1
        for top, left in itertools.product(range(0, small.shape[1] - 16, 24), range(0, small.shape[2] - 16, 24)):
            patches.append(small[:, top : top + 16, left : left + 16])
            labels.append(2 * label + (top > small.shape[1] // 2))
    inputs, targets = torch.stack(patches), torch.tensor(labels)
    torch.manual_seed(weights)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    spoil(model, way, model[7].weight)
    decay = 0.0 if way == "weight decay lost" else 5e-3
    optimizer = torch.optim.SGD(model.parameters(), rate(way, 0.05), momentum=0.9, weight_decay=decay, fused=way == "fused")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(way, step))
    order = torch.Generator().manual_seed(data)
    torch.manual_seed(data)
    for step in range(STEPS):
        if way == "not shuffled":
            at = torch.arange(16 * step, 16 * step + 16) % len(inputs)
        else:
            at = torch.randint(len(inputs), (16,), generator=order)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bfloat16"):
            made = model(inputs[at])
        smoothed(made, targets[at], way).backward()
        if way != "no clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


TRAININGS: dict[str, Callable[[str, int, int], None]] = {"vit": vit, "t5": t5, "conv": conv}
NONE = {"conv": ("beta2 0.95",)}  # what a training has not


def runs(training: str, seeds: list[int]) -> Iterator[tuple[str, int, int]]:
    """Yield way, seed of the weights, seed of the data."""
    yield from (("plain", seed, seed) for seed in seeds)
    yield from (("plain", seeds[1], seeds[0]), ("plain", seeds[0], seeds[1]))
    for way in HEALTHY:
        yield from ((way, seed, seed) for seed in seeds[:2])
    yield from ((way, seeds[0], seeds[0]) for way in FAULTY if way not in NONE.get(training, ()))


def pairs(training: str, seeds: list[int]) -> Iterator[tuple[str, bool, tuple[str, int, int], tuple[str, int, int]]]:
    """Yield what a pair is, whether it is healthy, and its two runs."""
    first, second = seeds[:2]
    for one, other in itertools.combinations(seeds, 2):
        yield f"seeds {one} and {other}", True, ("plain", one, one), ("plain", other, other)
    yield "other weights", True, ("plain", first, first), ("plain", second, first)
    yield "other data", True, ("plain", first, first), ("plain", first, second)
    for way in HEALTHY:
        yield way, True, ("plain", first, first), (way, first, first)
        for one in seeds[2:]:
            yield f"{way}, another seed ({one})", True, ("plain", one, one), (way, second, second)
    for way in FAULTY:
        if way not in NONE.get(training, ()):
            yield way, False, ("plain", first, first), (way, first, first)
            yield f"{way}, another seed", False, ("plain", second, second), (way, first, first)


def judged(root: Path, training: str, seeds: list[int]) -> None:
    """Print a row for each pair and the counts."""
    from trueup.analysis.monitor.comparing import compare_series

    found: dict[tuple[str, str], int] = {}
    for said, healthy, base, cand in pairs(training, seeds):
        told = compare_series(folder(root, training, *base), folder(root, training, *cand))
        kind = "healthy" if healthy else "fault, another seed" if said.endswith("another seed") else "fault"
        found[kind, told.verdict] = found.get((kind, told.verdict), 0) + 1
        first = told.left[0] if told.left else None
        what = f"{len(told.left)} leave, first {first.series} at {first.beyond}" if first else "; ".join(told.notes)[:90]
        print(f"{training:5} {kind:20} {said:34} {told.verdict:13} {what}", flush=True)
    for (kind, verdict), many in sorted(found.items()):
        print(f"{training:5} {kind:20} {verdict:13} {many}")


def folder(root: Path, training: str, way: str, weights: int, data: int) -> Path:
    return root / training / f"{way.replace(' ', '-').replace('%', 'percent')}-w{weights}-d{data}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "judge"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--training", choices=list(TRAININGS), action="append")
    parser.add_argument("--seeds", default="11,12,13,14", help="two at least")
    given = parser.parse_args()
    seeds = [int(one) for one in given.seeds.split(",")]
    for training in given.training or list(TRAININGS):
        if given.what == "judge":
            judged(given.output, training, seeds)
            continue
        for run in runs(training, seeds):
            into, begun = folder(given.output, training, *run), time.monotonic()
            if not into.exists():
                partial = into.with_name(into.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)
                record(training, *run, partial)
                partial.rename(into)
                print(f"{training}  {run}  {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
