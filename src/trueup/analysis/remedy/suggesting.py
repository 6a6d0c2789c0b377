"""A policy for a finding: the text of a `policy.toml` that runs the call found in another way, to see whether that heals the run.

    # suggested for: neck.lstm, backward, step 0, rank 0 (torch.lstm)
    # the result is wrong on its device, so it runs on the CPU
    # a guess, until a run with it has been compared
    [[rule]]
    scope = "neck.lstm"
    op = "torch.lstm"
    device = "cpu"
"""

from __future__ import annotations

import json
import re

from trueup.foundation.model import Finding
from trueup.foundation.words.wording import one_line

HALVES = ("float16", "bfloat16")
ROUNDING = 64.0
"""Times the explained error up to which an error in half precision is taken for one of rounding: a wider dtype is tried first then.
Accumulating 4,096 terms in the dtype itself, instead of float32, is off by about sqrt(4096) = 64 times the rounding of one result
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2, with random signs)."""


def suggest(finding: Finding) -> str | None:
    """Return the text of a policy for a call that a comparison found, or None where no policy can help.

    A rounding-like error in half precision, or one that overflows there, asks for float32; a result that is wrong on its device
    asks for the CPU. That is a guess, and the text says so: run with it and compare again.

    Args:
        finding: a culprit of `trueup.compare`.
    """
    if finding.kind != "operator" or finding.phase not in ("forward", "recompute", "backward", "optimizer"):
        return None
    where = _where(finding)
    if where is None:
        return None
    change, because = _change(finding)
    lines = [
        f"# suggested for: {one_line(finding.name)} ({one_line(finding.op)})",
        f"# {because}",
        "# a guess, until a run with it has been compared",
        "[[rule]]",
        *(f"{key} = {_quoted(value)}" for key, value in where),
        change,
    ]
    return "\n".join(lines) + "\n"


def _where(finding: Finding) -> list[tuple[str, str]] | None:
    """Return the keys that select the call, or None where no rule reaches it."""
    op = finding.api if finding.level == "aten" else finding.op
    if op is None or "::" in op:
        return None
    found = [("level", "module")] if finding.level == "module" else []
    if not finding.alike and (finding.scope or finding.level == "module"):  # else it is wrong wherever it runs
        found.append(("scope", _exact(finding.scope)))
    found.append(("op", _exact(op)))
    if finding.phase == "optimizer":
        found.append(("phase", "optimizer"))
    return found


def _change(finding: Finding) -> tuple[str, str]:
    dtypes = {slot.dtype[1] for slot in finding.slots if slot.dtype[1]}
    overflows = any(
        getattr(slot.candidate, name, 0) > getattr(slot.baseline, name, 0)
        for slot in finding.slots if slot.slot.startswith(("output", "grad_input"))
        for name in ("n_nan", "n_posinf", "n_neginf", "n_saturated")
    )  # fmt: skip
    halves = sorted(dtypes.intersection(HALVES))
    if halves and (overflows or finding.ratio <= ROUNDING):
        what = "it leaves the range" if overflows else "its error is like one of rounding"
        return 'dtype = "float32"', f"{what} in {' and '.join(halves)}, so it runs in float32"
    wider = '\ndtype = "float32"' if halves else ""  # not every function of the CPU takes half precision
    return f'device = "cpu"{wider}', "the result is wrong on its device, so it runs on the CPU"


def _exact(name: str) -> str:
    """Return a pattern that matches this name alone."""
    if re.search(r"[*?\[/]", name):
        return f"/^{re.escape(name)}$/"
    return name


def _quoted(text: str) -> str:
    """Write a TOML string: a JSON string is one, but for the DEL that JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
