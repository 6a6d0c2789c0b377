"""One small GPT, dense, packed or with experts, trained in every layout: all pairs of healthy runs have to be aligned.

    python benchmarks/parallel_layouts.py record OUT [NAME...]     train under capture, 2 or 4 gloo processes a layout
    python benchmarks/parallel_layouts.py compare OUT [NAME...]    every pair of one family, a line each

Hand-written are the layouts that torch has none of: Megatron's tensor and sequence parallelism with packed weights, context
parallelism (zigzag), expert parallelism, ZeRO-2 and ZeRO-3 with flat buffers.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import trueup

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, STEPS, LAYERS, HIDDEN, EXPERTS = 41, 16, 4, 8, 4, 2, 4, 36, 4


# ---------------------------------------------------------------- the model
class Attention(nn.Module):
    """Causal attention; ``packed``: one weight of three blocks (GPT-2). ``group``: processes that hold parts of the sequence."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed, self.chunks, self.group = packed, None, False
        if packed:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        if self.group:
            k, v = (whole_sequence(part) for part in (k, v))
            mask = places_of_rank()[:, None] >= torch.arange(LENGTH)[None, :]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        if packed:
            self.both = nn.Linear(WIDTH, 2 * HIDDEN)
        else:
            self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1) if self.packed else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token goes to the expert that the router likes best; ``parallel``: experts lie on ranks, tokens travel."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.parallel = False

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = torch.softmax(self.router(tokens), -1).max(-1)
        out = self._travel(tokens, chosen) if self.parallel else self._here(tokens, chosen)
        return (out * weight[:, None]).view_as(x)

    def _here(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        sizes = chosen.bincount(minlength=EXPERTS).tolist()
        out = [expert(part) for expert, part in zip(self.experts, tokens[order].split(sizes), strict=True)]
        return torch.cat(out)[order.argsort()]

    def _travel(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        size, rank = dist.get_world_size(), dist.get_rank()
        own = EXPERTS // size
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts)
        sent, got = counts.view(size, own).sum(1).tolist(), there.view(size, own).sum(1).tolist()
        arrived = Travel.apply(tokens[order], got, sent)
        which = torch.arange(own).repeat(size).repeat_interleave(there)
        inner = which.argsort(stable=True)
        parts = arrived[inner].split(which.bincount(minlength=own).tolist())
        out = [self.experts[rank * own + n](part) for n, part in enumerate(parts)]
        return Travel.apply(torch.cat(out)[inner.argsort()], sent, got)[order.argsort()]


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.RMSNorm(WIDTH), Attention(kind == "packed"), nn.RMSNorm(WIDTH)
        self.gated = Experts() if kind == "experts" else Gated(kind == "packed")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.gated(self.after(x))


class Model(nn.Module):
    """Embeddings, layers, and a head that shares the embedding's weight; of a stage of a pipeline some parts are None."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(n): Layer(kind) for n in range(LAYERS)})
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        if self.words is not None:
            x = self.words(x) + self.places(torch.arange(x.shape[1]) if places is None else places)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- communication with gradients
class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, got: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = sent, got
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), got, sent)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Travel.forward(ctx, gradient, *ctx.sizes), None, None


class Copied(torch.autograd.Function):
    """Nothing in the forward, a sum in the backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=Group.held)
        return gradient


class Summed(torch.autograd.Function):
    """A sum in the forward, nothing in the backward."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=Group.held)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Group:
    """The processes that cut the model, or a sequence, together; all of them where nobody says which."""

    held: Any = None

    @classmethod
    def size(cls) -> int:
        return dist.get_world_size(cls.held)

    @classmethod
    def rank(cls) -> int:
        return dist.get_rank(cls.held)

    @classmethod
    def grid(cls) -> tuple[Any, int]:
        """Have neighbours cut the model; return the group of those that stand 2 apart, and this process's place in it."""
        world, mine = dist.get_world_size(), dist.get_rank()
        near = {first: dist.new_group([first, first + 1]) for first in range(0, world, 2)}
        far = {first: dist.new_group([first, first + 2]) for first in range(2)}
        cls.held = near[mine - mine % 2]
        return far[mine % 2], mine // 2


