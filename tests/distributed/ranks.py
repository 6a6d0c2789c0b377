"""What the ranks of the tests do: `work`, under RANK, WORLD_SIZE, MASTER_*."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import trueup
from zoo import recipes, text
from zoo.training import Batch

STEPS = 2
LEVELS = ("module", "api", "aten")


# ---------------------------------------------------------------- every operator
def operators(out: Path) -> Any:
    """Execute each collective once, on numbers from which the result is known."""
    rank = dist.get_rank()
    other = 1 - rank
    pair = dist.new_group([0, 1], group_desc="pair")
    for levels in (("module", "api", "aten"), ("api",)):
        x = torch.arange(4.0) + rank
        with trueup.capture(out / "+".join(levels), level=levels):
            dist.all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=pair, async_op=True).wait()
            dist.all_gather([torch.empty(4), torch.empty(4)], x)
            dist.all_gather_into_tensor(torch.empty(8), x)
            dist.reduce_scatter_tensor(torch.empty(2), x)
            dist.broadcast(x, 1)
            dist.reduce(x, 0)
            dist.gather(x, [torch.empty(4), torch.empty(4)] if rank == 0 else None, 0)
            dist.scatter(x, [torch.ones(4), torch.full((4,), 2.0)] if rank == 0 else None, 0)
            dist.all_to_all_single(torch.empty(4), x)
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
            operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(4), other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            with dist._coalescing_manager(async_ops=True) as coalesced:
                dist.all_reduce(x)
                dist.all_reduce(torch.ones(2))
            coalesced.wait()
            dist.barrier()
            dist.all_gather_object([None, None], {"pid": os.getpid()})
            (funcol.all_reduce(x, "sum", dist.group.WORLD) + 1).sum()
            with torch.inference_mode():
                dist.all_reduce(torch.ones(3))
    return None


def overlap(out: Path) -> Any:
    """Let rank 0 compute while a collective is under way, which rank 1 joins late."""
    rank = dist.get_rank()
    found = {}
    for levels in (("api",), ("aten",), ("module",)):
        x, y = torch.full((1000,), 1.0 + rank), torch.full((1000,), 10.0 + rank)
        dist.barrier()
        with trueup.capture(out / levels[0], level=levels):
            if rank:
                time.sleep(0.5)
            work = dist.all_reduce(x, async_op=True)
            early = work.is_completed()
            product = torch.ones(3) * 2
            work.wait()
            total = x.sum() + product.sum()
            z = funcol.all_reduce(y, "sum", dist.group.WORLD)  # nobody waits but the addition that reads it
            after = z + 1
            future = dist.all_reduce(x, async_op=True).get_future()
            future.wait()
            x.mul_(2)
        found[levels[0]] = {"early": early, "total": total.item(), "after": after[0].item()}
    return found


# ---------------------------------------------------------------- training
def _gpt2() -> tuple[nn.Module, list[Batch], Callable[[nn.Module, Batch], Tensor]]:
    """Build GPT-2 with dropout and this rank's sentences."""
    training = recipes.build("gpt2")
    torch.manual_seed(7 + dist.get_rank())
    return training.model, list(training.batches[dist.get_rank() :: 2]), training.loss


def _ddp(model: nn.Module, how: str) -> nn.Module:
    return DistributedDataParallel(
        model, gradient_as_bucket_view=how == "view", static_graph=how == "static", bucket_cap_mb=1 if how == "view" else 25
    )


