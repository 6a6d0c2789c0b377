"""`trueup.compare`: two captures in, one `Result` out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from trueup.comparison.layout.joined import Joined
from trueup.comparison.result.causes import CASTING, Place, Seen, place, with_causes
from trueup.comparison.result.evidence import with_evidence
from trueup.comparison.result.gradients import Norm, norms_of, with_norms
from trueup.comparison.result.layouts import joined as joined_ranks
from trueup.comparison.result.layouts import not_told, other_layouts, with_ranks
from trueup.comparison.result.micro_batches import with_lost
from trueup.comparison.result.reaching import Beginnings, is_set_otherwise
from trueup.comparison.result.remarks import Frameworks, Remarks, Uncompared, unseen
from trueup.comparison.result.same import same_runs
from trueup.comparison.result.shown import Alone, Lacking, Unmade, passes_counts, passes_text, shown
from trueup.comparison.result.spreading import WORTHWHILE, can_be_spread, spread
from trueup.comparison.result.summary import (
    by_itself,
    call_table,
    count,
    finish_table,
    of_a_kind,
    one_sided_tables,
    summarise,
    suspect_finding,
    unmatched_finding,
    used_rules,
    victim_findings,
    victims,
    with_names,
    with_one_sided,
)
from trueup.comparison.verdict.compare import Comparison, Said
from trueup.comparison.verdict.exchange import Received
from trueup.comparison.verdict.judged import SIDES, OwnErrors, Part, Suspect
from trueup.foundation.engines import engine_of, processors
from trueup.foundation.facts.criteria import Criterion
from trueup.foundation.facts.criteria import load as load_criterion
from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.frameworks.mapping import Mapping
from trueup.foundation.frameworks.mapping import load as load_mapping
from trueup.foundation.frameworks.trees import TIED
from trueup.foundation.model import Finding, Occurrence, Result
from trueup.foundation.settings import Setting, differing, held_by, list_of, modules_of
from trueup.foundation.store import Capture, open_capture
from trueup.foundation.words.reasons import in_words, joined
from trueup.foundation.words.sentence import Otherwise, occurrence_text, verdict_lines
from trueup.foundation.words.setup_sentence import TWO_LAYOUTS, set_otherwise, settings_text

ALIKE_NAMED = 20
"""Calls of a culprit's kind that are named beside it; all are counted, and marked in the table of calls."""

MOST_SETTINGS = 3
"""Settings that differ and show in no culprit that a verdict names; `trueup preflight` lists all."""

MOST_ROWS = 500
"""Settings that differ and are listed in a report."""

MAX_FINDINGS = 200
"""Victims listed one by one; all are in the table of calls or counted."""


