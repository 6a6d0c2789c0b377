"""Public silent bugs rebuilt as small trainings, for `silent_bugs.py`.

`case` holds what a case is, `language` the models of text that several share; the others hold the cases by where the bug sits. The
trainings are written from what the issues tell, in our own code; nothing is downloaded.
"""

from silent import gradients, kernels, losses, models, optimizers
from silent.case import CASES, Case, Form, Place, Training, Word

__all__ = ["CASES", "Case", "Form", "Place", "Training", "Word", "gradients", "kernels", "losses", "models", "optimizers"]
