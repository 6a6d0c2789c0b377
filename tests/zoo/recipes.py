"""The table of models, and the one way to build one."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from zoo import language, vision
from zoo.training import Training

# Attention runs fused (sdpa) in some models and as matmul, softmax, dropout, matmul (eager) in others; GPT-2 has both.
MODELS: dict[str, Callable[[str], Training]] = {
    "centernet": vision.centernet,
    "bert": language.bert,
    "gpt2": language.gpt2,
    "gpt2-eager": partial(language.gpt2, attention="eager"),
    "llama": language.llama,
    "vit": vision.vit,
    "lstm_tagger": language.lstm_tagger,
    "resnet": vision.resnet,
    "unet": vision.unet,
}


def build(name: str, device: str = "cpu", seed: int = 0) -> Training:
    """Seed everything, then build the model on the CPU and move it: the same weights on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return MODELS[name](device)