class Assembly:
    """What a `Result` is made of; the comparison gives each part to `add` when it runs."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.sites = [capture.sites for capture in comparison.captures]
        self.frameworks, self.uncompared = Frameworks(comparison.captures), Uncompared()
        self.remarks = Remarks(str(comparison.captures[1].path))
        self.beginnings, self.unmade, self.alone, self.lacking = Beginnings(), Unmade(), Alone(), Lacking()
        self.findings: dict[int, Finding] = {}
        self.shown: dict[Place, Reason] = {}  # what culprits show of their cause by themselves
        self.tables: list[pa.Table] = []
        self.one_sided: list[pa.Table] = []
        self.norms: tuple[list[Norm], list[Norm]] = [], []

    def add(self, part: Part) -> None:
        """Turn what was found in a part into findings and rows while its streams are at hand."""
        for found, norms in zip(part.beside, self.norms, strict=True):
            norms += found
        sites = self.sites[0](part.rank), self.sites[1](part.rank)
        self.remarks.add(part, sites)
        self.frameworks.add(part.verdicts.errors)
        self.uncompared.add(part)
        self.beginnings.add(part)
        joined = any(isinstance(one, Joined) for one in self.comparison.captures)
        if not self.comparison.forced and not joined:  # else an optimizer is lent its gradients, or a collective left them out
            self.unmade.add(part)
        self.alone.add(part, sites, self.comparison.criterion)
        manifest = self.comparison.captures[1].ranks.get(part.rank, {})
        modules, signatures = modules_of(manifest), manifest.get("signatures")
        self.lacking.add(part, modules)
        for suspect in part.suspects:
            found = self.findings[id(suspect)] = with_names(suspect_finding(suspect, *part.streams, sites), modules, signatures)
            if (reason := shown(suspect, part, sites)) is not None:
                self.shown[place(found)] = reason
        self.tables.append(call_table(part.verdicts, part.alignment.paired, sites[1]))
        self.one_sided += one_sided_tables(part.alignment, part.streams, sites)

    def result(self) -> Result:
        """Return the result of a comparison that has run."""
        found = self.comparison
        self._trust_settings()
        certain = found.certain
        for at, given in found.exchange.guilty.items():
            self.findings[at] = by_itself(self.findings[at], given)
        calls = {(s.rank, s.step, s.place) for s in certain if s.kind != "region"}
        first = (certain[0].step, certain[0].place) if certain else None
        table = finish_table(self.tables, calls, first, found.reached)
        counts = count(table, self.one_sided, found.uncovered, len(found.steps))
        culprits = [self._culprit(kind) for kind in of_a_kind(certain)]
        if culprits:
            passed_on, beyond = victims(table)
            own = sum(reason.why is Why.RECOMPUTED for suspect in certain for reason in suspect.because)
            beyond = found.asked - found.cleared - own if found.judged else beyond
            culprits[0] = dataclasses.replace(culprits[0], victims=passed_on, beyond=beyond, cleared=found.cleared)
        handed = [one for one in culprits if (one.kind, one.phase) == ("overwritten", "optimizer")]
        if (gradients := self.alone.clipped or self.unmade.found) is not None:
            self.shown |= {place(one): gradients for one in handed}
        culprits, otherwise = self._with_causes(culprits)
        passing = victim_findings(table, MAX_FINDINGS)
        unmatched = [unmatched_finding(call, side, self.sites[SIDES.index(side)](call.rank)) for side, call in found.unmatched]
        runs = [summarise(c, o, found.ranks) for c, o in zip(found.captures, found.overviews[:2], strict=True)]
        runs = with_norms(runs, [len(capture.ranks) for capture in found.captures], self.norms)
        known = [suspect for suspect in found.suspects if suspect.certain]
        seen = occurrences(found.ranks, known, found.exchange.received, found.criterion) if certain else []
        always, notes = self.remarks.always(), self._notes(culprits)
        lines = verdict_lines(found.verdict, culprits, passing, unmatched, notes, counts, seen, always, otherwise)
        lines += [f"          {in_words(note)}" for note in found.lent[0] if found.verdict == "deviates"]
        result = Result(
            found.verdict, "\n".join(lines), culprits, passing, unmatched, list(map(in_words, notes)), found.criterion.name,
            runs[0], runs[1], counts, with_one_sided(table, self.one_sided), used_rules(table, found.criterion), seen,
            set_otherwise(self._differing(culprits)[:MOST_ROWS]),
        )  # fmt: skip
        return with_evidence(result, found.captures)

    def _trust_settings(self) -> None:
        """Make certain of the first suspect that it is no rounding where a setting that changes numbers differs and reaches it."""
        found = self.comparison
        suspect = found.ranked[0] if found.ranked else None
        if suspect is not None and not suspect.certain:
            first, second = (capture.ranks.get(suspect.rank, {}) for capture in found.captures)
            suspect.certain = is_set_otherwise(self.findings[id(suspect)], first, second)

    def _culprit(self, kind: Sequence[Suspect]) -> Finding:
        """Return the finding of culprits of a kind: the first of them, which ranking made certain if it was not."""
        first, *others = kind
        sure: Literal["high", "could be rounding"] = "could be rounding" if first.judged.unsized else "high"
        names = tuple(dict.fromkeys(self.findings[id(s)].name for s in others))[:ALIKE_NAMED]
        return dataclasses.replace(self.findings[id(first)], confidence=sure, alike=len(others), alike_in=names)

    def _with_causes(self, culprits: list[Finding]) -> tuple[list[Finding], Otherwise]:
        """Say which settings explain culprits, and, in words, which differ and show in none."""
        found = self.comparison
        first, second = self._manifests(culprits)
        counted = passes_counts((found.overviews[0].passes, found.overviews[1].passes))
        optimizers = {len(list_of(held_by(manifest), "optimizers")) for manifest in (first, second)}
        passes = passes_text(counted) if optimizers in ({0}, {1}) else ""  # of several, a step ends where any begins anew
        last = max(found.steps, default=None)
        scaled = "; ".join(map(in_words, self.alone.scaled))
        made = self.alone.loss
        reduced = in_words(made) if made is not None and made.why is Why.REDUCED else ""
        losses = frozenset(map(str, made.facts[1])) if made is not None and made.why is Why.RUNS_ALONE else frozenset()
        dtypes = self.remarks.dtypes
        casting = settings_text([one for one in differing(first, second) if one.name in CASTING]) if dtypes is not None else ""
        before, after = (overview.losses for overview in found.overviews[:2])
        grown = {step: after[step] / loss for step, loss in before.items() if loss and step in after}
        seen = Seen(
            self.shown, self.beginnings.said, self.beginnings.weights, dtypes, casting, passes, counted, last,
            self.alone.factors, scaled, reduced, losses, self.alone.times, grown, self.beginnings.unlike, self.lacking.found,
            "; ".join(self.frameworks.defined()),
        )  # fmt: skip
        none = not culprits
        culprits, unshown = with_causes(culprits, first, second, seen)
        tied = any(one.name.endswith(TIED) for one in unshown)  # no recorded backward adds up the gradients of a tied weight
        began = seen.weights if none and found.verdict == "inconclusive" else None
        asked = none and not tied and found.verdict != "aligned"  # gradients that agree were summed where nothing records it
        gradients = (self.alone.clipped or self.unmade.found) if asked else None
        shows = joined([passes, began, seen.dtypes, casting, gradients])
        settings = settings_text(unshown[:MOST_SETTINGS])
        beside = self._beside(culprits, passes, settings)
        exact = all(capture.root.get("detail") == "tensor" for capture in found.captures)
        return culprits, Otherwise(settings, shows, len(unshown) == 1, beside, _kinds(found.captures), exact)

    def _manifests(self, culprits: Sequence[Finding]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what both runs say of the first culprit's rank, else of the first."""
        rank = culprits[0].rank if culprits else next(iter(self.comparison.ranks), 0)
        first, second = (capture.ranks.get(rank, {}) for capture in self.comparison.captures)
        return first, second

    def _differing(self, culprits: Sequence[Finding]) -> list[Setting]:
        return differing(*self._manifests(culprits), max(self.comparison.steps, default=None))

    def _beside(self, culprits: Sequence[Finding], passes: str, settings: str) -> str:
        """Say what one run alone does and neither a culprit shows nor a setting that differs tells."""
        causes = "; ".join(one.cause for one in culprits)
        mixed = self.comparison.overlap.mixed
        lacking = "" if mixed or self.lacking.found.partition(" of ")[0] in causes else self.lacking.found
        facts = [passes, lacking, self.beginnings.copied if "seed of " in causes else self.beginnings.weights]
        facts += [] if "the loss is" in causes else map(in_words, self.alone.scaled)
        made = None if mixed else self.alone.loss
        ops = [] if made is None else list(map(str, made.facts[-1:] if made.why is Why.REDUCED else made.facts[1]))
        explained = {op for one in culprits if one.cause for op in (one.op, *one.aten)}
        known = made is None or any(op in causes or op in explained for op in ops)
        facts += [] if known else [in_words(made)]
        known = "gradients are" in causes or "clip" in settings
        facts += [] if known else [in_words(self.alone.clipped or (None if passes else self.unmade.found))]
        facts += [] if "seed of " in causes or "random numbers are drawn" in causes else [in_words(self.alone.drawn)]
        return "; ".join(fact for fact in facts if fact and fact not in causes)

    def _notes(self, culprits: Sequence[Finding]) -> list[Said]:
        """Return what there is to say beside the verdict, what matters most first."""
        found, mixed = self.comparison, self.comparison.overlap.mixed
        notes: list[Said] = [] if culprits else self.uncompared.reasons(found)
        if found.ranked and not culprits:
            notes = self._with_suspect(notes, found.ranked[0])
        notes += [*found.lent[0], *self.remarks.always(), *self.frameworks.notes(found)]
        notes += [*found.notes, *self.uncompared.of_parts]
        notes += [Why.DEAD_ENDS(len(found.dead_ends), side, row.key) for side, row in found.dead_ends[:1]]
        told = self.uncompared.roughly(mixed=mixed)
        notes = [*told, *notes] if found.verdict == "aligned" else [*notes, *reversed(told)]  # of an alignment the first to know
        if found.covered:
            notes.append(Why.COVERED(found.covered, found.captures[0].imported != found.captures[1].imported))
        notes += self.uncompared.rewritten()
        notes += self.remarks.notes()
        if not found.suspects:
            notes += [*unseen(found.origins.values()), *self.remarks.blind()]
        said = set(map(in_words, notes))
        for capture in found.captures:  # reading may have found more
            problems = [Why.PROBLEM(capture.path.name, problem) for problem in (*capture.problems, *capture.lost)]
            notes += [problem for problem in problems if in_words(problem) not in said]
        return [*notes, *self._of_casts(culprits)]

    def _with_suspect(self, notes: list[Said], suspect: Suspect) -> list[Said]:
        """Say of the first suspect, where none is certain, that it could be rounding."""
        finding = self.findings[id(suspect)]
        if any(slot.unsized for slot in finding.slots):
            return [Why.FIRST_UNSIZED(finding.sentence), *notes]
        if unread := [reason for reason in suspect.because if reason.why is Why.UNREAD]:
            return [*notes, *unread]
        times = finding.ratio if 0.05 <= finding.ratio < math.inf else None  # less would be written as 0.0 x
        unlike = any(reason.why is Why.ALONE for reason in suspect.because)
        return [*notes, (Why.UNLIKE_SIBLINGS if unlike else Why.COULD_ROUND)(finding.name, finding.op, times, finding.because)]

    def _of_casts(self, culprits: Sequence[Finding]) -> list[str]:
        if not culprits or self.comparison.overlap.mixed:
            return []
        from trueup.analysis.audit.casts import notes_beside  # takes time to load, and to look

        return notes_beside(self.comparison.captures, culprits[0])


