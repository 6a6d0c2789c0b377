"""A run without any mention of Trueup: a convolution and a linear layer in bfloat16, two steps."""

import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)).bfloat16()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.randn(2, 1, 8, 8).bfloat16()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
