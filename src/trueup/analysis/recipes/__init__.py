"""Alignment as a recipe: the steps and the numbers of a porting guide, followed over two captures.

`recipe` reads a recipe (``paddle.toml`` is one), `readings` keeps what a comparison measured in the first step, `checks` are the
steps, `bisecting` goes from module to module, `following` makes the steps in order, `deeper` records what is needed next. All that
is measured comes from `trueup.comparison.verdict`. Used by ``trueup align --recipe`` and the reports.
"""

from trueup.analysis.recipes.following import follow
from trueup.analysis.recipes.found import Outcome, RecipeResult

__all__ = ["Outcome", "RecipeResult", "follow"]