def _kinds(captures: Iterable[Capture]) -> tuple[str, ...]:
    """Return the kinds of device on which two runs computed (``cpu``, ``npu``); nothing where they are the same, or not known."""
    ranks = [capture.ranks.values() for capture in captures]
    held = [[str(one).partition(":")[0] for rank in some for one in rank.get("devices", ())] for some in ranks]
    kinds = tuple(next((kind for kind in names if kind != "cpu"), "cpu") for names in held)
    return kinds if all(held) and kinds[0] != kinds[1] else ()


def occurrences(
    ranks: Sequence[int], certain: Iterable[Suspect], received: Iterable[Received], criterion: Criterion
) -> list[Occurrence]:
    """Return the first certain difference of each rank, in order of the ranks; a rank without one is left out. ``certain``
    suspects are culprits or what they explain; ``received`` differences came from other ranks."""
    firsts: dict[int, tuple[tuple[int, int], Suspect, int | None]] = {}
    known = [(s, None) for s in certain] + [one for one in received if one[0].judged.is_certain(criterion)]
    for suspect, sender in known:
        place = suspect.step, suspect.place
        if suspect.rank not in firsts or place < firsts[suspect.rank][0]:
            firsts[suspect.rank] = place, suspect, sender
    senders = {rank: sender for rank, (_, _, sender) in firsts.items()}
    return [_occurrence(*firsts[rank][1:], _cause(rank, senders)) for rank in ranks if rank in firsts]


