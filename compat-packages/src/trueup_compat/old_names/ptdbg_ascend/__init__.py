"""`from ptdbg_ascend import ...`, answered by `trueup_compat.ptdbg_ascend`."""

from trueup_compat.ptdbg_ascend import *  # noqa: F403
from trueup_compat.ptdbg_ascend import __all__ as __all__
