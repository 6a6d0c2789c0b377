"""Why a comparison says what it says: a `Reason` is an enum with facts beside it, and no text (`words.reasons` has its sentence).

    >>> Why.SHAPES("(2, 5)", "(5, 2)")
    Reason(why=<Why.SHAPES>, facts=('(2, 5)', '(5, 2)'))

A fact is text, a number, a `model.CallKey`, another reason, or several of them; of None and False nothing is said.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

REPEATS, TRUTH, FEW, COHERENT = 1, 2, 3, 4
"""What decides of a call beside the row of the criterion, where something does: an index into `words.reasons.DECIDED`."""

ROLES = ("agrees", "equal", "carried", "unsized", "incomparable")
"""What a compared call is by its errors: within rounding, bitwise equal, explained by its inputs or a suspect, of unknown size."""
AGREES, EQUAL, CARRIED_ON, UNSIZED, INCOMPARABLE = range(5)


class Why(Enum):
    """What was found; beside each stand its facts, in order."""

    # of a distance
    SHAPES = auto()  # both shapes
    DTYPES = auto()  # both dtypes; only digests are there
    UNSIZED = auto()  # digests differ and nothing else is there: it may be a single rounding
    NO_STATISTICS = auto()  # one side has none
    OTHER_STATISTICS = auto()  # one side's numbers cannot be compared with the other's
    UNKNOWN_STATISTICS = auto()  # a dump lacks them
    MEANING = auto()  # a dump's numbers mean something else, and are not equal
    NOT_FINITE = auto()  # another number of NaN or Inf
    PLACES = auto()  # NaN or Inf in other places
    SAME_BUT_BYTES = auto()  # as many NaN, Inf or masks, the same finite elements, other bytes
    MASKS = auto()  # another number of masks
    MEANS = auto()  # means that only another number of masks explains
    SKETCH = auto()  # a sum of the sketch overflowed
    BOUND = auto()  # a lower bound, by statistics of a dump
    SPREAD = auto()  # an estimate, by statistics of a dump
    ORDER = auto()  # a lower bound: sketches and digests of two layouts say nothing
    # of a call that was not compared
    UNRECORDED = auto()  # name of the criterion, which asks for elements
    INPUTS = auto()  # the result differs, and an input was not measured
    ADDED_INSIDE = auto()  # the result differs, and one run alone adds to a gradient that the call is given while it runs
    SOURCES = auto()  # what a run of calls without counterpart reads was not all compared
    ONE_SIDED = auto()  # slots that only one side has
    TIES = auto()  # indices differ that a call chose, perhaps among equal values
    UNMEASURED = auto()  # nothing said why
    # calls that a capture lacks
    MAKER_GONE = auto()  # slot, its call, number of the call that made it
    OUTER_GONE = auto()  # call, number of the call that it runs inside
    FORWARD_GONE = auto()  # call, number of the forward call that it belongs to
    MODULE_GONE = auto()  # call, scope of the call around it or None
    EARLIER_GONE = auto()  # call, whose ordinal says that there was one before
    NO_FORWARD = auto()  # call of a backward
    RUNS_NOTHING = auto()  # call, which runs operators where it is given the same
    # beside a suspect
    LAW = auto()  # the law, how many calls keep it, to how much
    MULTIPLES = auto()  # residual in the baseline and in the candidate
    EXTREME = auto()  # which element, its relative error
    SLOPE = auto()  # the largest error that its inputs' can make
    NARROWED = auto()  # dtype that its elements are rounded to
    TOO_LARGE = auto()  # its norm, in the largest that its inputs can make
    SCATTERED = auto()  # how many elements of a result are zero in the baseline, and in the candidate
    ZEROS = auto()  # how many elements of an input are zero, and of the result
    DIVIDED = auto()  # by what a loss is divided, how many targets count
    RECOMPUTED = auto()  # its own error, what rounding explains of it
    NO_GRADIENT = auto()  # side that lacks it, of which inputs, how many more, place
    NOT_UPDATED = auto()  # side, which weights, how many more, call
    ALIKE = auto()  # by what part, larger or smaller, in how many calls
    FACTOR = auto()  # exact factor as text or None, its value
    REORDERED = auto()
    LIMIT = auto()  # criterion, figures that broke it
    FIGURE = auto()  # measure, slot, value, above or below, limit
    GENERATOR = auto()  # device of the generator that stands elsewhere, since when
    SINCE_CALL = auto()  # call, draws of one side before it or None
    SINCE_STEP = auto()  # step, the same
    ONE_SIDE_DREW = auto()  # call, side, its site
    SAME_STATE = auto()  # the generator stands where it does in the baseline
    DREW_BEFORE = auto()  # draws of one side
    UNKNOWN_STATE = auto()  # the state of the generator is not known
    HANDED_OUT = auto()  # rank
    WEIGHT = auto()  # state or None, whether it is what is added to the weight, weight, how many more
    RUNS_ALONE = auto()  # side, operators
    RUNS_INSTEAD = auto()  # operators of the baseline, of the candidate
    TIMES_RUN = auto()  # operator, how often
    ALONE = auto()  # a call that does the same, and is bitwise equal
    UNREAD = auto()  # call
    MADE_ALONE = auto()  # side, operator
    STEPS_AGAIN = auto()  # side
    READS = auto()  # call, who made what it reads in the baseline, in the candidate; which calls, of one that made both
    READS_OTHER = auto()  # its key, that of the call that made what it reads on both sides, as which result there, and here
    SOME_MOVED = auto()  # weights that were updated differently, of how many
    ALL_MOVED = auto()  # how many weights
    MOVED_TIMES = auto()  # how many weights, how many times as far
    WEIGHTS_UNSEEN = auto()  # what updates the weights was not recorded
    GIVEN = auto()  # largest error of what the ranks gave to a communication
    # a cause that calls show
    DRAWN_ALONE = auto()  # call, side, the user's line or None
    CLIPPED_ALONE = auto()  # side, operators
    LOSS_SCALED_ALONE = auto()  # side, multiplied or divided, by which number
    REDUCED = auto()  # operator of the baseline, of the candidate
    GRADIENTS_CHANGED = auto()  # side or None of both, operator
    NOT_CLEARED = auto()  # gradients
    UNMADE = auto()  # side, first step, whether one was made before
    COMPUTES_IN = auto()  # dtype of the candidate, in how many, of how many, products or results, dtype of the baseline
    # why it is not known what other ranks gave
    NO_ARGUMENTS = auto()
    NO_RANKS = auto()
    NOT_IN_BOTH = auto()  # rank that gave something
    OTHER_NUMBER = auto()  # rank, how many calls it made, how many this rank did
    GIVEN_UNCOMPARED = auto()  # rank
    SENT_UNCOMPARED = auto()  # rank
    SENDER_NOT_IN_BOTH = auto()  # rank
    SENDER_UNKNOWN = auto()
    SENT_NOT_FOUND = auto()  # rank
    # why the runs cannot be called aligned
    UNREADABLE = auto()  # how many parts, what is said of the first
    MISSING = auto()  # name of the capture, what is missing
    FRAGMENT = auto()  # side, last step or None, why, how many more or None
    FILTERS = auto()  # both sides' filters that differ, how many calls have no counterpart
    FILTER = auto()  # option, its values or None
    LOSSES = auto()  # how far they are apart or None, step, both losses, the limit
    TWICE = auto()  # name of the capture, slot, call
    NOISY = auto()  # slot, call, error, what to record
    UNSEEN = auto()  # the same
    ROUNDS = auto()  # call, dtype in the candidate, in the baseline
    STALE = auto()  # slot, call, error, number of the call that made it
    BROUGHT = auto()  # call of a communication, why it is not known what the ranks gave
    NOT_COMPARED = auto()  # how many calls, why, the first
    NO_OUTPUT = auto()  # no output of any call was compared
    NO_MODULE = auto()  # what to record, where modules alone were to be compared and none has a counterpart
    BLIND = auto()  # of a forced run only modules are compared
    # what to do about them
    ALL_PHASES = auto()
    LOOK_BACK = auto()
    LEVEL_API = auto()  # both captures hold it
    RECORD_API = auto()
    SHOWS_OPTIMIZER = auto()  # how
    SHOWS_BETWEEN = auto()  # how
    # beside a verdict
    COULD_ROUND = auto()  # name and operator of a suspect, how many times what is explained or None, what else is known
    UNLIKE_SIBLINGS = auto()  # the same, of one that others show to differ by itself
    FIRST_UNSIZED = auto()  # sentence of a suspect
    DEAD_ENDS = auto()  # how many calls, side and call of the first
    COVERED = auto()  # how many calls, whether one side is a dump
    REWRITTEN = auto()  # how many calls
    PASSES = auto()  # step, how often each side goes backward, whether the direction agrees, too
    NO_OPTIMIZER = auto()  # whether gradients of weights were compared
    NO_OPTIMIZER_DUMPED = auto()
    GENERATOR_SINCE = auto()  # rank, device, step
    REPLACED = auto()  # slot, call
    ONE_SIDE_HOLDS = auto()  # rank, step, path
    RUN_LACKS = auto()  # path of a repeat or reference, rank, step
    DETAILS = auto()  # detail of the baseline, of the candidate
    LEVELS = auto()  # levels that one capture holds, those that were compared
    ONLY_IN = auto()  # ranks or steps, which, path
    PROBLEM = auto()  # name of the capture, what is said of it
    DECLARED = auto()  # products that are rounded to TF32 or HF32
    FORCED = auto()  # what the capture notes
    LENT = auto()  # capture whose inputs a run was given
    STATISTICS = auto()  # calls compared by statistics alone, of how many
    INNER = auto()  # backward calls of which a dump lacks gradients
    # between frameworks
    FIRST_SHAPE = auto()  # call, why
    WRITTEN_UNREAD = auto()  # step, rank
    PACKED_GRADIENTS = auto()  # how many weights
    FRAMEWORKS = auto()  # both
    ORDERLESS = auto()  # how many tensors
    VARIANCES = auto()  # how many
    PACKED = auto()  # how many weights

    def __call__(self, *facts: Any) -> Reason:
        """Return the reason with its facts."""
        return Reason(self, facts)

    def __repr__(self) -> str:
        return f"<Why.{self.name}>"


class Reason(NamedTuple):
    """Why, with the facts beside it."""

    why: Why
    facts: tuple[Any, ...] = ()

    def involves(self, *whys: Why) -> bool:
        """Tell whether it is one of some reasons, or one of them stands beside it."""
        return self.why in whys or any(fact.involves(*whys) for fact in self.facts if isinstance(fact, Reason))
