"""Alignment as a recipe: the steps and the numbers of a porting guide, followed over two captures.

`recipe` reads a recipe (such as ``paddle.toml``), `readings` keeps what a comparison measured in the first step, `following` makes
the steps in order, shows the way to the blamed call, and records operators where there were modules alone.
`trueup.comparison.verdict` measures. Used by ``trueup align --recipe`` and the reports.
"""

from trueup.analysis.recipes.following import follow
from trueup.analysis.recipes.recipe import Outcome, RecipeResult

__all__ = ["Outcome", "RecipeResult", "follow"]
