"""Models of pictures: the detector of the example, ViT of `transformers` with random weights, a ResNet, a U-Net."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import images
from zoo.resnet import ResNet
from zoo.training import Batch, Training, on
from zoo.unet import UNet

EXAMPLE = Path(__file__).parents[2] / "examples" / "centernet"
COUNT = 4  # batches


@functools.cache
def example(name: str) -> ModuleType:
    """Load a file of the example; under a name of our own, for `data` could be anybody's."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    return example("centernet").losses(model(batch["image"]), batch)["loss"]


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], ignore_index=images.IGNORED)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(pixel_values=batch["images"], labels=batch["labels"]).loss


def labelled(pairs: list[tuple[Tensor, Tensor]]) -> list[Batch]:
    return [{"images": pictures, "labels": labels} for pictures, labels in pairs]


@functools.cache
def photographs() -> list[Batch]:
    """Cut the batches of the detector once: it takes four times as long as a step on one."""
    return list(itertools.islice(example("data").batches(batch_size=7, seed=0, size=64), COUNT))


def centernet(device: str) -> Training:
    model = example("centernet").CenterNet(len(example("data").CLASSES)).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    batches = [{name: tensor.clone() for name, tensor in batch.items()} for batch in photographs()]
    return Training(model, optimizer, detection_loss, on(device, batches))


def vit(device: str, attention: str = "sdpa") -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=640,
        hidden_dropout_prob=0.1,
        num_labels=len(images.TEXTURES),
        attn_implementation=attention,
    )
    model = ViTForImageClassification(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, foreach=False)
    return Training(model, optimizer, own_loss, on(device, labelled(images.textures(COUNT, 32))))


def resnet(device: str) -> Training:
    model = ResNet(len(images.TEXTURES)).to(device).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, foreach=False
    )
    return Training(model, optimizer, classification_loss, on(device, labelled(images.textures(COUNT, 32))))


def unet(device: str) -> Training:
    model = UNet(classes=2).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=False)
    return Training(model, optimizer, segmentation_loss, on(device, labelled(images.coins(COUNT, 4, 64))))