def _fsdp(model: nn.Module, _: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for block in model.transformer.h:  # type: ignore[union-attr, operator]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(out: Path | None, levels: tuple[str, ...], wrap: Callable[[nn.Module, str], nn.Module], how: str, **options: Any) -> Any:
    """Train with gradient accumulation; return digests of all that must be the same with and without a capture."""
    model, batches, loss_of = _gpt2()
    wrapped = wrap(model, how)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    record: list[Any] = []
    with nullcontext() if out is None else trueup.capture(out, level=levels, **options):
        for step in range(STEPS):
            optimizer.zero_grad()
            if how == "plain":
                with wrapped.no_sync():
                    loss_of(wrapped, batches[step]).backward()
            loss = loss_of(wrapped, batches[step - 1])
            loss.backward()
            optimizer.step()
            record.append([loss.item(), {name: _digest(_local(p.grad)) for name, p in model.named_parameters()}])
    parameters = {name: _digest(_local(p)) for name, p in model.named_parameters()}
    gradients = {name: _local(p.grad).norm().item() for name, p in model.named_parameters()}  # of the last step
    return {"steps": record, "parameters": parameters, "rng": _digest(torch.get_rng_state()), "norms": gradients}


def _train_flat() -> dict[str, float]:
    """Train under FSDP 1, whose parameters are views of flat ones; return the norm of all gradients and of what came of them."""
    model, batches, loss_of = _gpt2()
    policy = ModuleWrapPolicy({type(model.transformer.h[0])})  # type: ignore[union-attr, index]
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    norm = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, batches[step]).backward()
        norm = float(wrapped.clip_grad_norm_(1e9))
        optimizer.step()
    return {"all": norm, "weights": sum(float(p.detach().double().square().sum()) for p in wrapped.parameters())}


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def _observed(out: Path, wrap: Callable[[nn.Module, str], nn.Module], hows: dict[str, tuple[str, ...]]) -> Any:
    found: dict[str, Any] = {}
    for how, levels in hows.items():
        found[f"{how} off"] = _train(None, (), wrap, how)
        for level in levels:
            detail = "tensor" if level == "api" else "stats"
            found[f"{how} {level}"] = _train(out / f"{how}-{level}", (level,), wrap, how, detail=detail)
    return found


def ddp(out: Path) -> Any:
    return _observed(out, _ddp, {"plain": LEVELS, "view": ("api", "aten"), "static": ("aten",)})


def fsdp(out: Path) -> Any:
    return _observed(out, _fsdp, {"sharded": LEVELS})


def unlike(out: Path) -> Any:
    """Train under DDP, with another seed, learning rate, environment and version of NumPy on rank 1."""
    rank = dist.get_rank()
    version = np.__version__
    torch.manual_seed(rank)
    os.environ["NCCL_ALGO"], np.__version__ = ("Ring", "Tree")[rank], (version, "1.0.0")[rank]
    try:
        with trueup.capture(out / "run", level=["module"]):
            model = DistributedDataParallel(nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=(0.1, 0.2)[rank])
            model(torch.ones(3, 4) + rank).square().mean().backward()
            optimizer.step()
    finally:
        del os.environ["NCCL_ALGO"]
        np.__version__ = version
    return None


RULES = {
    "functions": '[[rule]]\nop = "torch.nn.functional.layer_norm"\ndtype = "float64"\n',
    "modules": '[[rule]]\nlevel = "module"\nscope = "transformer.h.?"\ndtype = "float64"\n',
    "backward": '[[rule]]\nlevel = "module"\nop = "LayerNorm"\ndtype = "float64"\nphase = "backward"\n',
    "root": '[[rule]]\nlevel = "module"\nop = "GPT2Model"\ndtype = "float64"\n',
}


def policies(out: Path) -> Any:
    """Train under policies, sharded and not; say what each changed, or why it could not."""
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        path = out / f"{name}.toml"
        if dist.get_rank() == 0:
            path.write_text(rule)
        dist.barrier()
        for wrap in (_ddp, _fsdp):
            try:
                with trueup.apply_policy(None, path) as handle:
                    told = _train(None, (), wrap, "view")
                    found[f"{name} {wrap.__name__}"] = [handle.uses()[0].changed, told["norms"]]
            except trueup.TrueupError as error:
                found[f"{name} {wrap.__name__}"] = str(error)
        if name != "root":  # it holds modules that are sharded by themselves, as under FSDP 2
            with trueup.apply_policy(None, path) as handle:
                norms = _train_flat()
                found[f"{name} _fsdp1"] = [handle.uses()[0].changed, norms]
    found["none _fsdp1"] = [0, _train_flat()]
    for wrap in (_ddp, _fsdp):
        found[f"none {wrap.__name__}"] = [0, _train(None, (), wrap, "view")["norms"]]
    return found


