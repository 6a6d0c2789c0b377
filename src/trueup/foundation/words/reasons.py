"""The sentence of each `facts.why.Reason`: a template, and the numbers, calls and reasons beside it written into it.

A field of a template has the number of a fact and says how it is written::

    {0}                     text; a reason in its own words; several of them with commas
    {0:.2g} {0:,}           a number, as Python formats it
    {0:sci} {0:call}        by one of `WRITERS`
    {0:call|calls}          one of two words, the first where the number is 1
    {0:? of {0}} {0:!none}  words that are said where the fact is there, and where it is None or False
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import Formatter
from typing import Any

from trueup.foundation.facts.why import Reason, Why
from trueup.foundation.words.wording import number, sci

WORDS = {
    # of a distance
    Why.SHAPES: "shapes differ: {0} and {1}",
    Why.DTYPES: "dtypes differ ({0} and {1}) and only digests were recorded",
    Why.UNSIZED: "digests differ; how much is not recorded",
    Why.NO_STATISTICS: "no statistics on both sides",
    Why.OTHER_STATISTICS: "no statistics on both sides that can be compared",
    Why.UNKNOWN_STATISTICS: "its statistics are not known on both sides: dump the tensors",
    Why.MEANING: "the dump's statistics of it do not mean what ours do, and are not equal",
    Why.NOT_FINITE: "NaN or Inf counts differ",
    Why.PLACES: "NaN or Inf in different places",
    Why.SAME_BUT_BYTES: "as many NaN, Inf or masks and the same finite elements, but other bytes: they are in other places",
    Why.MASKS: "another number of elements is masked",
    Why.MEANS: "the means differ: more elements are masked on one side",
    Why.SKETCH: "a sum of the sketch left the range of float64; capture with detail tensor",
    Why.BOUND: "at least so much, by max, min, mean and norm: nothing else was dumped",
    Why.SPREAD: "estimated from max, min, mean and norm, as if all elements differed alike: nothing else was dumped",
    Why.ORDER: "at least so much, by max, min, mean and norm: its elements lie in another order on the two sides",
    # of a call that was not compared
    Why.UNRECORDED: "criterion {0} asks for what was not recorded",
    Why.INPUTS: "its result differs, and not all of its inputs were measured",
    Why.ADDED_INSIDE: "its result differs, and in one run alone it computes with the tensor that it returns: the gradient that it "
    "is given there is another sum",
    Why.SOURCES: "not all of its sources were compared",
    Why.ONE_SIDED: "only one side has {0}",
    Why.TIES: "its indices differ, and where values tie the choice is open",
    Why.UNMEASURED: "not measured",
    # calls that a capture lacks
    Why.MAKER_GONE: "{0} of {1:call} was made by call {2}, which is not there",
    Why.OUTER_GONE: "{0:call} runs inside call {1}, which is not there",
    Why.FORWARD_GONE: "{0:call} belongs to call {1}, which is not there",
    Why.MODULE_GONE: "{0:call} runs inside a call of {1}{1:!outside any module}, and the module around it is not there",
    Why.EARLIER_GONE: "{0:call} is there, and one of its kind before it is not",
    Why.NO_FORWARD: "{0:call} belongs to no forward call",
    Why.RUNS_NOTHING: "{0:call} runs no operator, and elsewhere it does on the same",
    # beside a suspect
    Why.LAW: "it breaks {0} that {1:it keeps|all {1} calls of its kind keep} in the baseline (to {2:sci})",
    Why.MULTIPLES: "what it makes of its inputs in the baseline (to {0:sci}) is off by {1:sci} in the candidate",
    Why.EXTREME: "its {0} element is off by {1:sci} from what it makes of its input's",
    Why.SLOPE: "its inputs' errors can make {0:sci} of its error at most, by its slope",
    Why.NARROWED: "its elements are rounded to {0}, the baseline's are not",
    Why.TOO_LARGE: "its norm is {0:.3g} times the largest that its inputs can make",
    Why.SCATTERED: "of the same indices {1:,.0f} elements are zero, in the baseline {0:,.0f}",
    Why.ZEROS: "{0:,.0f} elements of an input are zero, {1:,.0f} of the result",
    Why.DIVIDED: "it is divided by {0:.1f}, and {1:,.0f} of its targets are not ignored",
    Why.RECOMPUTED: "given its own inputs it is off by {0:sci}, where rounding explains {1:sci}",
    Why.NO_GRADIENT: "the {0}'s backward ends at {3}, which makes no gradient of {1}{2:? and {2} more}: look for detach(), "
    "no_grad() or a frozen weight",
    Why.NOT_UPDATED: "the {0} does not update {1}{2:? and {2} more}: look for detach(), for a copy that is not made, for what "
    "its optimizer is given",
    Why.ALIKE: "its results are {0:.0%} {1} beside its inputs than in the baseline, alike in all {2} calls of its kind",
    Why.FACTOR: "{0:?off by a factor of exactly {0}}{0:!all elements are off by the same factor, {1:.5g}}",
    Why.REORDERED: "the same numbers in another order",
    Why.LIMIT: "criterion {0}: {1:and}",
    Why.FIGURE: "{0} of {1} is {2:.3g}, {3} {4:g}",
    Why.GENERATOR: "the state of the generator ({0}) is another one {1}: the difference begins in the random state, not in the "
    "call",
    Why.SINCE_CALL: "from {0:place} on{1:?, after {1} drew}",
    Why.SINCE_STEP: "when step {0} begins{1:?, after {1} drew}",
    Why.ONE_SIDE_DREW: "{0:place}, which only the {1} has,",
    Why.SAME_STATE: "the state of the generator is the same on both sides",
    Why.DREW_BEFORE: "{0} drew before it, so its random numbers may be others",
    Why.UNKNOWN_STATE: "its random numbers are others, or its result is wrong: with --detail tensor captures keep the state of "
    "the generator, which tells",
    Why.HANDED_OUT: "rank {0} hands it out to the other ranks: the difference starts in the weights or buffers that rank {0} "
    "began with",
    Why.WEIGHT: "what the optimizer made of {1:?what it adds to }{0:?state {0} of }{2}{3:? and of {3:,} {3:more parameter|more "
    "parameters}}",
    Why.RUNS_ALONE: "only the {0} runs {1:few}",
    Why.RUNS_INSTEAD: "the candidate runs {1:few} where the baseline runs {0:few}",
    Why.TIMES_RUN: "{0} ({1} {1:time|times})",
    Why.ALONE: "{0}, which does the same, is bitwise equal",
    Why.UNREAD: "what {0:call} computes differs and no recorded call reads it; what is read agrees",
    Why.READS_OTHER: "{0:place} reads {2} of {1:place} in the baseline, {3} of it in the candidate",
    Why.MADE_ALONE: "it reads what {1} made, which only the {0} runs",
    Why.STEPS_AGAIN: "the {0} steps the optimizer again without going backward in between",
    Why.READS: "{0:place} reads the result of {3:?call #{3} of }{1:place} in the baseline, of {4:?call #{4} of }{2:place} in the "
    "candidate",
    Why.SOME_MOVED: "{0} of {1:,} {1:weight|weights} were updated differently, the rest alike: their gradients or what was "
    "done to them differ",
    Why.ALL_MOVED: "all {0} weights were updated differently: the optimizer, its settings, or all gradients differ",
    Why.MOVED_TIMES: "all {0} weights were moved {1:number} times as far, the same way: another learning rate, or gradients "
    "clipped or scaled",
    Why.WEIGHTS_UNSEEN: "the weights were updated since, by what was not recorded: the gradients of weights, their clipping, "
    "the optimizer and its learning rate; record levels api or aten with all phases to see which",
    Why.GIVEN: "what the ranks gave {0:?agrees (rel. L2 {0:sci})}{0:!is bitwise equal}: it went wrong between them",
    # a cause that calls show
    Why.DRAWN_ALONE: "random numbers are drawn in the {1} only: {0:place}, {2:?{2}}{2:!{0.phase}, step {0.step}}",
    Why.CLIPPED_ALONE: "gradients are clipped in the {0} only: {1}",
    Why.LOSS_SCALED_ALONE: "the loss is {1} by {2:g} in the {0} only",
    Why.REDUCED: "the loss has another reduction: {0} in the baseline, {1} in the candidate",
    Why.GRADIENTS_CHANGED: "gradients are changed {0:?in the {0} only}{0:!in another way}, as by clipping, between backward and "
    "optimizer: {1}",
    Why.NOT_CLEARED: "gradients are added to those of the step before in the candidate only: they are not cleared",
    Why.UNMADE: "in the {0} only, from step {1} on, the optimizer reads gradients that no recorded backward call made: "
    "{2:?they are not cleared, or }something changed them or added them up in between, as clipping does",
    Why.COMPUTES_IN: "the candidate computes in {0}: {1:,} of {2:,} {3}, {4} in the baseline",
    # why it is not known what other ranks gave
    Why.NO_ARGUMENTS: "its arguments were not recorded",
    Why.NO_RANKS: "the ranks that take part were not recorded",
    Why.NOT_IN_BOTH: "what rank {0} gave is not in both captures",
    Why.OTHER_NUMBER: "rank {0} made {1} of these calls in that step, and this rank {2}",
    Why.GIVEN_UNCOMPARED: "what rank {0} gave was not compared",
    Why.SENT_UNCOMPARED: "what rank {0} sent was not compared",
    Why.SENDER_NOT_IN_BOTH: "what rank {0} sent is not in both captures",
    Why.SENDER_UNKNOWN: "its sender is not known",
    Why.SENT_NOT_FOUND: "what rank {0} sent in that step was not found",
    # why the runs cannot be called aligned
    Why.UNREADABLE: "{0} {0:part|parts} of the captures cannot be read: {1}",
    Why.MISSING: "calls are missing that were recorded: {0}: {1}",
    Why.FRAGMENT: "the {0} is a fragment{1:? that ends in step {1}}: {2}{3:? (and {3} more)}",
    Why.FILTERS: "the runs were recorded through different filters (baseline {0}, candidate {1}), and {2:,} {2:call "
    "exists|calls exist} in one run only",
    Why.FILTER: "{1:!without }{0}{1:? {1}}",
    Why.LOSSES: "the losses are {0:?{0:.1%} }apart at step {1} ({2:.6g} and {3:.6g}), more than {4:.0%}, and no single call "
    "explains it: the difference may be the growth of rounding errors, or lie in calls not captured",
    Why.TWICE: "{0}: {1} of {2:call} is recorded twice: records of rank {2.rank} step {2.step} were copied over others",
    Why.NOISY: "{0} of {1} differs (rel. L2 {2:.2g}) and it could be rounding: what moved the weights since the step before was "
    "not compared, and an optimizer that divides by the size of gradients makes as much of those that are next to nothing",
    Why.UNSEEN: "{0} of {1} differs (rel. L2 {2:.2g}) and no compared call made that difference",
    Why.ROUNDS: "{0:call} makes {1} in the candidate and {2} in the baseline, which no precision policy explains",
    Why.STALE: "{0} of {1:call} differs (rel. L2 {2:sci}), the candidate made it in an earlier step (call {3}) and the baseline "
    "in this one",
    Why.BROUGHT: "what {0:call} brought differs, and {1}",
    Why.NOT_COMPARED: "{0:,} {0:call|calls} not compared: {1}, {0:in|first in} {2:call}",
    Why.NO_OUTPUT: "no output of any call was compared",
    Why.NO_MODULE: "no output of any module was compared",
    Why.BLIND: "at level module a forced run does not show what functions between modules compute: compare at level api or aten "
    "too",
    # what to do about them
    Why.ALL_PHASES: "capture all phases, from step 0 and without gaps",
    Why.LOOK_BACK: "all phases were captured: look at what makes it in both runs",
    Why.LEVEL_API: "compare at level api too, which both captures hold",
    Why.RECORD_API: "record level api in both runs, with all phases",
    Why.SHOWS_OPTIMIZER: "{0}, where gradients and the optimizer show which",
    Why.SHOWS_BETWEEN: "{0}, where calls between modules show",
    # beside a verdict
    Why.COULD_ROUND: "{0} ({1}) is off{2:? by {2:.1f} x what is explained}, which could be rounding{3:?; {3}}",
    Why.UNLIKE_SIBLINGS: "{0} ({1}) is off{2:? by {2:.1f} x what is explained}, which could be rounding{3:?; {3}}",
    Why.FIRST_UNSIZED: "the first call whose outputs differ: {0}; it could be rounding",
    Why.DEAD_ENDS: "{0:,} {0:call|calls} in one run only compute what no recorded call reads, the first in the {1}: {2:call}",
    Why.COVERED: "{0:,} {0:call exists|calls exist} in only one run; {1:?the dump has none of their kind}{1:!the runs use "
    "different operators there}, so their combined results were compared",
    Why.REWRITTEN: "{0:,} {0:call is|calls are} written another way in the candidate; what they compute together agrees",
    Why.PASSES: "step {0} goes backward {1} {1:time|times} in the baseline and {2} {2:time|times} in the candidate, as with "
    "micro-batches: its calls are no counterparts and nobody is blamed; the gradients that the optimizer reads and what it "
    "makes of them agree{3:! but for a part of the difference that all elements share}",
    Why.NO_OPTIMIZER: "the optimizer was not compared{0:!, nor the gradients of weights}: what they did was compared by how far "
    "the weights moved from one captured step to the next; what the last captured step did to them is not known; record level "
    "api or aten with all phases to see it",
    Why.NO_OPTIMIZER_DUMPED: "the dump has no optimizer: what it did was compared where the next dumped step reads the weights; "
    "what the last dumped step did to them is not known",
    Why.GENERATOR_SINCE: "rank {0}: the state of the random generator ({1}) is another one from step {2} on, and no compared "
    "call shows it",
    Why.REPLACED: "{0} of {1} differs when the run begins, and what another rank hands out replaces it before anything reads it",
    Why.ONE_SIDE_HOLDS: "rank {0} step {1} is only in {2} and was not compared",
    Why.RUN_LACKS: "{0} holds nothing of rank {1} step {2}, which was judged without it",
    Why.DETAILS: "the baseline keeps detail {0}, the candidate {1}; tensors are compared by what both keep",
    Why.LEVELS: "only one capture holds level {0}; compared at {1}",
    Why.ONLY_IN: "{0} {1} are only in {2} and were not compared",
    Why.PROBLEM: "{0}: {1}",
    Why.DECLARED: "float32 {0:and} are rounded to TF32 or HF32, as a run declares: that much error is explained",
    Why.FORCED: "{0}; each call shows its own error alone",
    Why.LENT: "inputs were forced: those of {0}",
    Why.STATISTICS: "{0:,} of {1:,} calls were compared by statistics alone (max, min, mean, norm, XOR), which show no "
    "permutation, no sign and no small error in few elements: dump tensors to see those",
    Why.INNER: "the dump lacks gradients of {0:,} {0:backward call|backward calls}, mostly of weights (of a linear layer on "
    "three dimensions, for one): they show in the weights that the next dumped step reads, and those of the last step are not "
    "known; level mix dumps them",
    # between frameworks
    Why.FIRST_SHAPE: "the first result that has another shape is that of {0:where}, {0.phase}, step {0.step} ({0.op}): {1}",
    Why.WRITTEN_UNREAD: "what the optimizer wrote in step {0} of rank {1} was not compared, for no later forward was recorded "
    "that reads it: record one forward more",
    Why.PACKED_GRADIENTS: "the gradients of {0:,} weights were not compared, for one framework packs these with others: record "
    "an optimizer step and a forward after it, which show them",
    Why.FRAMEWORKS: "{0} against {1}: layers and functions that both have were compared, by the tables in docs/frameworks.md; of "
    "optimizers the weights that they made",
    Why.ORDERLESS: "{0:,} tensors lie in another order on the two sides and were compared by what no order changes (min, max, "
    "mean, norm); capture with --detail tensor to compare their elements",
    Why.VARIANCES: "running variances differ as the frameworks define them (torch: of the unbiased variance of a batch, others: "
    "of the biased one); {0:,} were allowed that much",
    Why.PACKED: "{0:,} weights are packed with others in one framework: they were compared by what their layers made of them",
}
"""A template for each reason."""

NEXT = {
    Why.FRAGMENT: "record that run again, to its end",
    Why.FILTERS: "record both with the same --phase, --include and --exclude",
    Why.NOISY: "{3}",
    Why.UNSEEN: "{3}",
    Why.NO_MODULE: "{0}",
    Why.ROUNDS: "cast there as the baseline does, or compare with a run that does not",
    Why.STALE: "look for a cache that is not cleared (of casts under autocast, for one), or a tensor that is not updated",
}
"""What to do about a reason, said after it."""

LATER = {
    Why.UNREADABLE: "restore what is missing, or record that run again",
    Why.MISSING: "record that run again; what else the runs say is in the report",
    Why.WRITTEN_UNREAD: "record one step more in both runs; of the steps before, every update was compared",
    Why.UNLIKE_SIBLINGS: "look at what it computes in both runs; levels api and aten show what runs inside a module",
}
"""What to do about a reason, said where nothing else is more urgent."""

DECIDED = (
    "", " and the repeats' spread", " and the float64 run", " in few elements", " and all elements are off alike",
)  # fmt: skip
"""What is added to the name of a criterion's row where something decided beside it, by `Judged.decided`."""

