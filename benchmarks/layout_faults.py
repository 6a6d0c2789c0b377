"""Public bugs of distributed training, rebuilt in the small GPT of `parallel_layouts.py`: of each the cause has to be named.

    python benchmarks/layout_faults.py record OUT [NAME...]     the healthy runs of one process, then each fault on 2 gloo processes
    python benchmarks/layout_faults.py compare OUT [NAME...]    each against one process, and by itself (`trueup check --replicas`)

A fault is named if the run deviates and its first lines say one of `says`; `alone`: it must show without a baseline.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parallel_layouts as healthy
import trueup
from parallel_layouts import Layout, Model, loss_of


def last_of(model: Model) -> Any:
    """Return the layer that is changed."""
    return list(model.layers.values())[-1]


# ---------------------------------------------------------------- data parallel
class DividedTwice(healthy.DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.wrapped.register_comm_hook(None, _divided_twice)


def _divided_twice(_, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks annotations
    size = dist.get_world_size()
    return dist.all_reduce(bucket.buffer() / size**2, async_op=True).get_future().then(lambda done: done.value()[0])


class Summed(healthy.DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.wrapped.register_comm_hook(None, _summed)


def _summed(_, bucket):  # type: ignore[no-untyped-def]
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class TiedIgnored(healthy.DataParallel):
    def set_up(self) -> None:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["words.weight", "head.weight"])
        super().set_up()


class NotWrapped(healthy.DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.wrapped = self.model


class Drifted(healthy.DataParallel):
    steps = 0

    def step(self, words: Tensor) -> None:
        if self.steps == 1 and self.rank == 1:
            with torch.no_grad():
                last_of(self.model).gated.down.weight.mul_(1.01)
        self.steps += 1
        super().step(words)


class SameMasks(healthy.DataParallel):
    def set_up(self) -> None:
        last = last_of(self.model)
        last.gated = nn.Sequential(last.gated, nn.Dropout(0.3))
        super().set_up()
        torch.manual_seed(5)


class OtherScales(healthy.DataParallel):
    def reduce(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad *= 1.0 if self.rank == 0 else 0.5


class SameData(healthy.DataParallel):
    def set_up(self) -> None:
        super().set_up()
        self.rank = 0


class Undivided(healthy.DataParallelAccumulated):
    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        for part in words.chunk(self.parts)[self.rank].chunk(self.accumulated):
            loss_of(self.wrapped(part[:, :-1]), part[:, 1:]).backward()
        self.optimizer.step()


class LastOnly(healthy.DataParallelAccumulated):
    def step(self, words: Tensor) -> None:
        for part in words.chunk(self.parts)[self.rank].chunk(self.accumulated):
            self.optimizer.zero_grad()
            (loss_of(self.wrapped(part[:, :-1]), part[:, 1:]) / self.accumulated).backward()
        self.optimizer.step()


class LossDivided(healthy.Sharded):
    """The loss is divided by the number of ranks, and FSDP takes the mean besides."""

    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        part = words.chunk(self.parts)[self.rank]
        (loss_of(self.wrapped(part[:, :-1]), part[:, 1:]) / self.parts).backward()
        self.optimizer.step()


# ---------------------------------------------------------------- tensor and sequence parallel
class OneLinear(healthy.ByHand):
    """Of the last layer one linear layer is changed."""

    def set_up(self) -> None:
        super().set_up()
        self.change(last_of(self.model))

    def change(self, layer: Any) -> None:
        raise NotImplementedError


class RowNotReduced(OneLinear):
    def change(self, layer: Any) -> None:
        layer.gated.down.forward = lambda x: F.linear(x, layer.gated.down.weight) + layer.gated.down.bias


class ColumnNotReduced(OneLinear):
    def change(self, layer: Any) -> None:
        layer.gated.both.forward = lambda x: F.linear(x, layer.gated.both.weight, layer.gated.both.bias)


class BiasEachRank(OneLinear):
    def change(self, layer: Any) -> None:
        layer.gated.down.forward = lambda x: healthy.Summed.apply(F.linear(x, layer.gated.down.weight, layer.gated.down.bias))


class SummedAgain(OneLinear):
    def change(self, layer: Any) -> None:
        row = layer.gated.down
        row.forward = lambda x: healthy.Summed.apply(healthy.Summed.apply(F.linear(x, row.weight))) + row.bias


class SummedNarrowly(healthy.DataParallel):
    """Gradients travel in bfloat16, as `bf16_compress_hook` has them, which gloo does not take."""

    def set_up(self) -> None:
        super().set_up()
        self.wrapped.register_comm_hook(None, _compressed)


def _compressed(_, bucket):  # type: ignore[no-untyped-def]
    given = (bucket.buffer() / dist.get_world_size()).bfloat16()
    return dist.all_reduce(given, async_op=True).get_future().then(lambda done: done.value()[0].float())


class SameShard(OneLinear):
    def change(self, layer: Any) -> None:
        with torch.no_grad():
            dist.broadcast(layer.gated.down.weight, 0)


class OneBlock(OneLinear):
    """A packed weight is cut as if it were one: each rank holds half of the rows, and takes the first half for its gates."""

    def change(self, layer: Any) -> None:
        with torch.no_grad():
            whole = torch.cat([part for piece in healthy.gathered(layer.gated.both.weight, 0).chunk(2) for part in piece.chunk(2)])
            gates, ups = whole.chunk(4)[::2], whole.chunk(4)[1::2]
            layer.gated.both.weight.copy_(torch.cat((gates, ups)[dist.get_rank()]))
            whole = torch.cat([part for piece in healthy.gathered(layer.gated.both.bias, 0).chunk(2) for part in piece.chunk(2)])
            layer.gated.both.bias.copy_(torch.cat((whole.chunk(4)[::2], whole.chunk(4)[1::2])[dist.get_rank()]))


class LossTimesRanks(healthy.ByHand):
    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        (loss_of(self.wrapped(words[:, :-1]), words[:, 1:]) * dist.get_world_size()).backward()
        self.optimizer.step()


class NormNotReduced(healthy.SequenceByHand):
    forgotten = "norm.weight"

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if getattr(parameter, "sequence_parallel", False) and not name.endswith(self.forgotten):
                dist.all_reduce(parameter.grad)


class BiasNotReduced(NormNotReduced):
    forgotten = "down.bias"


class GatherNotSummed(healthy.SequenceByHand):
    @contextmanager
    def forgetting(self) -> Iterator[None]:
        right = healthy.Gathered.backward
        healthy.Gathered.backward = staticmethod(  # type: ignore[method-assign]
            lambda _, gradient: gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        )
        try:
            yield
        finally:
            healthy.Gathered.backward = right  # type: ignore[method-assign]

    def step(self, words: Tensor) -> None:
        with self.forgetting():
            super().step(words)


# ---------------------------------------------------------------- context parallel
class ContextSummed(healthy.ContextParallel):
    def reduce(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


class OwnPlaces(healthy.ContextParallel):
    def step(self, words: Tensor) -> None:
        self.optimizer.zero_grad()
        places = healthy.places_of_rank()
        loss_of(self.model(words[:, :-1][:, places], torch.arange(len(places))), words[:, 1:][:, places]).backward()
        self.reduce()
        self.optimizer.step()


class KeysNotSummed(healthy.ContextParallel):
    def step(self, words: Tensor) -> None:
        right = healthy.Whole.backward
        healthy.Whole.backward = staticmethod(  # type: ignore[method-assign]
            lambda _, gradient: gradient[:, :, healthy.places_of_rank()].contiguous()
        )
        try:
            super().step(words)
        finally:
            healthy.Whole.backward = right  # type: ignore[method-assign]


# ---------------------------------------------------------------- pipelines
class TiedNotReduced(healthy.Pipeline):
    def step(self, words: Tensor) -> None:
        self.embedding = None
        super().step(words)


class OtherLayers(healthy.Pipeline):
    def _stage(self, number: int, stages: int) -> Model:
        module = super()._stage(number, stages)
        for layer, source in zip(module.layers.values(), self.model.layers.values(), strict=False):
            if number:
                layer.load_state_dict(source.state_dict())
        return module


class MicroBatchesAdded(healthy.Pipeline):
    def set_up(self) -> None:
        super().set_up()
        self.schedule = Schedule1F1B(self.schedule._stage, 2, loss_of, scale_grads=False)


# ---------------------------------------------------------------- experts
class ExpertsUndivided(healthy.ExpertParallel):
    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


class RouterNotReduced(healthy.ExpertParallel):
    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "experts" not in name and "router" not in name:
                dist.all_reduce(parameter.grad)
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()


# ---------------------------------------------------------------- ZeRO
class NotBroadcast(healthy.Zero1):
    def set_up(self) -> None:
        super().set_up()
        self.optimizer._sync_params = lambda: None


class Zero2Summed(healthy.Zero2):
    def reduce(self) -> None:
        super().reduce()
        self.piece.grad *= self.parts


class Zero2LastOnly(healthy.Zero2):
    def step(self, words: Tensor) -> None:
        self.accumulated = 2
        super().step(words)

    def reduce(self) -> None:
        for parameter in self.held:
            parameter.grad /= 2
        super().reduce()


class Zero2LastAlone(healthy.Zero2):
    def set_up(self) -> None:
        super().set_up()
        self.accumulated, self.wrapped = 2, self._cleared  # type: ignore[assignment]

    def _cleared(self, words: Tensor) -> Tensor:
        for parameter in self.held:
            parameter.grad = None
        return self.model(words)  # type: ignore[no-any-return]


class Zero3Stale(healthy.Zero3):
    """One weight is gathered before the optimizer's step is done, and used in the next."""

    def _gather(self, module: nn.Module, given: Any) -> None:
        kept = getattr(self, "_kept", None)
        super()._gather(module, given)
        if module is last_of(self.model).gated.down:
            if kept is not None:
                module.weight.data = kept
            self._kept = module.weight.data.clone()


