"""Trainings that nobody ran while Trueup was made, for `strangers.py`.

`stranger` holds what a stranger is, the others the models, by the data that they learn from or the way they do. All data
are real (this repository's LICENSE, the pictures of scikit-image) or generated with a fixed seed.
"""

from strange import (
    densities,
    learners,
    listeners,
    matchers,
    measures,
    mechanisms,
    pictures,
    practices,
    readers,
    scenes,
    sequences,
    solvers,
    structures,
)
from strange.stranger import AGAIN, PLAIN, STRANGERS, Altered, Steps, Stranger

__all__ = [
    "AGAIN", "PLAIN", "STRANGERS", "Altered", "Steps", "Stranger",
    "densities", "learners", "listeners", "matchers", "measures", "mechanisms", "pictures", "practices", "readers", "scenes",
    "sequences", "solvers", "structures",
]  # fmt: skip
