"""The verdict in words: a few lines of plain text, the first of which can stand alone.

    DEVIATES  first culprit: neck.lstm, backward, step 0, rank 0  (torch.lstm / aten::_thnn_fused_lstm_cell_backward…)
              inputs agree (rel. L2 3e-8), outputs do not (rel. L2 2.1e-1, 3.5e6 x the expected rounding error)
              your code: centernet.py:57 in forward
              37 later calls deviate because their inputs do

Pure, and dependent on facts alone: ``Result.sentence`` is filled with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trueup.foundation.facts.operators import says
from trueup.foundation.facts.slots import STEP
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.model import Finding, Occurrence, SlotComparison, VerdictWord
from trueup.foundation.words.reasons import in_words, what_and_next
from trueup.foundation.words.wording import ELLIPSIS, counted, in_runs, is_own, one_line, sci, shorten, times, user_source

HEADS: dict[VerdictWord, str] = {
    "deviates": "DEVIATES  ",
    "aligned": "ALIGNED  ",
    "inconclusive": "COULD NOT TELL  ",
}
ARGUMENT_WIDTH = 60
LINE_WIDTH = 60
"""Characters of a line of the user's that are shown where it calls a function that no record names."""
SIGNS = "*/+-%@<>"
"""Of arithmetic: a line that has one says by itself what it computes."""
NUMBER = re.compile(r'"?-?(\d+(\.\d*)?(e[+-]?\d+)?|inf|nan)"?')  # as JSON; Paddle writes some as texts
LARGE = 0.1  # relative error from which on nobody would say that inputs agree, whatever the outputs'
ROUNDED = 1e-5
"""Relative error from which inputs are not said to agree where a finding has a reason that holds however far apart they are."""
DRAWS = (
    "devices draw different numbers from one seed ({0} in the baseline, {1} in the candidate): draw with a CPU generator in both "
    "runs and move the result, or save what one run draws and load it in the other"
)
RUNS_NAMED = 6  # runs of ranks, of which the same is said, that are named before they are counted
OTHERS_NAMED = 3  # how many further culprits the sentence names before it counts them


@dataclass(frozen=True)
class Otherwise:
    """What differs between two runs and shows in no culprit, in words."""

    settings: str = ""  # settings that change numbers
    seen: str = ""  # what the calls show: another dtype, micro-batches
    single: bool = False  # whether it is one setting, so that the first line has room for it
    beside: str = ""  # what one run alone does and no culprit shows: it clips, scales the loss
    devices: tuple[str, ...] = ()  # kinds of device of the baseline and the candidate, where these are two
    exact: bool = False  # whether both captures kept their tensors, so that every error was measured

    @property
    def head(self) -> str:
        """What a verdict begins with that names no call."""
        return "; ".join(filter(None, (self.seen, self.settings and f"set differently: {self.settings}")))


def verdict_lines(
    verdict: VerdictWord,
    culprits: Sequence[Finding],
    victims: Sequence[Finding],
    unmatched: Sequence[Finding],
    notes: Sequence[Reason | str],
    counts: Mapping[str, int],
    occurrences: Sequence[Occurrence] = (),
    always: Sequence[Reason | str] = (),
    otherwise: Otherwise = Otherwise(),
) -> list[str]:
    """Say a verdict in lines of plain text: the head line, then lines indented by the width of the head's first word.

    The first of the ranked ``culprits`` is the one to look at; ``victims`` only pass on what they got; ``unmatched`` calls exist
    in only one run. ``notes`` say what could not be seen or compared; those in ``always`` are said whatever the verdict and their
    number. ``counts`` are calls by state, as in ``Result.counts``, and ``steps`` where given; ``occurrences`` say where the
    difference first appears on each rank; ``otherwise`` holds what differs between the runs and shows in no culprit.
    """
    notes = [note for note in notes if note not in always]
    if verdict == "aligned":
        said = [*filter(None, [otherwise.head]), *_aligned(notes, counts)]
    elif verdict == "inconclusive":
        said = _inconclusive(unmatched, notes, counts, otherwise)
    elif culprits:
        said = [line for _, line in culprit_lines(culprits, victims, unmatched)]
        said += [DRAWS.format(*otherwise.devices)] if otherwise.devices and _draws(culprits[0]) else []
        said += _other_ranks(culprits[0], occurrences)
        if otherwise.single and not culprits[0].cause:
            said[0] += f"; set differently: {otherwise.settings}"
    else:
        said = _no_culprit(victims, unmatched, counts)
    if otherwise.settings and otherwise.settings not in said[0]:
        always = [*always, f"{'also ' if verdict == 'deviates' else ''}set differently: {otherwise.settings}"]
    if otherwise.beside and verdict == "deviates":
        always = [*always, f"besides, {otherwise.beside}"]
    place = len(said) if verdict == "deviates" else 1 + (said[0] == otherwise.head)
    said[place:place] = [f"note: {one_line(in_words(note))}" for note in always]
    head = HEADS[verdict]
    return [head + said[0], *(" " * len(head) + line for line in said[1:])]


