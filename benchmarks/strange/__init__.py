"""Trainings that nobody ran while Trueup was made, for `strangers.py`.

`stranger` holds what a stranger is, `pictures`, `sequences` and `structures` the models, by the data that they learn
from. All data are real (this repository's LICENSE, the pictures of scikit-image) or generated with a fixed seed.
"""

from strange import pictures, sequences, structures
from strange.stranger import AGAIN, PLAIN, STRANGERS, Altered, Steps, Stranger

__all__ = ["AGAIN", "PLAIN", "STRANGERS", "Altered", "Steps", "Stranger", "pictures", "sequences", "structures"]
