"""A training that knows nothing of Trueup; prints its losses bit by bit."""

import os
import sys

import numpy as np
import paddle
from paddle import nn
from paddle._C_ops import relu
from paddle.nn import functional as F


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1D(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(relu(self.norm(self.first(x))))


class Data(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, k):
        return np.random.RandomState(k).randn(8).astype("float32"), np.int64(k % 3)


def main(workers):
    if "PADDLE_TRAINER_ID" in os.environ:
        paddle.distributed.init_parallel_env()
    paddle.seed(0)
    net = Net()
    optimizer = paddle.optimizer.Momentum(0.1, parameters=net.parameters())
    for x, y in paddle.io.DataLoader(Data(), batch_size=4, num_workers=workers):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        print(float(loss).hex(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