def _cause(rank: int, senders: dict[int, int | None]) -> int | None:
    """Follow the senders to the rank where the difference arose; None where they lead nowhere, or in a circle."""
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        sender = senders.get(rank, -1)
        if sender is None:
            return rank
        rank = sender
    return None


def _occurrence(suspect: Suspect, sender: int | None, cause: int | None) -> Occurrence:
    call, judged = suspect.judged.call.candidate, suspect.judged
    error = max(judged.error_in, judged.error_out) if suspect.kind in ("input", "overwritten") else judged.error_out
    seq = (judged.call.baseline.seq if suspect.sides[0] else -1, call.seq if suspect.sides[1] else -1)
    made = Occurrence(
        call.rank, call.step, call.phase, call.level, call.scope, call.op, call.ordinal, seq, error, sender, cause, ""
    )
    return dataclasses.replace(made, sentence=occurrence_text(made))


def compare(
    baseline: str | Path | Capture,
    candidate: str | Path | Capture,
    *,
    level: str | Sequence[str] | None = None,
    criterion: str | Path = "default",
    mapping: str | Path | None = None,
    repeat: Sequence[str | Path | Capture] = (),
    reference: str | Path | Capture | None = None,
    see: Callable[[Part], None] | None = None,
    own_errors: OwnErrors | None = None,
    shards: str | Path | None = None,
    jobs: int | None = 1,
    engine: str = "local",
) -> Result:
    """Compare two captures as `doors.comparing.compare` says, which users call: its arguments and errors are described there.
    ``own_errors`` is asked, once a culprit is known, which calls behind it are wrong by themselves."""
    given = (baseline, candidate, *repeat, *([] if reference is None else [reference]))
    first, second, *others = map(open_capture, given)
    if jobs is None and engine == "local":
        jobs = processors() if min(len(first.ranks), len(second.ranks)) >= WORTHWHILE else 1
    alone, plainly = jobs == 1 and engine == "local", see is None and mapping is None and not others
    if alone and plainly and (same := same_runs(first, second, level, criterion)) is not None:
        return same
    told = Mapping() if mapping is None else load_mapping(mapping)
    if layouts := other_layouts((first, second)):
        both = joined_ranks((first, second), shards)
        if isinstance(both, str):
            return not_told((first, second), TWO_LAYOUTS.format(layouts), load_criterion(criterion), [both])
        first, second = both
    repeats, truth = others[: len(repeat)], None if reference is None else others[-1]
    comparison = Comparison((first, second), level, load_criterion(criterion), told, repeats, truth, own_errors)
    assembly = Assembly(comparison)
    seeing = [] if see is None else [see]
    if see is None and not alone and can_be_spread(comparison):
        spread(assembly, engine_of(engine, jobs or processors()))
    else:
        comparison.run(*seeing, assembly.add, beside=norms_of, in_full=see is not None)
    result = assembly.result()
    if isinstance(first, Joined) and isinstance(second, Joined):
        result = with_ranks(result, (first, second), layouts)
    passes = [one.passes for one in comparison.overviews[:2]]
    return with_lost(result, (first, second), passes[1], passes_text(passes_counts((passes[0], passes[1]))))
