"""Real models on real data for the whole test-suite: `zoo.build("bert", "cpu").step()` trains one step.

Everything is small (a step takes under 0.15 s on one core), offline (random weights; the text is this repository's
LICENSE, the pictures come with scikit-image) and the same in every run. `language` and `vision` hold the recipes,
`tagger`, `resnet` and `unet` the models written here, `text` and `images` the data, `training` the loop.
"""

from zoo.recipes import MODELS, build
from zoo.training import Training

__all__ = ["MODELS", "Training", "build"]
