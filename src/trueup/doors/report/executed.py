"""Calls that were executed again, on a terminal, as JSON and as a table: a replay, a verification, a shadow run, a healing,
a bisection.

    WRONG  npu computes aten::rsqrt forward wrong from the recorded inputs (its error is 6.8e-04 ...).

      verdict   operator                  given                 calls  x explained  x baseline  first
      wrong     aten::rsqrt forward       float32 [8,64,1]         12       2.8e+03     1.4e+04  step 0, call 41, layers.0.norm

    HEALED  with 1 rule, crf, forward, step 0, rank 0 (torch.Tensor.add) is clean, and the rest of step 0 too
            policy: runs/large-healed/policy.toml

Each begins with its sentence; operators follow, the worst first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trueup.doors.report.terminal import listing, plain_table, print_lines, print_more, print_next, progress
from trueup.foundation.words.wording import clean, counted, one_line, sci, times
from trueup.recording.execution.shadow import WORST, ShadowResult

if TYPE_CHECKING:
    from rich.console import Console

    from trueup.analysis.bisection.bisecting import Bisection
    from trueup.analysis.bisection.search import Attempt
    from trueup.analysis.remedy.healing import Healed
    from trueup.analysis.remedy.undoing import Undone
    from trueup.analysis.rerun.replay import Screening, Verification
    from trueup.recording.execution.judging import Group, Replay


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
    rated = Text(f"{counts}; {len(replay.outcomes):,} executed, {rate:,.0f} a second", style="dim")
    console.print(Padding(rated, (0, 0, 0, 2), expand=False))
    groups = [g for g in replay.groups if g.worst.verdict not in ("accurate", "not replayed", "could not tell")]
    if groups:
        console.print()
        console.print(Padding(_table(groups[:GROUPS_SHOWN], wide=console.width >= WIDE), (0, 0, 0, 2), expand=False))
        for group in groups[:GROUPS_SHOWN][:3]:
            said = f"{group.kind}: {group.worst.sentence} (rule: {group.worst.rule}; {group.worst.origin})"
            console.print(Padding(Text(clean(one_line(said)), style="dim"), (0, 0, 0, 2), expand=False))
        print_more(console, len(groups) - GROUPS_SHOWN, " of call", "kind")
    _reasons(replay, console)
    for note in replay.notes:
        console.print(Text(f"  note: {clean(one_line(note))}", style="dim"))


def render_screening(result: Screening, policy: Path | None, console: Console) -> None:
    """Print which operators are wrong in which model, and the one list of them; ``policy``: where it was written."""
    word, colour = _HEADS[result.exit_code]
    print_lines(console, [f"{word}  {result.sentence}"], len(word) + 2, colour)
    listing(
        console, ("model", "verdict", ">calls", ">wrong"),
        [
            (name, _HEADS[one.exit_code][0].lower(), f"{sum(one.counts.values()):,}", f"{len(one.culprits):,}")
            for name, one in result.models.items()
        ],
        GROUPS_SHOWN,
    )  # fmt: skip
    if wrong := result.wrong:
        names = [[", ".join(some) for some in (one.phases, one.wrong, one.accurate)] for one in wrong]
        rows = [(one.op, *said, _times(one.worst.excess)) for one, said in zip(wrong, names, strict=True)]
        listing(console, ("operator", "phases", "wrong in", "right in", ">x explained"), rows, GROUPS_SHOWN)
    if result.policy:
        console.print(Text("\n  policy.toml", "bold"))
        console.print(Padding(Text(clean(result.policy.rstrip()), "cyan"), (0, 0, 0, 4), expand=False))
        file = policy or "policy.toml"
        print_next(console, "run them on the CPU, in each model", [f"trueup capture --policy {file} -o RUN -- COMMAND"])
    if result.black_list:
        print_next(console, "or for the device as a whole", [f"export CUSTOM_DEVICE_BLACK_LIST={result.black_list}"])
    for note in dict.fromkeys(note for one in result.models.values() for note in one.notes):
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
        console.print(Padding(Text(clean(one_line(f"{number:,} x {kind}: {why}"))), (0, 0, 0, 4), expand=False))
    print_more(console, len(found) - REASONS_SHOWN, "", "reason")


def render_verification(found: Verification, console: Console) -> None:
    """Print which calls of a capture give the recorded bits again, and why the others do not."""
    word, colour = ("REPRODUCED", "bold green") if not found.exit_code else ("INCOMPLETE", "bold yellow")
    console.print(Text(f"{word}  ", style=colour).append(clean(found.sentence), style="default"))
    reasons = [f"{number:,} x {kind}: {why}" for kind, why, number in found.reasons]
    damaged = [f"damaged: {said}" for said in found.damaged]
    for lines, noun, rest in ((reasons, "kind", " of call"), (damaged, "damaged tensor", "")):
        for line in lines[:REASONS_SHOWN]:
            console.print(Padding(Text(clean(one_line(line))), (0, 0, 0, 2), expand=False))
        print_more(console, len(lines) - REASONS_SHOWN, rest, noun)
    for note in found.replay.notes:
        console.print(Text(f"  note: {clean(one_line(note))}", style="dim"))


@dataclass
class _Operator:
    calls: int = 0
    worst: dict[str, Any] | None = None


def render_shadow(result: ShadowResult, limit: int, console: Console) -> None:
    """Print what was found."""
    for line in result.sentence.splitlines():
        console.print(Text(line), soft_wrap=True)
    operators = _operators(result)
    if not operators:
        return
    table = plain_table("operator", "phase", ">outputs", ">largest error", ">of what rounding explains", "state")
    ordered = sorted(operators.items(), key=lambda item: _order(item[1].worst) if item[1].worst else (len(WORST), 0.0))
    for (op, phase), operator in ordered[:limit]:
        worst = operator.worst or {}
        error, excess = worst.get("error"), worst.get("excess")
        table.add_row(
            Text(one_line(op)), Text(one_line(phase)), f"{operator.calls:,}",
            "" if error is None or math.isnan(error) else sci(error), "" if excess is None else times(excess),
            Text(one_line(str(worst.get("state")))),
        )  # fmt: skip
    console.print()
    console.print(table)
    if len(ordered) > limit:
        console.print(f"and {counted(len(ordered) - limit, 'more operator')}: --limit {len(ordered)}")


def _operators(result: ShadowResult) -> dict[tuple[str, str], _Operator]:
    found: dict[tuple[str, str], _Operator] = {}
    columns = ["op", "phase", "state", "error", "excess"]
    for row in result.calls.select(columns).to_pylist():
        if row["state"] not in WORST:
            continue
        operator = found.setdefault((row["op"], row["phase"]), _Operator())
        operator.calls += 1
        if operator.worst is None or _order(row) < _order(operator.worst):
            operator.worst = row
    return found


def _order(row: dict[str, Any]) -> tuple[int, float]:
    return WORST.index(row["state"]), -(row["excess"] or 0.0)


HEALED = {"healed": "bold green", "nothing to heal": "bold green", "not healed": "bold red", "could not tell": "bold yellow"}


def render_healing(found: Healed | Undone, console: Console) -> None:
    """Print it."""
    head = f"{found.verdict.upper()}  "
    first, *rest = clean(found.sentence).splitlines()
    print_lines(console, [head + first, *(" " * len(head) + line for line in rest)], len(head), HEALED[found.verdict])
    for line in found.uses:
        console.print(Padding(Text(one_line(line), "dim", overflow="fold"), (0, 0, 0, len(head)), expand=False))
    if found.policy is not None and found.policy.exists():
        console.print()
        console.print(Text(f"  {found.policy.name}", "bold"))
        console.print(Padding(Text(clean(found.policy.read_text(encoding="utf-8").rstrip()), "cyan"), (0, 0, 0, 4), expand=False))
    if found.verdict == "healed":
        from trueup.analysis.remedy.undoing import Undone

        keep = "keep it in the training"
        keep = f"set it so in the script, or {keep}" if isinstance(found, Undone) else keep
        print_next(console, keep, [f'trueup.apply_policy(model, "{found.policy}")'])


BISECTED = {
    "found": "bold green", "nothing to find": "bold yellow", "outside": "bold yellow", "could not tell": "bold yellow",
}  # fmt: skip
ATTEMPT_STYLES = {"good": "green", "bad": "red", "skip": "yellow"}
NAMES_WIDTH = 60


def attempts_progress(console: Console, said: Callable[[str], str] = one_line) -> Callable[[Attempt], None]:
    """Return what prints the runs of a bisection as they are made: what was changed (``said`` names a change), how long it took,
    what the check said."""
    print_run = progress(console, NAMES_WIDTH)

    def tell(attempt: Attempt) -> None:
        why = f"  {one_line(attempt.why)}" if attempt.why else ""
        chosen = _chosen([said(name) for name in attempt.chosen])
        print_run(chosen, attempt.seconds, (attempt.outcome, ATTEMPT_STYLES[attempt.outcome]), (why, "dim"))

    return tell


def _chosen(names: Sequence[str]) -> str:
    """Say which changes were made: as many whole names as there is room for, and how many more."""
    text = "as it is"
    for shown in range(len(names), 0, -1):
        rest = len(names) - shown
        text = ", ".join(names[:shown]) + (f" and {rest} more" if rest else "")
        if len(text) <= NAMES_WIDTH:
            break
    return text


def render_bisection(found: Bisection, console: Console) -> None:
    """Print what a bisection found, and what to do with it."""
    first, *rest = clean(found.sentence).splitlines()
    indent = first.index("  ") + 2
    console.print()
    print_lines(console, [first, *(" " * indent + line for line in rest)], indent, BISECTED[found.verdict])
    for number, line in enumerate(found.advice):
        if number == 0:
            console.print()
        mark = ("next  ", "bold") if number == 0 else ("      ", "")
        console.print(Text.assemble(mark, (clean(line), "cyan")), soft_wrap=True)
