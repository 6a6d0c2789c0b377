"""Train what torch.compile made; Dynamo is imported long after PyTorch, as transformers does: `compiled.py`."""

import torch
import torch._dynamo
from torch import compile  # by name

torch.manual_seed(0)
tail = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(8, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), tail)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
compiled = compile(model, backend="aot_eager", fullgraph=True)
for _ in range(3):
    loss = compiled(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item()!r}")
stats = torch._dynamo.utils.counters["stats"]
print(f"graphs {stats['unique_graphs']}, operators {stats['calls_captured']}")
