"""Which operators of a capture made NaN or Inf of finite numbers."""

from __future__ import annotations

from pathlib import Path

from trueup.analysis.anomalies import overflow
from trueup_compat.dumper.hdf5 import numbered


def overflowed(capture: Path) -> dict[str, str]:
    """Return the operators, as ``name/seqid``, with a sentence for each."""
    known = {call.seq: call for call in numbered(capture)}
    found = ((known.get(one.place.seq), one.sentence) for one in overflow(capture).anomalies)
    return {call.path: sentence for call, sentence in found if call is not None}
