"""Watching the loops of others: each names the call, executes it again, and stops where it was asked to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trueup

BAD = 3
"""The batch whose numbers are too large for the exponential."""


class Network(nn.Module):
    """As a Trainer wants it: a loss among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.down(torch.exp(self.up(x)))
        return {"loss": y.square().mean(), "logits": y}


def data() -> Dataset[Any]:
    x = torch.randn(12, 4)
    x[2 * BAD] *= 1e4
    return TensorDataset(x)


class Named(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return {"x": data()[k][0] if k != 2 * BAD else torch.full((4,), 1e4)}


def hugging_face(model: Network, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = transformers.TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    InOrder(model, options, train_dataset=Named()).train()


def accelerated(model: Network, _: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped, prepared, batches = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=2))
    for (x,) in batches:
        prepared.zero_grad()
        accelerator.backward(wrapped(x)["loss"])
        prepared.step()


def lightning(model: Network, folder: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Fit(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.net(batch[0])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    pl.Trainer(
        default_root_dir=folder, accelerator="cpu", max_steps=5, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(Fit(), DataLoader(data(), batch_size=2))  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [hugging_face, accelerated, lightning], ids=lambda train: train.__name__)
def test_loops_of_others(train: Callable[[Network, Path], None], path: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network()
    with pytest.raises(trueup.WatchStopped) as stopped, trueup.watch(model, path, stop_after=1) as watch:
        train(model, tmp_path)
    assert stopped.value.code == 3
    assert watch._session.failure.text is None
    (hit,) = watch.hits
    assert (hit.step, hit.kind, hit.name) == (BAD, "overflow", "torch.exp, forward")
    assert "test_watching_trainers.py" in str(hit.source)
    assert hit.tensors.startswith("executed again with the same result"), hit.tensors
    result = trueup.overflow(Path(hit.path or ""))
    assert result.first is not None
    assert result.first.place.op == "torch.exp"


def test_parts_that_a_lightning_module_calls_are_named_as_it_names_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Whole(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def training_step(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean()

    whole = Whole()
    with trueup.capture(tmp_path / "run", level=["module"]):
        whole.training_step(torch.ones(2, 4)).backward()
    scopes = set(trueup.open_capture(tmp_path / "run").records(columns=["scope"])["scope"].to_pylist())
    assert scopes - {""} == {"net", "net.0", "net.1"}  # the loss is read outside of any module
    (rank,) = (tmp_path / "run").glob("rank-*/manifest.json")
    assert set(json.loads(rank.read_text())["settings"]["modules"]) == {"net", "net.0", "net.1"}
