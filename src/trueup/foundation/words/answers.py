"""The verdict as answers to the questions of somebody who opens a report: what is it, where, how much, how sure, what follows.

    AdamW lr: 0.001 in the baseline, 0.002 in the candidate
    place      first seen in: torch.Tensor.mul_, optimizer, step 0, rank 0
               your code: train.py:16 in <module>
    size       all elements are off by the same factor, 0.99999
    certainty  certain; arguments are compared by value
    dtype      float32 in both runs
    reach      2,208 later calls deviate because their inputs do

They are the lines of ``Result.sentence``, sorted; one that is no answer is a note, so none is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trueup.foundation.model import Finding, Result
from trueup.foundation.words import anomaly_sentence
from trueup.foundation.words.sentence import HEADS, culprit_lines, evidence
from trueup.foundation.words.wording import one_line

if TYPE_CHECKING:
    from trueup.foundation.facts.anomaly import OverflowResult

ORDER = ("cause", "place", "size", "certainty", "dtype", "reach", "note", "next")
IN_BRACKETS = re.compile(r" \([^()]*\)")
HOW = {
    "tensor": "every element was compared",
    "sketch": "the error is estimated from sketches, to about ±18 %",
    "statistics": "the error is at least what max, min, mean and norm show",
    "digest": "by checksums, so its size is not known",
    "value": "arguments are compared by value",
    "none": "how much could not be measured",
}
"""How the culprit's error is known, by the method that found it."""


@dataclass(frozen=True)
class Answers:
    """What stands at the top of a report."""

    head: str
    """The verdict in capitals."""
    cause: str
    """What it is: the setting that differs, else what the first culprit does, else the first line of the verdict."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """``(question, lines)``, in the order of `ORDER`; a question without an answer is left out."""


def answers(result: Result) -> Answers:
    """Sort the verdict's lines by what they answer."""
    head = HEADS[result.verdict]
    lines = [line.strip() for line in result.sentence.splitlines()] or [""]
    lines[0] = lines[0].removeprefix(head.strip()).strip()
    found: dict[str, list[str]] = {}
    first = result.culprit if result.verdict == "deviates" else None
    if first is None:
        cause, rest = lines[0], lines[1:]
    else:
        told = culprit_lines(result.culprits, result.victims, result.unmatched)
        for what, line in told:
            found.setdefault(what, []).append(line)
        cause, found["cause"] = _headline((found.pop("cause", None) or [in_short(first)])[0])
        found["certainty"] = [*_certain(first), *found.get("certainty", [])]
        found["dtype"] = dtypes(first)
        known = {line for _, line in told}
        rest = [line for line in lines if line not in known]
        if rest and (place := _placed(rest[0], known)):  # one setting may stand behind the place
            rest[0] = place
    for line in rest:
        what, _, said = line.partition(": ")
        found.setdefault(what if what == "next" else "note", []).append(said if what in ("note", "next") else line)
    return Answers(head.strip(), cause, tuple((name, tuple(found[name])) for name in ORDER if found.get(name)))


HEADLINE = 120
"""Characters of a cause from which on only the first of several is said in large."""


def _headline(cause: str) -> tuple[str, list[str]]:
    """Return what of a cause is said in large, and the rest of a long one."""
    first, _, rest = cause.partition("; ")
    return (first, [rest]) if rest and len(cause) > HEADLINE else (cause, [])


def overflow_answers(result: OverflowResult) -> Answers:
    """Sort the lines of what overflowed by what they answer."""
    head = anomaly_sentence.HEADS[result.verdict].strip()
    lines = [line.strip() for line in result.sentence.splitlines()] or [""]
    lines[0] = lines[0].removeprefix(head).strip()
    first = result.first
    if first is None or lines[0] != first.sentence:
        return Answers(head, lines[0], (("note", tuple(lines[1:])),) if lines[1:] else ())
    found: dict[str, list[str]] = {"place": [anomaly_sentence.name_of(first)]}
    matters = f"{first.matters}: {first.because}"
    for line in lines[1:]:
        what = "place" if line.startswith("your code: ") else "certainty" if line == matters else "reach"
        found.setdefault(what, []).append(line)
    op, said = one_line(first.place.api or first.place.op), anomaly_sentence.happened(first)
    word, _, rest = said.partition(": ")
    cause = f"{word} in {op}: {rest}" if first.kind in ("nan", "overflow", "saturated") else f"{op}: {said}"
    return Answers(head, cause, tuple((name, tuple(found[name])) for name in ORDER if found.get(name)))


def in_short(finding: Finding) -> str:
    """Say what a call does, without its numbers: ``torch.lstm, backward: inputs agree, outputs do not``."""
    said = IN_BRACKETS.sub("", evidence(finding).partition("; ")[0])
    return f"{one_line(finding.api or finding.op)}, {one_line(finding.phase)}: {said}"


def dtypes(finding: Finding) -> list[str]:
    """Say in which dtypes a call computes: ``float32 in both runs``."""
    sides = [_in_and_out((slot.slot, slot.dtype[side]) for slot in finding.slots) for side in (0, 1)]
    if not any(sides):
        return []
    if sides[0] == sides[1]:
        return [f"{sides[0]} in both runs"]
    return [f"{said} in the {side}" for said, side in zip(sides, ("baseline", "candidate"), strict=True) if said]


def _in_and_out(slots: Iterable[tuple[str, str]]) -> str:
    """Name the dtypes of what goes in and of what comes out, once where they are the same."""
    held: tuple[dict[str, None], dict[str, None]] = {}, {}
    for name, dtype in slots:
        if dtype:
            held[name.startswith(("output", "grad_input"))][one_line(dtype)] = None
    given, made = (", ".join(sorted(names)) for names in held)
    return given or made if given == made or not (given and made) else f"{given} in and {made} out"


def _certain(finding: Finding) -> list[str]:
    """Say how the error of a culprit is known."""
    if finding.confidence != "high":
        return []
    unlike = [slot for slot in finding.slots if slot.state in ("deviates", "incomparable")]
    told = [slot for slot in unlike if (slot.method == "value") == (finding.kind == "argument")] or unlike
    return [f"certain; {HOW[told[0].method]}" if told else "certain"]


def _placed(line: str, known: set[str]) -> str:
    """Return what follows a line that is known already, or nothing."""
    before = next((one for one in known if line.startswith(f"{one}; ")), None)
    return "" if before is None else line[len(before) + 2 :]