def occurrence_text(one: Occurrence) -> str:
    """Say where the difference first appears on a rank, and which rank it came from."""
    place = one_line(f"{one.scope}, {one.op}" if one.scope else one.op)
    where = f"first in {place}, {one.phase}, step {one.step} (rel. L2 {sci(one.error)})"
    if one.sender is None:
        return f"rank {one.rank}: {where}, which is where it arises"
    origin = f", where it came from rank {one.cause}" if one.cause is not None else ", and where it arose is not known"
    return f"rank {one.rank} got it from rank {one.sender}{'' if one.cause == one.sender else origin}: {where}"


def ranks_alike(occurrences: Sequence[Occurrence]) -> list[tuple[Occurrence, str, str]]:
    """Join ranks of which all but the number is the same: the first of them, the ranks in short, and what is said of them."""
    found: dict[str, list[Occurrence]] = {}
    for one in occurrences:
        found.setdefault(one.sentence.removeprefix(f"rank {one.rank}"), []).append(one)
    told = []
    for said, alike in found.items():
        runs = in_runs([one.rank for one in alike], ", ").split(", ")
        more = f"{ELLIPSIS} ({len(alike):,} ranks)" if len(runs) > RUNS_NAMED else ""
        ranks = ", ".join(runs[:RUNS_NAMED]) + more
        told.append((alike[0], ranks, f"rank{'s' if len(alike) > 1 else ''} {ranks}{said}"))
    return told


def _draws(finding: Finding) -> bool:
    """Tell whether a culprit is a draw of random numbers that nothing else explains."""
    return not finding.cause and (finding.kind == "random" or finding.rule.startswith("random"))


def _other_ranks(first: Finding, occurrences: Sequence[Occurrence]) -> list[str]:
    """Say where the difference reached the ranks that are not the first culprit's."""
    received = [o for o in occurrences if o.rank != first.rank and o.sender is not None]
    alone = [o for o in occurrences if o.rank != first.rank and o.sender is None]
    lines = []
    if received:
        more = f"{counted(len(received), 'rank')} got it from others; " if len(received) > 1 else ""
        lines.append(more + received[0].sentence)
    if alone:
        ranks = one_line(", ".join(str(o.rank) for o in alone[:OTHERS_NAMED])) + (ELLIPSIS if len(alone) > OTHERS_NAMED else "")
        lines.append(f"a difference arises on rank{'s' if len(alone) > 1 else ''} {ranks} too")
    return lines


def evidence(finding: Finding) -> str:
    """Say what was measured at a call, in one line: ``inputs agree (rel. L2 3e-8), outputs do not (...)``, without its cause."""
    reasons = [one for one in one_line(finding.because).split("; ") if one and one not in one_line(finding.cause)]
    return "; ".join([_EVIDENCE[finding.kind](finding), *reasons])


