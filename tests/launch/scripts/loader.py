"""Train on a DataLoader with a worker: `loader.py fork|spawn`."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Sines(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)).sin()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Sines(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1]):
        loss = model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item()!r}")