def gathered(x: Tensor, dim: int) -> Tensor:
    out = [torch.empty_like(x) for _ in range(Group.size())]
    dist.all_gather(out, x.contiguous(), group=Group.held)
    return torch.cat(out, dim)


def scattered(x: Tensor, dim: int) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=Group.held)
    return x.chunk(Group.size(), dim)[Group.rank()].contiguous()


class Gathered(torch.autograd.Function):
    """All pieces of a sequence; in the backward the sum of their gradients, cut."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return gathered(x, 1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient, 1)


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return scattered(x, 1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient, 1)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.chunk(Group.size(), 1)[Group.rank()].contiguous()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient, 1)


class Joined(torch.autograd.Function):
    """All pieces of a sequence; in the backward this rank's piece: what follows is the same on all ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return gathered(x, 1)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(Group.size(), 1)[Group.rank()].contiguous()


def places_of_rank() -> Tensor:
    """Of 2n chunks of the sequence rank r holds r and 2n - 1 - r."""
    size, rank = Group.size(), Group.rank()
    chunks = torch.arange(LENGTH).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class Whole(torch.autograd.Function):
    """Keys or values of the whole sequence, in its order."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        pieces = gathered(x, 2).chunk(2 * Group.size(), 2)
        return torch.cat([*pieces[::2], *reversed(pieces[1::2])], 2)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=Group.held)
        return gradient[:, :, places_of_rank()].contiguous()


def whole_sequence(x: Tensor) -> Tensor:
    return Whole.apply(x)


# ---------------------------------------------------------------- tensor parallelism as Megatron has it
class ColumnParallelLinear(nn.Module):
    """Rows of a weight, of ``parts`` packed ones a piece of each."""

    def __init__(self, whole: nn.Linear, parts: int, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.weight, self.bias = (nn.Parameter(self._mine(one.detach(), parts)) for one in (whole.weight, whole.bias))
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 0, parts

    @staticmethod
    def _mine(whole: Tensor, parts: int) -> Tensor:
        return torch.cat([one.chunk(Group.size())[Group.rank()] for one in whole.chunk(parts)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Gathered.apply(x) if self.sequence else Copied.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, whole: nn.Linear, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.weight = nn.Parameter(whole.weight.detach().chunk(Group.size(), 1)[Group.rank()].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim, self.weight.partition_stride = True, 1, 1
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.bias.sequence_parallel = sequence

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return (Scattered.apply(y) if self.sequence else Summed.apply(y)) + self.bias


class Sequence(nn.Module):
    """A model whose norms and residuals hold a piece of the sequence."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        x = Cut.apply(model.words(x) + model.places(torch.arange(x.shape[1])))
        for layer in model.layers.values():
            x = layer(x)
        return model.head(Joined.apply(model.norm(x)))


def by_hand(model: Model, sequence: bool) -> nn.Module:
    for layer in model.layers.values():
        layer.attention.qkv = ColumnParallelLinear(layer.attention.qkv, 3, sequence)
        layer.attention.o = RowParallelLinear(layer.attention.o, sequence)
        layer.gated.both = ColumnParallelLinear(layer.gated.both, 2, sequence)
        layer.gated.down = RowParallelLinear(layer.gated.down, sequence)
    if not sequence:
        return model
    for name, parameter in model.named_parameters():
        parameter.sequence_parallel = (
            "before" in name or "after" in name or name == "norm.weight" or getattr(parameter, "sequence_parallel", False)
        )
    return Sequence(model)