@dataclass(frozen=True)
class Fault:
    run: Callable[[Model], healthy.Run]
    kind: str
    source: str
    says: tuple[str, ...]
    alone: bool = False


NOT_REDUCED, TWICE, HALF, MUST = "not reduced", "off by exactly 2.000", "off by exactly 0.500", "must be the same on all ranks"
MEGATRON = "NVIDIA/Megatron-LM"

FAULTS: dict[str, Fault] = {
    "divided-twice": Fault(DividedTwice, "dense", "deepspeedai/Megatron-DeepSpeed#42", (HALF,)),
    "summed": Fault(Summed, "dense", "NVlabs/stylegan3#184", (TWICE,)),
    "tied-ignored": Fault(TiedIgnored, "dense", "NVIDIA/Megatron-LM#656", ("the gradient of words.weight differs",), True),
    "not-wrapped": Fault(NotWrapped, "dense", "TrainCheck: x-jxmnop-ddp-out-of-sync", (NOT_REDUCED,), True),
    "drifted": Fault(Drifted, "dense", "pytorch/pytorch#160169", (MUST,), True),
    "same-masks": Fault(SameMasks, "dense", "NVlabs/stylegan2-ada-pytorch#127", ("drew the same mask",), True),
    "other-scales": Fault(OtherScales, "dense", "pytorch/pytorch#136009", ("when the optimizer runs",), True),
    "same-data": Fault(SameData, "dense", "NVlabs/LongLive#71", ("given the same data", "given some samples several times"), True),
    "undivided": Fault(Undivided, "dense", "huggingface/transformers#37766", (TWICE,)),
    "last-only": Fault(LastOnly, "dense", "allenai/open-instruct#1498", ("micro-batch",)),
    "loss-divided": Fault(LossDivided, "dense", "pytorch/pytorch#98501", (HALF,)),
    "row-not-reduced": Fault(RowNotReduced, "packed", f"{MEGATRON}#7452", ("neither a piece of the whole nor a term",)),
    "column-not-reduced": Fault(ColumnNotReduced, "packed", "NovaSky-AI/SkyRL#1886", ("a reduction is missing in the backward",)),
    "bias-each-rank": Fault(BiasEachRank, "packed", "a row-parallel bias, each rank's", ("the bias of layers.3.gated.down",)),
    "summed-again": Fault(SummedAgain, "packed", "a row-parallel sum made twice", ("2 times in a step",)),
    "summed-narrowly": Fault(SummedNarrowly, "dense", "torch: bf16_compress_hook", ("travel in bfloat16",)),
    "same-shard": Fault(SameShard, "packed", "pytorch/pytorch#102280", ("and a piece is held twice",)),
    "one-block": Fault(OneBlock, "packed", "a packed weight cut in one block", ("differ (layers.3.gated.both.weight",)),
    "loss-times-ranks": Fault(LossTimesRanks, "packed", f"{MEGATRON}#906", (TWICE,)),
    "norm-not-reduced": Fault(NormNotReduced, "packed", f"{MEGATRON}#1446", ("the gradient of norm.weight differs",), True),
    "bias-not-reduced": Fault(BiasNotReduced, "packed", "bigcode-project/Megatron-LM#11", ("down.bias",), True),
    "gather-not-summed": Fault(GatherNotSummed, "packed", f"{MEGATRON}#7452", ("a reduction is missing in the backward",)),
    "context-summed": Fault(ContextSummed, "dense", f"{MEGATRON}#673", (TWICE,)),
    "own-places": Fault(OwnPlaces, "dense", f"{MEGATRON}#560", ("counts from 0 on",)),
    "keys-not-summed": Fault(KeysNotSummed, "dense", f"{MEGATRON}#1464", ("a reduction is missing in the backward",)),
    "tied-not-reduced": Fault(TiedNotReduced, "dense", "uw-syfi/piper#13", ("the gradient of words.weight differs",)),
    "other-layers": Fault(OtherLayers, "dense", "huggingface/transformers#24381", ("layers.2",)),
    "micro-batches-added": Fault(MicroBatchesAdded, "dense", "huggingface/transformers#34191", (TWICE,)),
    "experts-undivided": Fault(ExpertsUndivided, "experts", f"{MEGATRON}#7452", (TWICE,)),
    "router-not-reduced": Fault(RouterNotReduced, "experts", f"{MEGATRON}#7452", ("router.weight",), True),
    "not-broadcast": Fault(NotBroadcast, "dense", f"{MEGATRON}#656", (MUST,), True),
    "zero2-summed": Fault(Zero2Summed, "dense", "deepspeedai/DeepSpeed#1488", (TWICE,)),
    "zero2-halved": Fault(Zero2LastOnly, "dense", "huggingface/accelerate#3877", (HALF,)),
    "zero2-last-only": Fault(Zero2LastAlone, "dense", "allenai/open-instruct#1498", ("micro-batch 2 of 2 alone",)),
    "zero3-stale": Fault(Zero3Stale, "dense", f"{MEGATRON}#656", ("layers.3.gated.down, forward, step 1",)),
}  # fmt: skip

