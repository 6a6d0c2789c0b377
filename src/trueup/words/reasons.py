"""The words of why two tensors could not be measured, or are apart by more than a number says."""

from __future__ import annotations

from trueup.facts.why import Reason, Why
from trueup.words.sentence import UNRECORDED

WORDS = {
    Why.SHAPES: "shapes differ: {} and {}",
    Why.DTYPES: "dtypes differ ({} and {}) and only digests were recorded",
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
    Why.UNRECORDED: f"criterion {{}} {UNRECORDED}",
    Why.INPUTS: "its result differs, and not all of its inputs were measured",
    Why.SOURCES: "not all of its sources were compared",
    Why.ONE_SIDED: "only one side has {}",
    Why.UNMEASURED: "not measured",
}


def in_words(reason: Reason | None) -> str:
    """Say why; of None nothing."""
    return "" if reason is None else WORDS[reason.why].format(*reason.facts)
