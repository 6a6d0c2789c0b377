"""One small language model trained in several layouts, healthy and with faults planted that only layouts can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import trueup

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS, LAYERS = 40, 16, 4, 6, 4, 2, 1
WORLD = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=n == 3) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after, self.gated = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.gated(self.after(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# ---------------------------------------------------------------- tensor parallelism by hand, as Megatron does it
class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduces: bool) -> Tensor:
        ctx.reduces = reduces
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()
        if ctx.reduces:
            dist.all_reduce(gradient)
        return gradient, None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Column(nn.Module):
    """Rows of a weight; ``fault`` swaps them between ranks, or keeps the backward from reducing."""

    def __init__(self, whole: nn.Linear, fault: str = "") -> None:
        super().__init__()
        rank = dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(WORLD)[1 - rank if fault == "swapped" else rank].clone())
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().chunk(WORLD)[rank].clone())
        self.reduces = fault != "backward"

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copied.apply(x, self.reduces), self.weight, self.bias)


class Row(nn.Module):
    """Columns of a weight; ``fault`` keeps the partial sums from being added up."""

    def __init__(self, whole: nn.Linear, fault: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(WORLD, 1)[dist.get_rank()].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.reduces = fault != "forward"

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return (_Reduced.apply(y) if self.reduces else y) + self.bias


def _by_hand(model: Model, fault: str) -> nn.Module:
    for n, layer in enumerate(model.layers):
        here = fault if n == LAYERS - 1 else ""
        for part, names, kind in ((layer.attention, "q k v", Column), (layer.attention, "o", Row)):
            for name in names.split():
                setattr(part, name, kind(getattr(part, name)))
        layer.gated.gate, layer.gated.up = Column(layer.gated.gate), Column(layer.gated.up, here)
        layer.gated.down = Row(layer.gated.down, here)
    return model


# ---------------------------------------------------------------- layouts of PyTorch
# Their packages are imported where they are needed: each worker collects this file, and it takes two seconds.
def _tensor_parallel(model: Model, _: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
    plan |= {"gated.gate": ColwiseParallel(), "gated.up": ColwiseParallel(), "gated.down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def _fsdp(model: Model, _: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _ddp(model: Model, fault: str) -> nn.Module:
    if fault == "tied":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["words.weight", "head.weight"])
    wrapped = DistributedDataParallel(model)
    if fault == "twice":
        wrapped.register_comm_hook(None, _divided_twice)
    return wrapped


def _divided_twice(_, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks annotations
    return dist.all_reduce(bucket.buffer() / WORLD**2, async_op=True).get_future().then(lambda done: done.value()[0])


LAYOUTS: dict[str, Callable[[Model, str], nn.Module]] = {
    "tp": _tensor_parallel, "fsdp": _fsdp, "ddp": _ddp, "hand": _by_hand,
}  # fmt: skip
FAULTS = (
    ("hand", "forward"), ("hand", "backward"), ("hand", "swapped"), ("hand", "loss"),
    ("ddp", "twice"), ("ddp", "tied"), ("ddp", "drift"), ("ddp", "silent"), ("ddp", "masks"),
)  # fmt: skip


FURTHER = (
    "pp-local", "cp", "zero1", "zero3", "ddp-accumulated", "zero2-summed", "own-places", "tied-not-reduced", "summed-narrowly",
    "zero2-last-only",
)  # fmt: skip
PACKED = ("bias-each-rank", "column-not-reduced", "summed-again")
"""Layouts of `benchmarks/parallel_layouts.py` and faults of `benchmarks/layout_faults.py`, of two layers here."""


def train(out: Path, layout: str = "", fault: str = "", detail: str = "tensor") -> None:
    """Train for two steps under capture; ``layout``: one of `LAYOUTS`, empty for one process that has the whole batch."""
    torch.manual_seed(3)
    model = Model()
    batches = torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(11))
    rank, parts = (dist.get_rank(), WORLD) if layout in ("ddp", "fsdp") else (0, 1)
    if fault == "masks":
        for layer in model.layers:
            layer.gated.drop.p = 0.3
    wrapped = LAYOUTS[layout](model, fault) if layout else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    with trueup.capture(out, model=model, level=("module", "api", *["aten"] * (detail == "stats")), detail=detail) as running:
        for step in range(STEPS):
            if fault == "drift" and step == 1 and rank == 1:
                with torch.no_grad():
                    model.layers[0].gated.down.weight.mul_(1.01)
            words = batches[step].chunk(parts)[rank]
            with wrapped.no_sync() if fault == "silent" else nullcontext():  # type: ignore[operator]
                logits = wrapped(words[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            (loss * WORLD if fault == "loss" else loss).backward()
            optimizer.step()
            running.step()


@contextmanager
def _joined() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def work(out: str) -> None:
    """Train in all layouts, then with each fault."""
    import layout_faults
    import parallel_layouts

    with _joined():
        for layout in LAYOUTS:
            train(Path(out, layout), layout)
            dist.barrier()
        train(Path(out, "tp-stats"), "tp", detail="stats")
        parallel_layouts.LAYERS = 2
        for layout in (*FURTHER, *PACKED):
            parallel_layouts.train(Path(out, layout), layout_faults.ALL[layout])
            dist.barrier()
        for layout, fault in FAULTS:
            train(Path(out, fault), layout, fault)
            dist.barrier()
