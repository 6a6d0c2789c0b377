"""Checkpoints as files: what they hold, how two differ, and names brought back to those of the model. Nothing in a file is ever
run."""

from trueup.foundation.checkpoint.reading import Checkpoint, Held, open_checkpoint
from trueup.migration.checkpoint.comparing import Comparison, compare
from trueup.migration.checkpoint.repairing import Repair, repair

__all__ = ["Checkpoint", "Comparison", "Held", "Repair", "compare", "open_checkpoint", "repair"]
