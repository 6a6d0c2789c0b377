"""A training on two ranks with every way to communicate; with ``FAULT`` set the exp of rank 1 is wrong."""

import os

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(paddle.exp(self.first(x)))


def communicate(rank):
    """Exchange values that tell who gave what."""
    own = paddle.full([2], rank + 1.0)
    summed = own.clone()
    task = dist.all_reduce(summed, sync_op=False)
    task.wait()
    gathered, objects = [], []
    dist.all_gather(gathered, own)
    dist.all_gather_object(objects, {"rank": rank})
    scattered = paddle.zeros([1])
    dist.scatter(scattered, [own[:1] * 10, own[:1] * 20] if rank == 0 else None, src=0)
    dist.broadcast(own, src=1)
    reduced = paddle.full([1], 5.0 + rank)
    dist.reduce(reduced, dst=1)
    message = paddle.full([3], 7.0)
    if rank == 0:
        dist.send(message, dst=1)
    else:
        message.zero_()
        dist.recv(message, src=0)
    return [summed, *gathered, scattered, own, message]


def break_exp():
    """Let the kernel of exp give 1 % too much, below a capture."""
    from trueup.recording.adapters.paddle.session import aside
    from trueup.recording.engine.replacing import Sweep

    with aside():
        original = paddle._C_ops.exp
        Sweep([(original, lambda x, *rest: original(x, *rest) * 1.01)]).install()


def main():
    fleet.init(is_collective=True)
    rank = dist.get_rank()
    if os.environ.get("FAULT") and rank == 1:
        break_exp()
    paddle.seed(0)
    net = fleet.distributed_model(Net())
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.01, parameters=net.parameters()))
    for step in range(2):
        for part in range(2):
            x = paddle.to_tensor(np.random.RandomState(4 * step + 2 * part + rank).randn(3, 8).astype("float32"))
            if part == 0:
                with net.no_sync():
                    net(x).pow(2).mean().backward()
            else:
                loss = net(x).pow(2).mean()
                loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        told = [float(t.sum().item()) for t in communicate(rank)]
        print(rank, loss.item().hex(), told, flush=True)


main()
