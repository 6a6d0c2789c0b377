"""`import precision_tool.config`, answered by `trueup_compat.precision_tool.config`."""

import sys

from trueup_compat.precision_tool import config

sys.modules[__name__] = config  # the module itself, so that a setting that a script changes is the one that is read
