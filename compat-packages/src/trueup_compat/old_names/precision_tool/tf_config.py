"""`import precision_tool.tf_config`, answered by `trueup_compat.precision_tool.tf_config`."""

import sys

from trueup_compat.precision_tool import tf_config

sys.modules[__name__] = tf_config  # the module itself, so that a setting that a script changes is the one that is read
