"""Keras pads in a layer of its own before a convolution or a pool (`ZeroPadding2D`); other frameworks in the layer itself.

So what such a layer is given is told as what the padding was given, and the gradient of it as the padding's. Which padding it was
its bytes tell: what one layer gave is what the other was given.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trueup.comparison.normalise.dialects import Dialect
from trueup.comparison.normalise.layer_gradients import OF_CALL

PADS = frozenset({"ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"})
"""Layers that do nothing else (Keras 3.15)."""

KEPT = frozenset({*OF_CALL, "slot", "value"})
"""Columns of a row that are not the tensor's."""


def unpadded(table: pa.Table, columns: dict[str, list[str]], dialect: Dialect) -> pa.Table:
    """Return records in which layers that take padded data, and pad nothing themselves, take what was padded.

    Args:
        table: records, as recorded.
        columns: their ``level``, ``scope``, ``op`` and ``slot`` as texts.
        dialect: what the framework calls things.
    """
    ops, slots = columns["op"], columns["slot"]
    if dialect.framework != "tensorflow" or PADS.isdisjoint(ops):
        return table
    ranks, steps, seqs, forwards, digests = (table[name].to_pylist() for name in ("rank", "step", "seq", "forward_seq", "digest"))
    at: dict[tuple[int, int, int, str], int] = {}
    """Rows of pads, by their call and slot."""
    gave: dict[tuple[int, int, str], int] = {}
    backwards: dict[tuple[int, int, int], int] = {}
    for k, op in enumerate(ops):
        if op in PADS:
            at[ranks[k], steps[k], seqs[k], slots[k]] = k
            if slots[k] == "output.0" and digests[k] is not None:
                gave[ranks[k], steps[k], digests[k]] = seqs[k]
            if forwards[k] is not None:
                backwards[ranks[k], steps[k], forwards[k]] = seqs[k]
    instead: dict[int, int] = {}
    padded: dict[tuple[int, int, int], int] = {}
    """Calls that take padded data, each with the pad's."""
    for k, op in enumerate(ops):
        pad = gave.get((ranks[k], steps[k], digests[k] or "")) if slots[k] == "input.0" and op not in PADS else None
        layer = dialect.layer(columns["scope"][k], op) if pad is not None and columns["level"][k] == "module" else None
        if layer is not None and pad is not None and layer.own[dialect.framework].channels_last:
            padded[ranks[k], steps[k], seqs[k]] = pad
            instead[k] = at.get((ranks[k], steps[k], pad, "input.0"), k)
    for k, slot in enumerate(slots):
        if slot == "grad_input.0" and (pad := padded.get((ranks[k], steps[k], forwards[k]))) is not None:
            back = backwards.get((ranks[k], steps[k], pad))
            if back is not None:
                instead[k] = at.get((ranks[k], steps[k], back, "grad_input.0"), k)
    if not instead:
        return table
    places = np.arange(len(table))
    places[list(instead)] = list(instead.values())
    taken = table.take(pa.array(places))
    return pa.table({name: (table if name in KEPT else taken)[name] for name in table.column_names})