# ---------------------------------------------------------------- a training in one layout
class Run:
    """What a layout makes of a model: ``wrapped`` runs, ``parameters`` are trained."""

    def __init__(self, model: Model) -> None:
        self.model, self.wrapped = model, model
        self.parts, self.rank, self.accumulated = 1, 0, 1
        self.optimizer: Any = None

    def named(self) -> Any:
        """Return the module whose paths name the scopes."""
        return self.model

    def set_up(self) -> None:
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters(), lr=0.01)

    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        for part in words.chunk(self.parts)[self.rank].chunk(self.accumulated):
            loss = loss_of(self.wrapped(part[:, :-1]), part[:, 1:])
            (loss / self.accumulated if self.accumulated > 1 else loss).backward()
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        """Reduce gradients, where that is done by hand."""


class Accumulated(Run):
    def set_up(self) -> None:
        super().set_up()
        self.accumulated = 2


class DataParallel(Run):
    def set_up(self) -> None:
        self.parts, self.rank = dist.get_world_size(), dist.get_rank()
        self.wrapped = DistributedDataParallel(self.model)
        super().set_up()


class DataParallelAccumulated(DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.accumulated = 2


class TensorParallel(Run):
    dims: tuple[tuple[str, int], ...] = (("tp", 2),)

    def set_up(self) -> None:
        mesh = init_device_mesh("cpu", tuple(n for _, n in self.dims), mesh_dim_names=tuple(name for name, _ in self.dims))
        self.shard(mesh)
        super().set_up()

    def shard(self, mesh: Any) -> None:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
        plan |= {"gated.gate": ColwiseParallel(), "gated.up": ColwiseParallel(), "gated.down": RowwiseParallel()}
        for layer in self.model.layers.values():
            parallelize_module(layer, mesh, plan)


class SequenceParallelLayers(TensorParallel):
    """The plan of torchtitan: residuals and norms hold a piece of the sequence, embedding and head a piece of the vocabulary."""

    def shard(self, mesh: Any) -> None:
        model, cut = self.model, Shard(1)
        parallelize_module(model, mesh, {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
            "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        })  # fmt: skip
        model.head.weight = model.words.weight
        given = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(Replicate(),))
        plan: dict[str, Any] = {"before": SequenceParallel(), "after": SequenceParallel(), "attention": given, "gated": given}
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel(output_layouts=cut)}
        plan |= {"gated.gate": ColwiseParallel(), "gated.up": ColwiseParallel()}
        plan |= {"gated.down": RowwiseParallel(output_layouts=cut)}
        for layer in model.layers.values():
            parallelize_module(layer, mesh, plan)


class Sharded(Run):
    """FSDP 2; of 41 words on two ranks the shards are uneven."""

    dims: tuple[tuple[str, int], ...] = ()

    def set_up(self) -> None:
        self.parts, self.rank = dist.get_world_size(), dist.get_rank()
        mesh = (
            init_device_mesh("cpu", tuple(n for _, n in self.dims), mesh_dim_names=tuple(d for d, _ in self.dims))
            if self.dims
            else None
        )
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        self.wrapped = fully_shard(self.model, mesh=mesh)
        super().set_up()


class Hybrid(Sharded):
    dims = (("replicate", 2), ("shard", 2))


class TwoDimensional(TensorParallel):
    dims = (("dp", 2), ("tp", 2))

    def shard(self, mesh: Any) -> None:
        super().shard(mesh["tp"])
        self.parts, self.rank = 2, mesh["dp"].get_local_rank()
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])


