"""Names of operators, without what does not change their arithmetic."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=4096)
def normalised(op: str) -> str:
    """Strip what does not change the arithmetic: ``aten::add_`` and ``torch.Tensor.__iadd__`` are both ``add``."""
    name = re.split(r"::|\.", op)[-1]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name
    return name[:-1] if name.endswith("_") and len(name) > 1 else name