NAMED = 4
"""How many of many operators a sentence names: more of them nobody reads."""


def _few(operators: tuple[object, ...]) -> str:
    names = [in_words(one) if isinstance(one, Reason) else str(one) for one in operators]
    more = len(names) - NAMED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:NAMED])} and {more:,} more"


WRITERS: dict[str, Callable[[Any], str]] = {
    "sci": sci,
    "number": lambda value: number(value, 3),
    "call": lambda key: f"{key.op} ({key})",
    "place": lambda key: f"{key.op} ({key.scope})" if key.scope else key.op,
    "where": lambda key: key.scope or key.op,
    "and": lambda facts: " and ".join(map(in_words, facts)),
    "few": _few,
}
"""How facts are written that Python's formats do not know: errors, a `CallKey` in three ways, several facts, many operators."""


class _Sentence(Formatter):
    def format_field(self, value: Any, spec: str) -> Any:
        is_there = bool(value) if isinstance(value, (str, tuple)) else value is not None and value is not False
        if spec.startswith(("?", "!")):
            return spec[1:] if is_there == spec.startswith("?") else ""
        if not is_there:
            return ""
        if "|" in spec:
            return spec.split("|")[value != 1]
        if spec in WRITERS:
            return WRITERS[spec](value)
        if isinstance(value, Reason):
            return in_words(value)
        return ", ".join(map(in_words, value)) if isinstance(value, tuple) else format(value, spec)


_SENTENCE = _Sentence()


def what_and_next(reason: Reason) -> tuple[str, str]:
    """Return the sentence of a reason and what to do about it, empty where nothing is known."""
    what, then = WORDS[reason.why], NEXT.get(reason.why, LATER.get(reason.why, ""))
    return _written(what, reason), _written(then, reason)


def _written(template: str, reason: Reason) -> str:
    return _SENTENCE.vformat(template, reason.facts, {})


def in_words(reason: Reason | str | None) -> str:
    """Say why; of None nothing. Text from elsewhere is said as it is."""
    if reason is None or isinstance(reason, str):
        return reason or ""
    return ": ".join(_written(table[reason.why], reason) for table in (WORDS, NEXT) if reason.why in table)


def joined(reasons: Iterable[Reason | str | None]) -> str:
    """Say all of some reasons, one after another."""
    return "; ".join(filter(None, map(in_words, reasons)))