def tensor_parallel(out: Path) -> Any:
    """Train a feed-forward block whose weights are split over the ranks."""
    found = {}
    for levels in ((), ("api",), ("aten",)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(len(text.vocabulary()), 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = text.padded([text.ids(one) for one in text.batches(1, 4)[0]], text.PAD)
        losses = []
        with trueup.capture(out / levels[0], level=levels) if levels else nullcontext():
            for _ in range(STEPS):
                loss = model(tokens).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        found["".join(levels) or "off"] = [losses, [_digest(_local(p)) for p in model.parameters()]]
    return found


def pipeline(out: Path) -> Any:
    """Train two stages, one per rank, that send activations forth and gradients back."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with trueup.capture(out / "capture", level=("api", "aten")):
        for _ in range(STEPS):
            optimizer.zero_grad()
            if rank == 0:
                hidden = stage(torch.randn(3, 8))
                dist.send(hidden.detach(), 1)
                gradient = torch.empty(3, 8)
                dist.irecv(gradient, 1).wait()
                hidden.backward(gradient)
            else:
                received = torch.empty(3, 8)
                dist.recv(received, 0)
                received.requires_grad_()
                stage(received).square().mean().backward()
                dist.isend(received.grad, 0).wait()
            optimizer.step()
    return None


# ---------------------------------------------------------------- faults
def faults(out: Path) -> Any:
    """Train the same model with a healthy all-reduce, a broken one, and a rank that scales what it contributes."""
    for name in ("healthy", "again", "broken", "scaled"):
        model, batches, loss_of = _gpt2()
        model.eval()  # no dropout: one run is compared with the other
        wrapped = _ddp(model, "view")
        wrapped.register_comm_hook(1.9 if name == "scaled" and dist.get_rank() == 1 else 2.0, _mean)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        library = _break_all_reduce() if name == "broken" else None
        with trueup.capture(out / name, level=("api", "aten")):
            optimizer.zero_grad()
            loss_of(wrapped, batches[0]).backward()
            optimizer.step()
        if library is not None:
            library._destroy()
    return None


STARTS = ("plain", "again", "other-seed", "one-weight", "one-buffer", "rank-1")
HOWS = ("ddp", "before", "by-hand")
"""How rank 0's weights and buffers are handed out: DDP is made under capture, or before (then it hands out buffers alone, before
each forward), or the script broadcasts each tensor."""


def starts(out: Path) -> Any:
    """Begin a training with other weights or buffers on one rank or both."""
    for how in HOWS:
        for name in STARTS:
            _start(out / how / name, how, name)
    return None


def _start(out: Path, how: str, name: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(5 if name == "other-seed" else 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8))
    with torch.no_grad():
        if name == "one-weight":
            model[3].weight[1, 2] += 0.5
        if name == "one-buffer":
            model[1].running_mean += 0.5
        if name == "rank-1" and rank == 1:
            for tensor in (*model.parameters(), model[1].running_var):
                tensor.add_(0.5)
    model[1].eval()
    torch.manual_seed(7 + rank)
    batch = torch.randn(4, 8)
    wrapped = DistributedDataParallel(model) if how == "before" else model
    with trueup.capture(out, model=model, level=("api", "aten")):
        if how == "ddp":
            wrapped = DistributedDataParallel(model)
        if how == "by-hand":
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()


def _mean(divisor, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotation but the class itself
    """Average gradients as DDP does, by a hook of the user's."""
    return dist.all_reduce(bucket.buffer().div_(divisor), async_op=True).get_future().then(lambda f: f.value()[0])


def _break_all_reduce() -> torch.library.Library:
    """Replace the CPU kernel of all-reduce by one that loses part of what rank 1 contributes, as a bad link might."""
    library = torch.library.Library("c10d", "IMPL")

    def allreduce(tensors: list[Tensor], group: Any, *_: Any, **__: Any) -> Any:
        backend = dist.ProcessGroup.unbox(group)._get_backend(torch.device("cpu"))
        if dist.get_rank() == 1:
            tensors[0].view(-1)[: tensors[0].numel() // 4].mul_(0.5)
        work = backend.allreduce(tensors, dist.AllreduceOptions())
        return tensors, work.boxed()

    library.impl("allreduce_", allreduce, "CPU")
    return library


def senders(out: Path) -> Any:
    """Train on simulated devices of which one rank's is broken: data parallel, and as a pipeline of two stages."""
    from trueup import simdev

    simdev.install()
    rank = dist.get_rank()
    for name, faulty, fault in (("healthy", -1, ""), ("forward", 1, "layer-norm-epsilon"), ("backward", 1, "layer-norm-backward")):
        training = recipes.build("gpt2", "npu")
        training.model.eval()
        wrapped = DistributedDataParallel(training.model, bucket_cap_mb=1)
        with _broken(fault, rank == faulty), trueup.capture(out / f"ddp-{name}", level=("api", "aten")):
            for batch in training.batches[rank::2][:2]:
                training.optimizer.zero_grad()
                training.loss(wrapped, batch).backward()
                training.optimizer.step()
    for name, faulty, fault in (("healthy", -1, ""), ("forward", 0, "layer-norm-epsilon"), ("backward", 1, "gelu-backward")):
        with _broken(fault, rank == faulty):
            _stages(out / f"pipeline-{name}", "npu")
    return None


def _broken(fault: str, here: bool) -> Any:
    from trueup import simdev

    return simdev.inject(fault) if here else nullcontext()


def _stages(out: Path, device: str) -> None:
    """Train two stages of two micro-batches each, one stage per rank; rank 0 receives what rank 1's backward sends."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    with trueup.capture(out, model=stage, level=("api", "aten")) as capture:
        for step in range(STEPS):
            optimizer.zero_grad()
            for batch in range(2):
                x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * step + batch)).to(device)
                if rank == 0:
                    hidden = stage(x)
                    dist.send(hidden.detach(), 1)
                    gradient = torch.empty(6, 16, device=device)
                    dist.recv(gradient, 1)
                    hidden.backward(gradient)
                else:
                    received = torch.empty(6, 16, device=device)
                    dist.recv(received, 0)
                    received.requires_grad_()
                    stage(received).square().mean().backward()
                    dist.send(received.grad, 0)
            optimizer.step()
            capture.step()


def dies(out: Path) -> Any:
    """Lose rank 1 in its second step, as HOW says; what rank 0 then meets ends it too."""
    model, batches, loss_of = _gpt2()
    wrapped = _ddp(model, "")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with trueup.capture(out / "capture", level=("api",)):
        for step in range(STEPS):
            if step == 1 and dist.get_rank() == 1:
                time.sleep(1.5)  # past a flush
                if os.environ["HOW"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the last batch is broken")
            optimizer.zero_grad()
            loss_of(wrapped, batches[step]).backward()
            optimizer.step()
    return None


def npu(out: Path) -> Any:
    """Train on two simulated devices, one per process, as on two cards of one machine."""
    from trueup import simdev

    simdev.install()
    found = {}
    for levels in ((), ("api",), ("aten",)):
        training = recipes.build("gpt2", "npu")
        torch.manual_seed(7)
        wrapped = DistributedDataParallel(training.model)
        losses = []
        with trueup.capture(out / levels[0], level=levels) if levels else nullcontext():
            for batch in training.batches[dist.get_rank() :: 2]:
                training.optimizer.zero_grad()
                loss = training.loss(wrapped, batch)
                loss.backward()
                training.optimizer.step()
                losses.append(loss.item())
        found["".join(levels) or "off"] = [losses, [_digest(simdev.raw(p).detach()) for p in training.model.parameters()]]
    return found


def work(out: str, scenarios: list[str]) -> None:
    """Carry out scenarios, one after the other, and write what each returned."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in scenarios:
        folder = Path(out, name)
        folder.mkdir(parents=True, exist_ok=True)
        result = globals()[name](folder)
        Path(out, f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
        dist.barrier()
    dist.destroy_process_group()
