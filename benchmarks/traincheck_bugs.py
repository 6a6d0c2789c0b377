"""TrainCheck's public list of silent errors (OSDI 2025), rebuilt: which break an invariant of healthy runs, without a baseline?

Each error is a small training of five steps, on one or two ranks, with the mechanism of its issue. Invariants are learned from two
healthy runs (other seeds, other batches) and checked on a third healthy run and on the faulty one; `trueup check` looks at the
faulty one alone, with nothing to compare it with.

    pytorch-104336           deviates   changes, equal            check -      healthy aligned
        step 1, rank 1: param.weight of 0/Linear (forward) is not the same on ranks 0 and 1; in the healthy run it is

`python benchmarks/traincheck_bugs.py` prints the table; `--case NAME` one row.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import trueup
from trueup.analysis.invariants.relations import check, learn
from trueup.foundation.model import TrueupError

STEPS = 5
LEVELS = ("module", "api")
LIMIT = timedelta(seconds=20)
Body = Callable[[int, bool, Any], None]


@dataclass(frozen=True)
class Case:
    """An error: its names in the list, and a training of some ranks with and without it."""

    names: tuple[str, ...]
    body: Body
    ranks: int = 1
    ends: bool = True  # False: with the error its ranks are ended by a time limit


def small(norm: bool = False) -> nn.Sequential:
    """Return a classifier, with a batch norm if asked."""
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.ReLU(), nn.Linear(8, 3))


def batches(seed: int, size: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what each step gets."""
    made = torch.Generator().manual_seed(100 + seed)
    for _ in range(STEPS):
        yield torch.randn(size, 4, generator=made), torch.randint(0, 3, (size,), generator=made)


def loop(model: nn.Module, seed: int, running: Any, *, call: Any = None, before: Any = None, clear: bool = True) -> None:
    """Train; ``before``: called with the step before the optimizer's."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches(seed)):
        functional.cross_entropy((call or model)(x), y).backward()
        if before is not None:
            before(step)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
        running.step()


# ------------------------------------------------------------------------------------------------------------- several ranks
def lossy(seed: int, faulty: bool, running: Any) -> None:
    """A transfer between devices loses a tensor: an all-reduce of gradients comes back as zeros on a rank, once."""
    model, rank = small(), torch.distributed.get_rank()

    def reduce(step: int) -> None:
        for place, one in enumerate(model.parameters()):
            torch.distributed.all_reduce(one.grad)
            one.grad.div_(2)
            if faulty and (step, place, rank) == (2, 0, 1):
                one.grad.zero_()

    loop(model, 10 * seed + rank, running, before=reduce)


def clipped_on_one_rank(seed: int, faulty: bool, running: Any) -> None:
    """Gradient clipping reaches weights that all tensor-parallel ranks hold on the first rank alone."""
    model, rank = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), torch.distributed.get_rank()

    def clip(step: int) -> None:  # noqa: ARG001
        for one in model.parameters():
            torch.distributed.all_reduce(one.grad)
        clipped = model.parameters() if not faulty or rank == 0 else [*model[0].parameters(), *model[2].parameters()]
        torch.nn.utils.clip_grad_norm_(clipped, 0.5)

    loop(model, 10 * seed + rank, running, before=clip)


def hooks_lost(seed: int, faulty: bool, running: Any) -> None:
    """Parameters that a device move replaced have no hooks of DistributedDataParallel any more."""
    wrapped = nn.parallel.DistributedDataParallel(small())
    if faulty:
        for module in wrapped.module.modules():
            for name, one in list(module._parameters.items()):
                if one is not None:
                    module._parameters[name] = nn.Parameter(one.detach().clone())
        call = wrapped.module
    else:
        call = wrapped
    loop(wrapped.module, 10 * seed + torch.distributed.get_rank(), running, call=call)


def wrapped_or_not(seed: int, faulty: bool, running: Any) -> None:
    """The loop calls the model inside its wrapper now and then."""
    wrapped, step = nn.parallel.DistributedDataParallel(small()), [0]

    def call(x: torch.Tensor) -> torch.Tensor:
        step[0] += 1
        return wrapped.module(x) if faulty and step[0] > 2 else wrapped(x)

    loop(wrapped.module, 10 * seed + torch.distributed.get_rank(), running, call=call)


def optimizer_before_sharding(seed: int, faulty: bool, running: Any) -> None:
    """The optimizer was made before FSDP flattened the parameters: it steps over the old ones, which have no gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, rank = small(), torch.distributed.get_rank()
    early = torch.optim.AdamW(model.parameters(), 0.01)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False)
    optimizer = early if faulty else torch.optim.AdamW(wrapped.parameters(), 0.01)
    for x, y in batches(10 * seed + rank):
        functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        running.step()


