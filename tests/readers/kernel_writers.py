"""A kernel's dump as CANN writes it, version 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trueup.exchange.readers.contents import _classes
from trueup.exchange.readers.kernel_dump import DTYPES, FORMATS


def kernel(path: Path, *outputs: tuple[np.ndarray[Any, Any], str, Sequence[int]]) -> Path:
    """Write outputs: their values, the format that they have, the shape in the framework."""
    made = _classes()
    header, body = made["KernelDump"](), b""
    for values, layout, shape in outputs:
        one = header.output.add(size=values.nbytes)
        one.data_type = next(number for number, dtype in DTYPES.items() if dtype == values.dtype)
        one.format = next(number for number, name in FORMATS.items() if name == layout)
        one.shape.dim.extend(values.shape)
        one.original_shape.dim.extend(shape)
        body += values.tobytes()
    data = header.SerializeToString()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(data).to_bytes(8, "little") + data + body)
    return path
