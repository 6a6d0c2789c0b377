"""Names of operators, without what does not change their arithmetic."""

from __future__ import annotations

import re
from functools import lru_cache

from trueup import toml

TENSORFLOW = "tf.raw_ops."


@lru_cache(maxsize=4096)
def normalised(op: str) -> str:
    """Strip what does not change the arithmetic: ``aten::add_`` and ``torch.Tensor.__iadd__`` are both ``add``.

    So is ``tf.raw_ops.AddV2``: TensorFlow's operations go by the names of ``tensorflow_operators.toml``.
    """
    name = re.split(r"::|\.", op)[-1]
    if op.startswith(TENSORFLOW):
        return _of_tensorflow().get(name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return name[1:] if name in ("iadd", "isub", "imul", "itruediv") else name
    return name[:-1] if name.endswith("_") and len(name) > 1 else name


@lru_cache(maxsize=1)
def _of_tensorflow() -> dict[str, str]:
    return toml.packaged(__package__, "tensorflow_operators.toml")
