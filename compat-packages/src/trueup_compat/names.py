"""What ptdbg_ascend and msprobe call a call and its tensors: ``Functional_linear_145_backward_output.0``.

The way back is in `trueup.exchange.readers.ascend`; the table of positions is the same one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trueup.exchange.readers.ascend import position

Direction = Literal["forward", "backward"]

KINDS = (
    ("torch.nn.functional.", "Functional"), ("torch.Tensor.", "Tensor"), ("torch.distributed.", "Distributed"),
    ("torch_npu.", "NPU"), ("torch.", "Torch"), ("aten::", "Aten"),
)  # fmt: skip
"""Beginnings of our names of functions, the longest first, and the tools' kinds."""
VF = frozenset({"torch.lstm", "torch.gru", "torch.rnn_tanh", "torch.rnn_relu"})
"""Functions that `torch.nn` calls as members of `torch._VF`, under which the tools look for them."""
NO_CALLS = frozenset({"torch.Tensor.backward"})
"""Calls of a capture that are no API call for the tools."""
WRITTEN = ("output.written.", "output.running_", "output.buffer.")
"""Beginnings of slots that the tools do not see: what a call writes beside its results."""

_ALLOWED = re.compile(r"[^A-Za-z0-9_.\-]")
LONGEST = 200
"""Characters of a name, which is a file's name too."""


@dataclass(frozen=True, slots=True)
class CallName:
    """A call as the tools name it; ``kind`` is empty for a module, whose ``api`` is path and class."""

    kind: str
    api: str
    index: int
    direction: Direction

    def text(self, separator: str) -> str:
        """Write the name: with ``_`` as ptdbg 1 to 5 does, with ``.`` as ptdbg 6 and msprobe do.

        >>> CallName("Functional", "linear", 145, "backward").text("_")
        'Functional_linear_145_backward'
        """
        path = (self.kind, self.api) if self.kind else (self.api,)
        return _clean(separator.join((*path, str(self.index), self.direction)))


def api_of(op: str) -> tuple[str, str] | None:
    """Return kind and name of one of our functions; None for what the tools do not wrap (``torch.nn.init``, ``torch.linalg``).

    >>> api_of("torch.nn.functional.linear")
    ('Functional', 'linear')
    """
    if op in NO_CALLS:
        return None
    if op in VF:
        return "VF", op.removeprefix("torch.")
    for beginning, kind in KINDS:
        if op.startswith(beginning):
            api = op[len(beginning) :]
            return None if "." in api else (kind, api)
    return None


def tool_slot(op: str, slot: str) -> str | None:
    """Return what the tools call a slot of ours; None where they have no such tensor.

    In the backward ``input`` is what comes to the call, ``output`` what leaves it. A gradient bears the place of its argument.

    >>> tool_slot("torch.nn.functional.layer_norm", "input.weight")
    'input.2'
    >>> tool_slot("torch.nn.functional.linear", "grad_input.1")
    'output.1'
    """
    if slot.startswith(WRITTEN):
        return None
    side, _, rest = slot.partition(".")
    if side in ("input", "grad_input"):
        first, dot, below = rest.partition(".")
        rest = f"{position(op, first)}{dot}{below}"
    named = {"input": "input", "output": "output", "grad_output": "input", "grad_input": "output"}.get(side)
    return None if named is None else _clean(f"{named}.{rest}")


def _clean(text: str) -> str:
    return _ALLOWED.sub("_", text)[:LONGEST]
