"""A training that is given secrets in every way: arguments, variables, a URL in a call, an exception's message."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


@torch.library.custom_op("redaction::scaled", mutates_args=())
def scaled(x: Tensor, table: str, *, api_key: str) -> Tensor:
    return x * len(table) + len(api_key)


assert sys.argv[2] == "hunter2"
net = torch.nn.Linear(4, 4)
y = scaled(net(torch.randn(3, 4)).detach(), "s3://me:hunter2@host/x", api_key="hunter2")
net(y).sum().backward()
raise ValueError("cannot reach postgres://me:hunter2@host/runs")