healthy.LAYOUTS |= {name: Layout(fault.kind, 2, fault.run) for name, fault in FAULTS.items()}  # in spawned processes, too
ALL = healthy.LAYOUTS

BASELINES = {"dense": "one", "packed": "packed", "experts": "moe"}


def record(out: Path, names: list[str]) -> None:
    """Train healthy in one process, and with each fault in two."""
    healthy.record(out, [name for name in BASELINES.values() if not (out / name).exists()] + names)


def judge(out: Path, name: str) -> tuple[bool, bool, str, str]:
    """Return whether a fault is named, and whether it shows without a baseline, with what was said of either."""
    fault = FAULTS[name]
    result = trueup.compare(out / BASELINES[fault.kind], out / name)
    head = "\n".join(result.sentence.split("\n")[:4])
    named = result.verdict == "deviates" and any(one in head for one in fault.says)
    ranks = trueup.check(out / name, replicas=True).ranks
    return named, ranks is not None and ranks.verdict == "deviates", head, "" if ranks is None else ranks.sentence


def compare(out: Path, names: list[str]) -> None:
    """Judge each fault; print what was said, and the counts."""
    counts = [0, 0, 0]
    for name in names:
        start = time.perf_counter()
        named, alone, said, by_itself = judge(out, name)
        counts = [counts[0] + named, counts[1] + alone, counts[2] + FAULTS[name].alone]
        print(f"{'named' if named else 'MISSED'} {name} ({FAULTS[name].source}) {time.perf_counter() - start:.1f} s\n    {said}")
        print(f"    alone{' (expected)' if FAULTS[name].alone else ''}: {by_itself[:300]}", flush=True)
    print(f"{counts[0]} of {len(names)} named; {counts[1]} show without a baseline, {counts[2]} have to")


if __name__ == "__main__":
    _, action, folder, *given = sys.argv
    (record if action == "record" else compare)(Path(folder), given or list(FAULTS))