class Pipeline(Run):
    """Stages of layers; module names are global, as torchtitan's are."""

    chunks = 1

    def named(self) -> Any:
        return self.modules

    def set_up(self) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        stages = size * self.chunks
        self.modules = [self._stage(number, stages) for number in range(rank, stages, size)]
        held = [
            PipelineStage(module, number, stages, torch.device("cpu"))
            for module, number in zip(self.modules, range(rank, stages, size), strict=True)
        ]
        kind = Schedule1F1B if self.chunks == 1 else ScheduleInterleaved1F1B
        self.schedule = kind(held[0] if self.chunks == 1 else held, 2, loss_of)  # type: ignore[arg-type]
        self.first, self.last, self.embedding, self.tied = rank == 0, rank == size - 1, None, None
        for module in self.modules:
            for part in (module.words, module.head):
                if part is not None:
                    self.embedding = part.weight
        self.optimizer = torch.optim.AdamW([p for module in self.modules for p in module.parameters()], lr=0.01)

    def _stage(self, number: int, stages: int) -> Model:
        import copy

        module = copy.deepcopy(self.model)
        for mine, its in zip(module.parameters(), self.model.parameters(), strict=True):
            mine.__dict__.update(its.__dict__)  # attributes of Megatron, which a copy loses
        each = LAYERS // stages
        for name in list(module.layers):
            if int(name) // each != number:
                del module.layers[name]
        if number != 0:
            module.words, module.places = None, None
        if number != stages - 1:
            module.norm, module.head = None, None
        return module

    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        given = [words[:, :-1]] if self.first else []
        if self.last:
            self.schedule.step(*given, target=words[:, 1:].contiguous())
        else:
            self.schedule.step(*given)
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        if self.embedding is not None:
            dist.all_reduce(self.embedding.grad, group=self.tied)


class Interleaved(Pipeline):
    chunks = 2


class LocalNames(Pipeline):
    """Names of layers begin anew in each stage, as Megatron's do, and each layer knows its number."""

    def _stage(self, number: int, stages: int) -> Model:
        module = super()._stage(number, stages)
        held = list(module.layers.items())
        module.layers = nn.ModuleDict({str(n): layer for n, (_, layer) in enumerate(held)})
        for name, layer in held:
            layer.layer_number = int(name) + 1
        return module


class ContextParallel(Run):
    def set_up(self) -> None:
        for layer in self.model.layers.values():
            layer.attention.group = True
        super().set_up()

    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        places = places_of_rank()
        loss_of(self.model(words[:, :-1][:, places], places), words[:, 1:][:, places]).backward()
        self.reduce()
        self.optimizer.step()

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class ExpertParallel(Run):
    def set_up(self) -> None:
        self.parts, self.rank = dist.get_world_size(), dist.get_rank()
        own = EXPERTS // dist.get_world_size()
        for layer in self.model.layers.values():
            layer.gated.parallel = True
            for n in range(EXPERTS):
                if n // own != self.rank:
                    layer.gated.experts[n] = None
        super().set_up()

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
            elif parameter.grad is None:
                continue
            parameter.grad /= dist.get_world_size()


class ByHand(Run):
    sequence = False

    def set_up(self) -> None:
        self.wrapped = by_hand(self.model, self.sequence)
        super().set_up()


class SequenceByHand(ByHand):
    sequence = True

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)


class DataAndTensor(Run):
    """Megatron's grid: neighbours cut the model, those that stand 2 apart the data."""

    sequence = False

    def set_up(self) -> None:
        self.across, self.rank = Group.grid()
        self.parts = 2
        self.wrapped = by_hand(self.model, self.sequence)
        super().set_up()

    def reduce(self) -> None:
        for parameter in self.model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=Group.held)
            dist.all_reduce(parameter.grad, group=self.across)
            parameter.grad /= 2


class DataAndSequence(DataAndTensor):
    sequence = True


class DataAndContext(ContextParallel):
    def set_up(self) -> None:
        _, self.data = Group.grid()
        super().set_up()

    def step(self, words: Tensor) -> None:
        super().step(words.chunk(2)[self.data])


class AcrossStages(Pipeline):
    """Stages of processes that stand 2 apart; neighbours cut the model (Megatron)."""

    def set_up(self) -> None:
        self.across, place = Group.grid()
        by_hand(self.model, False)
        self._take(place, self.across)

    def _take(self, place: int, group: Any) -> None:
        module = self._stage(place, 2)
        self.modules, self.first, self.last = [module], place == 0, place == 1
        self.schedule = Schedule1F1B(PipelineStage(module, place, 2, torch.device("cpu"), group=group), 2, loss_of)
        self.embedding, self.tied = (module.words if self.first else module.head).weight, group
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)


