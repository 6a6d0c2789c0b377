"""A replay on a terminal, as JSON and as a table: one sentence, then operators by shape class, worst first.

    WRONG  npu computes aten::rsqrt forward wrong from the recorded inputs (its error is 6.8e-04 ...).

      verdict   operator                  given                 calls  x explained  x baseline  first
      wrong     aten::rsqrt forward       float32 [8,64,1]         12       2.8e+03     1.4e+04  step 0, call 41, layers.0.norm
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.foundation.words.wording import clean, counted, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.rerun.verify import Verification
    from trueup.recording.execution.outcomes import Group, Replay

COLOURS = {
    "wrong": "bold red", "crashed": "bold red", "suspicious": "yellow", "ill-conditioned": "yellow", "could not tell": "cyan",
    "not replayed": "cyan", "accurate": "green",
}  # fmt: skip
GROUPS_SHOWN = 15
REASONS_SHOWN = 10
WIDE = 120


def render(replay: Replay, console: Console) -> None:
    """Print a replay."""
    word, colour = _HEADS[replay.exit_code]
    line = Text(f"{word}  ", style=colour)
    line.append(clean(replay.sentence), style="default")
    console.print(line)
    rate = len(replay.outcomes) / replay.seconds if replay.seconds > 0 else math.nan
    counts = ", ".join(f"{number:,} {name}" for name, number in replay.counts.items())
    console.print(Padding(Text(f"{counts}; {len(replay.outcomes):,} executed, {rate:,.0f} a second", style="dim"), (0, 0, 0, 2)))
    groups = [g for g in replay.groups if g.worst.verdict not in ("accurate", "not replayed", "could not tell")]
    if groups:
        console.print()
        console.print(Padding(_table(groups[:GROUPS_SHOWN], wide=console.width >= WIDE), (0, 0, 0, 2)))
        for group in groups[:GROUPS_SHOWN][:3]:
            said = f"{group.kind}: {group.worst.sentence} (rule: {group.worst.rule}; {group.worst.origin})"
            console.print(Padding(Text(clean(one_line(said)), style="dim"), (0, 0, 0, 2)))
        if len(groups) > GROUPS_SHOWN:
            console.print(f"  and {len(groups) - GROUPS_SHOWN} more kinds of call", highlight=False)
    _reasons(replay, console)
    for note in replay.notes:
        console.print(Text(f"  note: {clean(one_line(note))}", style="dim"))


_HEADS = {0: ("ACCURATE", "bold green"), 1: ("WRONG", "bold red"), 2: ("COULD NOT TELL", "bold yellow")}


def _table(groups: list[Group], *, wide: bool) -> Table:
    """Lay groups out; on a narrow terminal without the scope and the ratio to the baseline, which `replay.json` has."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    names = ["verdict", "operator", "given", "calls", "x explained", *(["x baseline"] if wide else []), "worst" if wide else "call"]
    for name in names:
        right = name in ("calls", "x explained", "x baseline", "call")
        least, side = {"operator": 20, "given": 12}.get(name, len(name)), "right" if right else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=right or name == "verdict", min_width=least)  # type: ignore[arg-type]
    for group in groups:
        worst = group.worst
        where = f"step {worst.step}, call {worst.seq}{', ' + worst.scope if worst.scope else ''}" if wide else str(worst.seq)
        cells = [Text(worst.verdict, style=COLOURS[worst.verdict]), Text(clean(group.kind.removeprefix("torch.")))]
        cells += [Text(clean(group.shapes)), Text(f"{group.calls:,}"), Text(_times(worst.excess))]
        cells += [Text(_times(worst.ratio))] if wide else []
        table.add_row(*cells, Text(clean(one_line(where))))
    return table


def _times(number: float) -> str:
    return "" if math.isnan(number) else "inf" if math.isinf(number) else f"{number:.1e}"


def _reasons(replay: Replay, console: Console) -> None:
    """Say what could not be judged, and why: it is no pass."""
    found: dict[tuple[str, str], int] = {}
    for outcome in replay.outcomes:
        if outcome.verdict in ("not replayed", "could not tell"):
            key = (outcome.kind, outcome.sentence)
            found[key] = found.get(key, 0) + outcome.times
    if not found:
        return
    console.print()
    console.print(Text(f"  not judged ({counted(sum(found.values()), 'call')})", style="bold"))
    for (kind, why), number in sorted(found.items(), key=lambda item: -item[1])[:REASONS_SHOWN]:
        console.print(Padding(Text(clean(one_line(f"{number:,} x {kind}: {why}"))), (0, 0, 0, 4)))
    if len(found) > REASONS_SHOWN:
        console.print(f"    and {len(found) - REASONS_SHOWN} more reasons", highlight=False)


def to_json(replay: Replay) -> dict[str, Any]:
    """Return the verdict as JSON: what ``replay.json`` holds beside the settings."""
    return {
        "verdict": {0: "accurate", 1: "wrong", 2: "inconclusive"}[replay.exit_code],
        "sentence": replay.sentence,
        "device": replay.device,
        "reference": replay.reference,
        "counts": replay.counts,
        "seconds": round(replay.seconds, 3),
        "culprits": [o.to_json() for o in replay.culprits[:100]],
        "groups": [
            {"operator": g.kind, "level": g.level, "given": g.shapes, "calls": g.calls, "verdicts": g.verdicts}
            | {"worst": g.worst.to_json()}
            for g in replay.groups
        ],
        "notes": list(replay.notes),
    }  # fmt: skip


def to_table(replay: Replay) -> pa.Table:
    """Return a row for each call that was executed."""
    rows = [{name: getattr(o, name) for name in o.__dataclass_fields__} for o in replay.outcomes]
    return pa.Table.from_pylist(rows) if rows else pa.table({"verdict": pa.array([], pa.string())})


def render_verification(found: Verification, console: Console) -> None:
    """Print which calls of a capture give the recorded bits again, and why the others do not."""
    word, colour = ("REPRODUCED", "bold green") if not found.exit_code else ("INCOMPLETE", "bold yellow")
    console.print(Text(f"{word}  ", style=colour).append(clean(found.sentence), style="default"))
    for kind, why, number in found.reasons[:REASONS_SHOWN]:
        console.print(Padding(Text(clean(one_line(f"{number:,} x {kind}: {why}"))), (0, 0, 0, 2)))
    if len(found.reasons) > REASONS_SHOWN:
        console.print(f"  and {len(found.reasons) - REASONS_SHOWN} more kinds of call", highlight=False)
    for said in found.damaged[:REASONS_SHOWN]:
        console.print(Padding(Text(clean(one_line(f"damaged: {said}"))), (0, 0, 0, 2)))
    if len(found.damaged) > REASONS_SHOWN:
        console.print(f"  and {len(found.damaged) - REASONS_SHOWN} more damaged tensors", highlight=False)
    for note in found.replay.notes:
        console.print(Text(f"  note: {clean(one_line(note))}", style="dim"))
