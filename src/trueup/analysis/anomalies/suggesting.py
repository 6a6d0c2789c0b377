"""A row of policy.toml that runs the call found in a wider dtype (docs of policies: policy.md)."""

from __future__ import annotations

import json
import re

from trueup.foundation.facts.anomaly import Anomaly

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ELSEWHERE = ("input", "parameters", "loss_scale", "collective")
"""Kinds of which no call is to blame that could run in another way."""


def policy_row(one: Anomaly) -> str:
    """Return the row, or nothing where a wider dtype is no remedy: already wide, a gradient, or not a call's doing."""
    place = one.place
    op = place.api if place.level == "aten" else place.op
    dtypes = {slot.dtype for slot in one.slots if slot.dtype}
    narrow = bool(dtypes & set(NARROW))
    if one.kind in ELSEWHERE or op is None or "::" in op or (not narrow and "float64" in dtypes):
        return ""
    if not narrow and one.kind == "nan":
        return ""  # NaN in float32 is mathematics (log of a negative number, 0/0), not range
    wide = "float32" if narrow else "float64"
    if place.phase not in ("forward", "recompute"):
        return ""  # a gradient has the dtype of its tensor, however it was computed: a smaller loss scale is the remedy
    if place.scope:  # the result itself does not fit: the module goes on in the wider dtype, and gives it
        keys = ['level = "module"', f"scope = {json.dumps(_exact(place.scope))}", f'dtype = "{wide}"', f'returns = "{wide}"']
    else:
        keys = [f"op = {json.dumps(_exact(op))}", f'dtype = "{wide}"']
    return "\n".join(["[[rule]]", *keys]) + "\n"


def _exact(name: str) -> str:
    """Write a name as a glob that fits it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)