class DataAndStages(AcrossStages):
    """Stages of neighbours; those that stand 2 apart have other data."""

    def set_up(self) -> None:
        self.across, self.rank = Group.grid()
        near, Group.held = Group.held, None
        self.parts = 2
        self._take(dist.get_rank(near), near)

    def step(self, words: Tensor) -> None:
        super().step(words.chunk(2)[self.rank])

    def reduce(self) -> None:
        super().reduce()
        for parameter in self.modules[0].parameters():
            dist.all_reduce(parameter.grad, group=self.across)
            parameter.grad /= 2


class Zero1(DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.optimizer = ZeroRedundancyOptimizer(self.wrapped.parameters(), torch.optim.AdamW, lr=0.01)


class Zero2(Run):
    """A flat buffer of all weights, cut among the ranks; gradients are reduced to whose piece they are (DeepSpeed)."""

    def set_up(self) -> None:
        size = dist.get_world_size()
        self.parts, self.rank = size, dist.get_rank()
        self.held = list(self.model.parameters())
        flat = torch.cat([p.detach().flatten() for p in self.held])
        flat = F.pad(flat, (0, -len(flat) % (2 * size)))
        self.piece = nn.Parameter(flat.chunk(size)[self.rank].clone())
        self.optimizer = torch.optim.AdamW([self.piece], lr=0.01)

    def step(self, words: Tensor) -> None:
        for parameter in self.held:
            parameter.grad = None
        super().step(words)
        pieces = [torch.empty_like(self.piece) for _ in range(self.parts)]
        dist.all_gather(pieces, self.piece.detach())
        whole, at = torch.cat(pieces), 0
        with torch.no_grad():
            for parameter in self.held:
                parameter.copy_(whole[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()

    def reduce(self) -> None:
        flat = torch.cat([p.grad.flatten() for p in self.held])
        flat = F.pad(flat, (0, len(self.piece) * self.parts - len(flat)))
        self.piece.grad = torch.empty_like(self.piece)
        dist.reduce_scatter_tensor(self.piece.grad, flat)
        self.piece.grad /= self.parts


class Zero3(Zero2):
    """Each weight flat and cut by itself; gathered before its module runs, let go of after (DeepSpeed's ds_tensor)."""

    def set_up(self) -> None:
        size = dist.get_world_size()
        self.parts, self.rank = size, dist.get_rank()
        self.held = list(self.model.parameters())
        self.pieces = []
        for parameter in self.held:
            parameter.ds_shape, parameter.ds_numel = tuple(parameter.shape), parameter.numel()
            flat = F.pad(parameter.detach().flatten(), (0, -parameter.numel() % size))
            parameter.ds_tensor = nn.Parameter(flat.chunk(size)[self.rank].clone())
            self.pieces.append(parameter.ds_tensor)
        for module in self.model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._gather)
        self.optimizer = torch.optim.AdamW(self.pieces, lr=0.01)

    def _gather(self, module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                whole = gathered(parameter.ds_tensor.detach(), 0)[: parameter.ds_numel]
                parameter.data = whole.view(parameter.ds_shape).clone()

    def step(self, words: Tensor) -> None:
        for parameter in self.held:
            parameter.grad = None
        Run.step(self, words)
        for parameter in self.held:  # freed, as between the steps of DeepSpeed
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    def reduce(self) -> None:
        for parameter, piece in zip(self.held, self.pieces, strict=True):
            flat = F.pad(parameter.grad.flatten(), (0, -parameter.numel() % self.parts))
            piece.grad = torch.empty_like(piece)
            dist.reduce_scatter_tensor(piece.grad, flat)
            piece.grad /= self.parts


@dataclass(frozen=True)
class Layout:
    kind: str
    world: int
    run: Callable[[Model], Run]


LAYOUTS: dict[str, Layout] = {
    "one": Layout("dense", 1, Run), "accumulated": Layout("dense", 1, Accumulated), "ddp": Layout("dense", 2, DataParallel),
    "ddp-accumulated": Layout("dense", 2, DataParallelAccumulated), "tp": Layout("dense", 2, TensorParallel),
    "sp": Layout("dense", 2, SequenceParallelLayers), "fsdp": Layout("dense", 2, Sharded),
    "pp": Layout("dense", 2, Pipeline), "pp-interleaved": Layout("dense", 2, Interleaved),
    "pp-local": Layout("dense", 2, LocalNames),
    "cp": Layout("dense", 2, ContextParallel), "zero1": Layout("dense", 2, Zero1), "zero2": Layout("dense", 2, Zero2),
    "zero3": Layout("dense", 2, Zero3), "fsdp-4": Layout("dense", 4, Sharded), "hsdp": Layout("dense", 4, Hybrid),
    "dp-tp": Layout("dense", 4, TwoDimensional),
    "packed": Layout("packed", 1, Run), "packed-tp": Layout("packed", 2, ByHand), "packed-sp": Layout("packed", 2, SequenceByHand),
    "packed-ddp": Layout("packed", 2, DataParallel), "packed-dp-tp": Layout("packed", 4, DataAndTensor),
    "packed-dp-sp": Layout("packed", 4, DataAndSequence), "packed-tp-pp": Layout("packed", 4, AcrossStages),
    "dp-cp": Layout("dense", 4, DataAndContext), "dp-pp": Layout("dense", 4, DataAndStages),
    "moe": Layout("experts", 1, Run), "moe-ddp": Layout("experts", 2, DataParallel), "moe-ep": Layout("experts", 2, ExpertParallel),
    "moe-fsdp": Layout("experts", 2, Sharded), "moe-pp": Layout("experts", 2, Pipeline),
}  # fmt: skip


def train(out: Path, layout: Layout, detail: str = "tensor") -> None:
    """Train for two steps under capture; ``layout``: one of `LAYOUTS`."""
    torch.manual_seed(3)
    run, Group.held = layout.run(Model(layout.kind)), None
    batches = torch.randint(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(11))
    run.set_up()
    with trueup.capture(out, model=run.named(), level=("module", "api"), detail=detail) as running:
        for step in range(STEPS):
            run.step(batches[step])
            running.step()


def _work(rank: int, world: int, port: int, out: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
        dist.init_process_group("gloo")
    for name in names:
        train(Path(out, name), LAYOUTS[name])
        if world > 1:
            dist.barrier()
    if world > 1:
        dist.destroy_process_group()


def record(out: Path, names: list[str]) -> None:
    """Train in layouts, those of as many processes together."""
    for world in (1, 2, 4):
        some = [name for name in names if LAYOUTS[name].world == world]
        if some:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            mp.spawn(_work, (world, port, str(out), some), nprocs=world)


def pairs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield every pair of one family, both ways round."""
    for first, second in itertools.permutations(names, 2):
        if LAYOUTS[first].kind == LAYOUTS[second].kind:
            yield first, second


def compare(out: Path, names: list[str], only: str = "") -> None:
    """Compare every pair; print a line each, and the counts."""
    counts: Counter[str] = Counter()
    for first, second in pairs(names):
        if only and only not in (first, second):
            continue
        start = time.perf_counter()
        try:
            result = trueup.compare(out / first, out / second)
            verdict, said = result.verdict, result.sentence.split("\n")[0]
        except Exception as error:  # noqa: BLE001 - a traceback of one pair is a finding, and the others go on
            verdict, said = "error", f"{type(error).__name__}: {error}"
        counts[verdict] += 1
        print(f"{first:16} {second:16} {time.perf_counter() - start:5.1f} s  {said[:230]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    _, action, folder, *given = sys.argv
    chosen = [name for name in given if not name.startswith("--")] or list(LAYOUTS)
    only = next((name[7:] for name in given if name.startswith("--only=")), "")
    record(Path(folder), chosen) if action == "record" else compare(Path(folder), chosen, only)
