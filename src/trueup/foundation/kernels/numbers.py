"""Whether numbers are those of a coarser dtype, though they are held in float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trueup.foundation.facts.slots import SINGLE, roundoff

COARSE: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def is_rounded(dtype: str, values: NDArray[Any], added: NDArray[Any], unlikely: float) -> bool:
    """Tell whether float32 numbers are sums, each of a number of a coarser dtype and of one of those that were ``added``.

    Of ``values`` ``(n,)`` and ``added`` ``(m,)``, which is zero where nothing was, and by chance with a probability of
    ``unlikely`` at most: a unit of the sum holds a number of the dtype as often as that unit is a part of the distance between two
    of them. ``dtype``: a key of `COARSE`.
    """
    with np.errstate(all="ignore"):
        rest = values[:, None] - added
        near = rest.astype(COARSE[dtype]).astype(float)
        room = SINGLE * np.abs(values)[:, None] * added.any()
        by_chance = (2 * room / (roundoff(dtype) * np.abs(near))).sum(axis=1).prod()
    return bool((np.abs(rest - near) <= room).any(axis=1).all() and by_chance <= unlikely)
