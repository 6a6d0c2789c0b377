"""Old scripts over Trueup."""

import os
from pathlib import Path

import trueup
import trueup_compat

SOURCES = os.pathsep.join(str(Path(one.__file__).parents[1]) for one in (trueup, trueup_compat))
"""Where a process of its own finds both distributions."""
