"""TensorFlow's debugger, version 2: what ``tf.debugging.experimental.enable_dump_debug_info`` writes, as calls.

    tfdbg_events.<seconds>.<host>.metadata                   the version
                                 .source_files .stack_frames where Python stood
                                 .graphs                     operations put into graphs: type, name, inputs, stack
                                 .execution                  operations that executed eagerly, and functions, with what they gave
                                 .graph_execution_traces     what the operations of graphs gave

A graph's results carry the time at which they came; the function that ran them is the first whose end is later. `tfdbg2_events`
reads the files, `tfdbg2_calls` finds runs and steps, `tfdbg2_numbers` knows what a mode keeps of a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from trueup.exchange.readers.dump import Dump, ForeignCall, Part
from trueup.exchange.readers.notes import Notes
from trueup.exchange.readers.tensorflow_messages import require
from trueup.exchange.readers.tfdbg2_calls import executed, in_order
from trueup.exchange.readers.tfdbg2_events import Events, Made
from trueup.exchange.readers.tfdbg2_numbers import FULL_TENSOR, LACKS, MODES
from trueup.exchange.readers.tree import Tree, places

NAME = "tfdbg2"

_FILE = re.compile(
    r"(?P<prefix>.*tfdbg_events\.[^/]+)\.(?P<kind>metadata|source_files|stack_frames|graphs|execution|graph_execution_traces)"
)

_LACKS = (
    "what a function is given and what is constant are not in the dump, so not all inputs of a call are",
    "the backward is operations of its own: beside a native capture, which has gradients by forward call, it is on one side only",
)


def find(tree: Tree, notes: Notes) -> Dump | None:
    """Find sets of files by their names' endings and the heads of their records."""
    sets: dict[str, dict[str, str]] = {}
    for path in sorted(tree.files):
        if (match := _FILE.fullmatch(path)) is not None:
            sets.setdefault(match["prefix"], {})[match["kind"]] = path
    sets = {prefix: files for prefix, files in sets.items() if "execution" in files or "graph_execution_traces" in files}
    if not sets:
        return None
    require(str(tree.source))
    parts: list[Part] = []
    modes: set[int] = set()
    for number, (prefix, files) in enumerate(sorted(sets.items())):
        rank = places(f"{prefix}/x").get("rank", number)
        events = Events(tree, files, notes)
        made = executed(events, notes)
        steps = in_order(made)
        parts += [Part(rank, step, partial(_calls, events, calls)) for step, calls in enumerate(steps)]
        modes |= events.modes
    if len(sets) > 1:
        notes.say(f"{len(sets)} processes wrote there; they are ranks in the order of their times and hosts")
    detail = "tensor" if FULL_TENSOR in modes else "stats"
    lacks = [LACKS[mode] for mode in sorted(modes) if mode in LACKS]
    lacks += _LACKS
    named = ", ".join(MODES[mode] for mode in sorted(modes) if mode in MODES)
    return Dump(f"tfdbg2 {named}".strip(), "tensorflow", ("api",), detail, parts, notes, lacks)


def _calls(events: Events, calls: list[Made]) -> Iterator[ForeignCall]:
    for call in calls:
        yield events.call(call)