def operators(finding: Finding) -> str:
    """Name the operators of a call, user-facing first: ``torch.lstm / aten::_thnn_fused_lstm_cell_backward…``."""
    if finding.level == "aten":
        names = [finding.api, finding.op]
    else:
        more = ELLIPSIS if len(finding.aten) > 1 else ""
        names = [finding.api or finding.op, finding.aten[0] + more if finding.aten else None]
    return " / ".join(one_line(name) for name in dict.fromkeys(names) if name)


def changed_arguments(slot: SlotComparison) -> list[tuple[str, str, str]]:
    """Return ``(name, baseline, candidate)`` of the arguments that differ; the slot holds them as JSON objects."""
    sides = [_arguments(slot.slot, held) for held in (slot.baseline, slot.candidate)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    pairs = [(one_line(name), sides[0].get(name, "absent"), sides[1].get(name, "absent")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def named_argument(finding: Finding) -> str:
    """Name the arguments of a call that differ: ``label_smoothing of torch.nn.functional.cross_entropy: 0.0 in …``. Unnamed
    arguments tell a reader nothing, and those of the backward follow from the forward's."""
    slot = _worst(finding, "value") if finding.kind == "argument" and finding.phase != "backward" else None
    function = one_line(finding.api or finding.op)
    changes = changed_arguments(slot) if slot is not None else []
    names = [argument_name(finding.op, given) for given, *_ in changes]
    named = [
        f"{name} of {function}: {_as_said(name, before)} in the baseline, {_as_said(name, after)} in the candidate"
        for name, (_, before, after) in zip(names, changes, strict=True)
        if name.isidentifier() and name != "arguments"
    ]
    return "; ".join(named)


REDUCTIONS = {"0": '"none"', "1": '"mean"', "2": '"sum"'}
"""How PyTorch's functions call what its operators count (``torch.nn._reduction.get_enum``)."""


def _as_said(name: str, value: str) -> str:
    return REDUCTIONS.get(value, value) if name == "reduction" else value


def given_number(finding: Finding) -> str:
    """Say which number a call in the user's own line was given: ``torch.Tensor.mul_ at train.py:31: 0.999 in …``. A number tells
    a reader what an unnamed shape or dimension does not."""
    slot = _worst(finding, "value") if finding.kind == "argument" and finding.phase != "backward" else None
    line = "" if finding.source is None else user_source(finding.source, finding.stack)
    if slot is None or not is_own(line):
        return ""
    numbers = [change for change in changed_arguments(slot) if all(map(NUMBER.fullmatch, change[1:]))]
    said = "; ".join(
        f"{_among(finding, given)}{before} in the baseline, {after} in the candidate" for given, before, after in numbers
    )
    function, written = one_line(finding.api or finding.op), finding.source_line or ""
    named = not written or function.rpartition(".")[2] in written or not set(SIGNS).isdisjoint(written)
    through = "" if named else f" ({shorten(one_line(written.strip()), LINE_WIDTH)})"
    return f"{function} at {line.rpartition(' in ')[0]}{through}: {said}" if said else ""


def _position(finding: Finding, given: str) -> str:
    """Return what an argument is called (`argument_name`), one that was given by position as the framework has it."""
    name = argument_name(finding.op, given)
    at = int(name) if name.isdecimal() else len(finding.positions)
    return finding.positions[at] or name if at < len(finding.positions) else name


def _among(finding: Finding, given: str) -> str:
    """Name one of several arguments before its values: ``std = ``. The only one beside the tensor needs no name."""
    name = _position(finding, given)
    return f"{name} = " if name.isidentifier() and len(finding.positions) > 2 else ""


def argument_name(op: str, given: str) -> str:
    """Return what an argument is called, which may have been given by position: ``input.2`` of cross_entropy is ``weight``."""
    name = given.removeprefix("input.")
    names = says(op, "positions") if name.isdecimal() else None
    return str(names[int(name)]) if names and int(name) < len(names) else name


def harmless_argument(finding: Finding, more: int) -> str:
    """Say of a call that it was given another argument, and that its results do not show it; ``more`` calls are like it."""
    others = f", and so it is in {counted(more, 'more call')}" if more else ""
    agrees = f"its outputs agree within rounding (rel. L2 {sci(finding.error_out)})"
    return f"{one_line(finding.name)} ({operators(finding)}): {_argument(finding)}; {agrees}{others}"


def _arguments(name: str, held: object) -> dict[str, str]:
    """Read a JSON object of arguments; anything else (it may have been cut) is one argument named like the slot."""
    try:
        read = json.loads(held) if isinstance(held, str) else None
    except ValueError:
        read = None
    if isinstance(read, dict):
        return {key: shorten(one_line(json.dumps(value)), ARGUMENT_WIDTH) for key, value in read.items()}
    return {} if held is None else {name: shorten(one_line(str(held)), ARGUMENT_WIDTH)}


def culprit_lines(culprits: Sequence[Finding], victims: Sequence[Finding], unmatched: Sequence[Finding]) -> list[tuple[str, str]]:
    """Say what was found, the first culprit first, as ``(what a line is of, line)``: ``cause``, ``place``, ``size``, ``certainty``,
    ``reach`` (and what may hide behind it)."""
    first = culprits[0]
    word = "first culprit" if first.confidence == "high" else "first suspect"
    lines = [("place", f"{word}: {one_line(first.name)}  ({operators(first)})"), ("size", evidence(first))]
    if first.cause:
        lines[:1] = [("cause", one_line(first.cause)), ("place", f"first seen in: {_where(first)}  ({operators(first)})")]
    if first.confidence != "high":
        could = "could be rounding: compare two runs of the baseline to see how far they differ by themselves"
        lines.append(("certainty", could))
    if first.source:
        lines.append(("place", f"your code: {user_source(first.source, first.stack)}"))
    passed_on = first.victims or (len(victims) if len(culprits) == 1 else 0)
    if passed_on:
        its = "its" if passed_on == 1 else "their"
        lines.append(("reach", f"{counted(passed_on, 'later call')} {_verb(passed_on, 'deviate')} because {its} inputs do"))
    lines += [("reach", line) for line in _behind(first)]
    if first.alike:
        lines.append(("reach", _alike(first)))
    if len(culprits) > 1:
        lines.append(("reach", _others(culprits[1:])))
    if unmatched:
        lines.append(("reach", f"{counted(len(unmatched), 'call')} {_verb(len(unmatched), 'exist')} in only one run"))
    return lines


def _where(finding: Finding) -> str:
    """Name the call; what an optimizer made of several parameters stands in no module."""
    written = [(slot.slot.partition(":")[0], slot.state) for slot in finding.slots if slot.slot.startswith("output.")]
    every, wrong = {name for name, _ in written}, {name for name, state in written if state == "deviates"}
    if finding.op != STEP or len(wrong) < 2:
        return one_line(finding.name)
    which = "all" if wrong == every else f"{len(wrong):,} of"
    return f"{which} {counted(len(every), 'parameter')}, {finding.phase}, step {finding.step}, rank {finding.rank}"


def _behind(first: Finding) -> list[str]:
    """Say whether another fault may hide behind the first one."""
    lines = []
    if first.cleared:
        were = "was computed again from its own inputs" if first.cleared == 1 else "were computed again from their own inputs"
        lines.append(f"{counted(first.cleared, 'call')} behind it {were}, and not wrong")
    if first.beyond and first.cleared:
        lines.append(f"{counted(first.beyond, 'call')} could not be told: a second fault would not show there")
    elif first.beyond:
        hidden = f"a second fault could hide in {first.beyond:,} of them, whose inputs are far off"
        lines.append(f"{hidden}: record the candidate with --detail tensor, and compare again")
    return lines


def _alike(first: Finding) -> str:
    """Say which further calls of the first culprit's kind deviate by themselves; an optimizer has one a weight, all of one name."""
    where = [one_line(name) for name in first.alike_in if name != first.name][:OTHERS_NAMED]
    named = f": {'; '.join(where)}{ELLIPSIS if first.alike > len(where) else ''}" if where else ""
    if first.cause:
        return f"it shows in {counted(first.alike, 'further call')}, too{named}"
    itself = "itself" if first.alike == 1 else "themselves"
    return f"{counted(first.alike, 'further call')} of its kind {_verb(first.alike, 'deviate')} by {itself}, too{named}"


def _others(others: Sequence[Finding]) -> str:
    shown = others[:OTHERS_NAMED]
    named = "; ".join(_named(o) for o in shown)
    left = len(others) - len(shown)
    rest = f"; and {left:,} more" if left else ""
    return f"{counted(len(others), 'further culprit')} {_verb(len(others), 'deviate')} independently: {named}{rest}"


def _named(other: Finding) -> str:
    called = f"{one_line(other.cause)}, in {one_line(other.name)}" if other.cause else one_line(other.name)
    return f"{called} ({counted(1 + other.alike, 'call')} alike)" if other.alike else called


def _no_culprit(victims: Sequence[Finding], unmatched: Sequence[Finding], counts: Mapping[str, int]) -> list[str]:
    deviating = counts.get("deviates", len(victims))
    if not deviating and unmatched:
        number = len(unmatched)
        return [
            f"the runs do not line up: {counted(number, 'call')} {_verb(number, 'exist')} in only one run",
            f"the first: {one_line(unmatched[0].name)}  ({operators(unmatched[0])}), only in the {_side(unmatched[0])}",
        ]
    lines = [
        f"{counted(deviating, 'call')} {_verb(deviating, 'deviate')}, and none of them had inputs that agree",
        "the difference starts before the first captured call: capture from step 0, with the data and the weights",
    ]
    if unmatched:
        lines.append(f"{counted(len(unmatched), 'call')} {_verb(len(unmatched), 'exist')} in only one run")
    return lines


def _aligned(notes: Sequence[Reason | str], counts: Mapping[str, int]) -> list[str]:
    steps = f" over {counted(counts['steps'], 'step')}" if counts.get("steps") else ""
    equal, inherited = counts.get("equal", 0), counts.get("inherited", 0)
    rounded = counts.get("agrees", 0) - inherited
    line = f"{counted(counts.get('compared', 0), 'call')} compared{steps}: {equal:,} bitwise equal"
    alone = [f"{number:,} only in the {side}" for side in ("baseline", "candidate") if (number := counts.get(f"only_{side}", 0))]
    line += f", {rounded:,} within rounding" + (f", {inherited:,} explained by their inputs" if inherited else "")
    line += f"; {', '.join(alone) or 'nothing unmatched'}"
    return [line, *(f"note: {one_line(in_words(note))}" for note in notes[:2]), *_more_notes(notes[2:])]


def _more_notes(notes: Sequence[Reason | str]) -> list[str]:
    return [f"and {counted(len(notes), 'more note')} in the report"] if notes else []


DECISIVE = (Why.UNREADABLE, Why.FRAGMENT, Why.FILTERS, Why.MISSING, Why.NO_MODULE)  # beside these no number of calls matters
UNTIED = "sort stably in both runs (torch.sort(..., stable=True)), or make values unequal that are chosen from, and compare again"
PARTIAL = "; a gradient that is summed over several uses is recorded at level aten only, and left out here"
"""Said of gradient norms that are less than what a script prints."""

OPEN = (Why.UNSEEN, Why.NOISY, Why.ROUNDS, Why.STALE, Why.UNLIKE_SIBLINGS)
"""Reasons that say what to do themselves, once calls were compared."""


FINER = "capture both runs with --detail tensor, where every error is measured and not estimated"
COARSER = "compare at a coarser level, --level api or --level module, where the runs may line up"
EXACT = "judge the calls of each run against float64: trueup replay BASE and trueup replay CAND"
"""What to do where an estimate does not decide, and where there is none."""


def _inconclusive(
    unmatched: Sequence[Finding], notes: Sequence[Reason | str], counts: Mapping[str, int], otherwise: Otherwise
) -> list[str]:
    compared, incomparable = counts.get("compared", 0), counts.get("incomparable", 0)
    missing = max(len(unmatched), counts.get("unmatched", 0))
    first = notes[0] if notes else None
    why = first.why if isinstance(first, Reason) else None
    noted, because = "", ""  # what the first note says where that is the reason, else what the counts say
    if isinstance(first, Reason) and (why in DECISIVE or (compared and why in OPEN)):
        noted, step = what_and_next(first)
    elif not compared and not missing:
        noted, because = in_words(first), "nothing was captured"
        step = "capture both runs again; `trueup show CAPTURE` lists what a capture holds"
    elif not compared:
        because = f"no call of one run was found in the other ({missing:,} unmatched)"
        step = "capture the same model and steps on both sides, with the same --level, --steps and --include"
    elif incomparable:
        because = f"{incomparable:,} of {counted(compared, 'call')} could not be compared"
        asked = isinstance(first, Reason) and first.involves(Why.UNRECORDED)
        ties = any(isinstance(note, Reason) and note.involves(Why.TIES) for note in notes)
        step = UNTIED if ties else f"capture both runs with --detail {'tensor' if asked else 'stats or tensor'}"
        if isinstance(first, Reason) and any(map(first.involves, (Why.SHAPES, Why.ONE_SIDED))):
            step = "look at that call in both runs: more detail says no more of tensors that only one of them has"
        elif isinstance(first, Reason) and first.involves(Why.ADDED_INSIDE):
            step = "look at what that module returns in both runs: the tensor that it computes with, or another one"
    elif missing:
        because = f"{counted(missing, 'call')} {_verb(missing, 'exist')} in only one run"
        levels = {finding.level for finding in unmatched}
        step = "see what these calls compute in that run alone, or compare by modules alone: --level module"
        step = step.partition(", or")[0] if "module" in levels else COARSER if levels <= {"aten"} else step
    else:
        noted, because = in_words(first), "the measured differences neither pass nor fail the criterion"
        told = [what_and_next(note)[1] for note in notes[:2] if isinstance(note, Reason)]  # of a loss who reads it tells
        step = next(filter(None, told), EXACT if otherwise.exact else FINER)
    rest = [f"note: {one_line(in_words(note))}" for note in notes[1 if noted else 0 : 2]]
    head = [otherwise.head] if otherwise.head and why not in DECISIVE else []  # what is damaged or missing comes first
    if head and otherwise.settings:
        step = "set the candidate as the baseline is, and compare again"
    elif head and why not in OPEN:  # which says itself what to do
        step = "let the candidate do there what the baseline does, and compare again"
    return [*head, f"because {one_line(noted) if noted else because}", *rest, *_more_notes(notes[2:]), f"next: {one_line(step)}"]


def _operator(finding: Finding) -> str:
    measured = [slot for slot in finding.slots if slot.slot.startswith(("input", "grad_output"))]
    if finding.slots and not measured:
        nothing = "nothing that goes in was compared" if finding.kind == "region" else "it takes no tensors"
        return f"{nothing}, and its outputs differ ({_error(finding)})"
    if finding.error_in == 0 and any(slot.unsized for slot in finding.slots):
        return "inputs agree by their checksums, outputs do not (the size of the error is not known)"
    if finding.error_in == 0 and any(slot.method == "statistics" for slot in measured):
        return f"inputs agree as far as their statistics tell, outputs do not ({_error(finding)})"
    if finding.error_in == 0:
        return f"inputs are bitwise equal, outputs are not ({_error(finding)})"
    unasked = finding.error_in >= LARGE and finding.expected <= 0  # the criterion does not ask what inputs explain
    if finding.because and (unasked or finding.error_out <= finding.expected):  # or its size alone tells nothing
        return f"inputs differ (rel. L2 {sci(finding.error_in)}), and so do outputs (rel. L2 {sci(finding.error_out)})"
    if finding.error_in >= (ROUNDED if finding.because else LARGE):
        return f"inputs differ (rel. L2 {sci(finding.error_in)}), outputs by more than that explains ({_error(finding)})"
    return f"inputs agree (rel. L2 {sci(finding.error_in)}), outputs do not ({_error(finding)})"


def _region(finding: Finding) -> str:
    return f"a run of calls without counterpart on the other side: {_operator(finding)}"


def _argument(finding: Finding) -> str:
    slot = _worst(finding, "value")
    changes = changed_arguments(slot) if slot is not None else []
    if not changes:
        return "it was given another tensor" if finding.because else "it was called with different arguments"
    given, before, after = changes[0]
    name = _position(finding, given)
    more = f" (and {counted(len(changes) - 1, 'more argument')})" if len(changes) > 1 else ""
    return f"argument {name if name.isidentifier() else given} differs: {before} in the baseline, {after} in the candidate{more}"


def _random(finding: Finding) -> str:
    error = _error(finding, expected=False)
    if finding.because:  # it was found out why
        return f"it draws random numbers, and its outputs differ ({error})"
    return f"it drew different random numbers ({error}): seed, generator or draws before it differ"


def _input(finding: Finding) -> str:
    slot = finding.slots[0] if finding.slots else None  # the verdict puts the input it means first
    name = one_line(slot.slot) if slot else "an input"
    how = _error(finding, expected=False)
    if slot is not None and slot.state == "incomparable" and slot.shape[0] != slot.shape[1]:
        how = f"shape {slot.shape[0]} in the baseline, {slot.shape[1]} in the candidate"
    what = f"{name} differs ({how}) and no captured call produced it"
    if finding.because:  # it was found out what it is
        return what
    return f"{what}: the data, the weights or what was not captured before it differ"


def _overwritten(finding: Finding) -> str:
    name = one_line(finding.slots[0].slot) if finding.slots else "an input"
    error = _error(finding, expected=False)
    what = f"{name} is not what the captured call before had written there ({error}), and in the baseline it is"
    if finding.cause:  # it was found out what did
        return what
    return f"{what}: something wrote to that memory unseen, or a stale buffer was read"


def _ranks(finding: Finding) -> str:
    error = f" ({_error(finding, expected=False)})" if finding.error_out == finding.error_out else ""
    return f"{one_line(finding.slots[0].slot)} is not on all ranks what it should be{error}"


def _unmatched(finding: Finding) -> str:
    other = {"baseline": "candidate", "candidate": "baseline"}.get(finding.side, "other run")
    return f"exists only in the {_side(finding)}; the {other} has no such call here"


_EVIDENCE: dict[str, Callable[[Finding], str]] = {
    "operator": _operator,
    "argument": _argument,
    "random": _random,
    "input": _input,
    "overwritten": _overwritten,
    "ranks": _ranks,
    "unmatched": _unmatched,
    "region": _region,
}


def _error(finding: Finding, *, expected: bool = True) -> str:
    error = max(finding.error_in, finding.error_out) if finding.kind in ("input", "overwritten") else finding.error_out
    if not math.isfinite(error):
        slot = _worst(finding)
        return one_line(slot.reason) if slot and slot.reason else f"rel. L2 {sci(error)}"
    if not expected:
        return f"rel. L2 {sci(error)}"
    if finding.expected <= 0 and finding.because:
        return f"rel. L2 {sci(error)}"
    if finding.expected <= 0:
        return f"rel. L2 {sci(error)}, where none is expected"
    return f"rel. L2 {sci(error)}, {times(finding.ratio)} the expected rounding error"


def _worst(finding: Finding, method: str | None = None) -> SlotComparison | None:
    """The deviating slot with the largest error (an unmeasurable one counts as the largest), of one method if named."""
    slots = [s for s in finding.slots if s.state in ("deviates", "incomparable") and method in (None, s.method)]
    return max(slots, key=lambda s: float("inf") if math.isnan(s.relative_l2) else s.relative_l2, default=None)


def _side(finding: Finding) -> str:
    return finding.side if finding.side != "both" else "one run"


def _verb(count: int, verb: str) -> str:
    return verb + "s" if count == 1 else verb


def hidden_note(count: int) -> list[str]:
    """Say what statistics do not show of so many results."""
    if not count:
        return []
    what = f"{counted(count, 'result')} {'was' if count == 1 else 'were'} compared by statistics only"
    return [f"{what}; a few wrong elements could go unnoticed (--detail tensor shows them)"]