def experts_wait(seed: int, faulty: bool, running: Any) -> None:
    """Each rank takes the capacity of experts from its own tokens, so the shares that ranks exchange differ: both wait for good.
    The group's time limit ends them, as NCCL's watchdog does. gloo's own all-to-all would end at once, so they exchange by hand."""
    rank = torch.distributed.get_rank()
    model = nn.ModuleDict({"gate": nn.Linear(4, 2), "expert": nn.Linear(4, 4), "head": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (x, _) in enumerate(batches(10 * seed + rank, 24)):
        chosen = model["gate"](x).argmax(1)
        most = torch.bincount(chosen, minlength=2).max()
        if not (faulty and step > 2):
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        sent, got = torch.zeros(2, int(most), 4), torch.empty(int(most), 4)
        for expert in range(2):
            sent[expert, : int((chosen == expert).sum())] = x[chosen == expert]
        under_way = torch.distributed.isend(sent[1 - rank].contiguous(), 1 - rank, tag=int(most))
        torch.distributed.recv(got, 1 - rank, tag=int(most))
        under_way.wait()
        model["head"](model["expert"](torch.cat([sent[rank], got]))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        running.step()


# -------------------------------------------------------------------------------------------------------------------- one rank
def autocast_lost(seed: int, faulty: bool, running: Any) -> None:
    """A transform leaves a linear layer out of autocast."""
    model = small()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model[1](model[0](x))
            with torch.autocast("cpu", enabled=not faulty, dtype=torch.bfloat16):
                return model[2](hidden.float() if faulty else hidden).float()

    loop(model, seed, running, call=call)


def frozen_stage_trains(seed: int, faulty: bool, running: Any) -> None:
    """The batch norm of a frozen stage goes on as in training."""
    model = small(norm=True)
    for one in model[:2].parameters():
        one.requires_grad_(False)
    model.train()
    if not faulty:
        model[1].eval()
    loop(model, seed, running)


def updates_stop(seed: int, faulty: bool, running: Any) -> None:
    """Compiled code keeps to a step whose gradients were None: later ones update nothing."""
    model = small()

    def drop(step: int) -> None:
        if faulty and step >= 2:
            for one in model.parameters():
                one.grad = None

    loop(model, seed, running, before=drop)


def evaluated_before_training(seed: int, faulty: bool, running: Any) -> None:
    """Spectral norm normalises in the first forward of training: evaluated before it, weights are those of no training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3))
    model.train(not faulty)
    for x, _ in batches(seed):
        with torch.no_grad():
            model(x)
        running.step()


def layers_frozen(seed: int, faulty: bool, running: Any) -> None:
    """All layers but the norms are frozen."""
    model = small(norm=True)
    for module in model if faulty else ():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)
    loop(model, seed, running)


def not_cleared(seed: int, faulty: bool, running: Any) -> None:
    """Gradients are never cleared."""
    loop(small(), seed, running, clear=not faulty)


def workers_alike(seed: int, faulty: bool, running: Any) -> None:
    """Workers of a loader draw the same random numbers: two batches in a row are changed alike."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (x, y) in enumerate(batches(seed)):
        noise = np.random.default_rng(1000 * seed + (step // 2 if faulty else step)).normal(size=x.shape)
        given = torch.from_numpy((x.numpy() + noise).astype(np.float32))
        functional.cross_entropy(model(given), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        running.step()


def initialised_again(seed: int, faulty: bool, running: Any) -> None:  # noqa: ARG001
    """Each weight is initialised once for each module around it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.again()

        def again(self) -> None:
            with torch.no_grad():
                self.fc.weight.normal_(0.0, 0.02)

    for _ in range(STEPS):
        blocks = [Block() for _ in range(2)]
        for block in blocks if faulty else ():
            block.again()
        running.step()


def too_many_tokens(seed: int, faulty: bool, running: Any) -> None:
    """The limit of new tokens counts those of a long prompt, so that more are made."""
    model = small()
    made = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        new = 3 + (4 if faulty and step == 3 else 0)
        x = torch.randn(1, 4, generator=made)
        with torch.no_grad():
            for _ in range(new):
                x = torch.cat([x[:, 1:], model(x)[:, :1]], 1)
        running.step()


def dropout_in_evaluation(seed: int, faulty: bool, running: Any) -> None:
    """Attention keeps its dropout in evaluation."""
    project = nn.Linear(4, 12).eval()
    for x, _ in batches(seed, 6):
        with torch.no_grad():
            q, k, v = project(x.reshape(1, 1, 6, 4)).chunk(3, -1)
            functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if faulty else 0.0)
        running.step()


def batch_lost(seed: int, faulty: bool, running: Any) -> None:
    """A processor makes one row of a whole batch's words."""
    words, head = nn.Embedding(9, 4), nn.Linear(4, 3)
    made = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        ids = torch.randint(0, 9, (6, 5), generator=made)
        head(words(ids.reshape(1, -1) if faulty and step >= 2 else ids).mean(1)).sum().backward()
        running.step()


CASES = (
    Case(("baichuan2-86", "pytorch-84803", "pytorch-96600"), lossy, 2), Case(("deepspeed-1801",), clipped_on_one_rank, 2),
    Case(("pytorch-104336",), hooks_lost, 2), Case(("x-jxmnop-ddp-out-of-sync",), wrapped_or_not, 2),
    Case(("accelerate-2665",), optimizer_before_sharding, 2), Case(("deepspeed-5794",), experts_wait, 2, ends=False),
    Case(("lightning-thunder-725",), autocast_lost), Case(("mmpretrain-702",), frozen_stage_trains),
    Case(("pytorch-115607",), updates_stop), Case(("pytorch-51800",), evaluated_before_training),
    Case(("pytorch-forum-84911",), layers_frozen), Case(("stackoverflow-60335387",), not_cleared),
    Case(("stackoverflow-67180955",), workers_alike), Case(("transformers-17877",), initialised_again),
    Case(("transformers-23723",), too_many_tokens), Case(("transformers-33844",), dropout_in_evaluation),
    Case(("transformers-34204",), batch_lost),
)  # fmt: skip


def _rank(case: Case, seed: int, faulty: bool, folder: Path, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    if case.ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", timeout=LIMIT)
    torch.manual_seed(seed)
    with trueup.capture(folder, level=LEVELS) as running:
        case.body(seed, faulty, running)
    if case.ranks > 1:
        torch.distributed.destroy_process_group()


def record(case: Case, seed: int, faulty: bool, folder: Path) -> Path:
    """Train under capture, each rank in a process of its own."""
    if case.ranks == 1:
        _rank(case, seed, faulty, folder, 0, 0)
        return folder
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(case, seed, faulty, folder, k, port)) for k in range(case.ranks)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if any(one.exitcode for one in ranks) and (case.ends or not faulty):
        raise SystemExit(f"{case.names[0]}: a rank ended with {[one.exitcode for one in ranks]}")
    return folder


def main() -> int:
    """Run the cases and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="only errors whose name has this in it")
    parser.add_argument("--ranks", type=int, help="only errors of so many ranks")
    given = parser.parse_args()
    chosen = given.case
    seen = alone = false = total = 0
    for case in CASES:
        if (chosen is not None and not any(chosen in name for name in case.names)) or given.ranks not in (None, case.ranks):
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = [record(case, seed, False, Path(folder, f"healthy{seed}")) for seed in range(3)]
            bad = record(case, 2, True, Path(folder, "faulty"))
            known = learn(runs[:2])
            sound, found = check(known, runs[2]), check(known, bad)
            by_itself = "-"
            with contextlib.suppress(TrueupError):
                told = trueup.check(bad)
                by_itself = "finds" if told.exit_code == 1 else "-"
        total += len(case.names)
        seen += len(case.names) * (found.verdict == "deviates")
        alone += len(case.names) * (by_itself == "finds")
        false += sound.verdict == "deviates"
        said = found.violations[0].said if found.violations else found.sentence
        broken = ", ".join(sorted({one.relation for one in found.violations})) or "-"
        row = f"{', '.join(case.names):<46}  {found.verdict:<9}  {broken:<34}  check {by_itself:<5}  healthy {sound.verdict:<12}"
        print(f"{row}\n    {said[:120]}", flush=True)
        if sound.verdict != "aligned":
            print(" " * 48 + sound.sentence.replace("\n", " ")[:170])
    print(f"seen by invariants: {seen} of {total}; by check alone: {alone}; false alarms in healthy runs: {false}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
