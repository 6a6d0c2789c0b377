"""The numbers that decide a verdict, each with its origin.

They hold for every operator. What the rounding of one operator and the errors of its inputs explain stands in its row of
``facts/rounding.toml``; the numbers that a user's criterion may replace, in ``facts/criteria.toml``. A module keeps what bounds
its time and memory.
"""

from __future__ import annotations

# ---------------------------------------------------------------- chance
CHANCE = 8.0
"""Times an expectation that chance does not reach. [measured] 5 at most over the products and sums of GPT-2 and ViT with operands
rounded to HF32 and with other orders of sums; normally distributed sums reach 8 in 1e-15 of all cases. So one of few wrong elements
holds an eighth of an error's square, and what is left behind a formula is an eighth of the difference in it: [measured] a fortieth
in bfloat16, 1e-5 in float32 in right formulas, all of it where a norm rounds before its weight."""

UNLIKELY = 1e-5
"""Probability of what is no chance: one call of a large step (10^5 calls) would do it."""

ENOUGH = 64
"""Independent elements, or roundings, that all do the same: that they do so by chance has a probability of 2**-64, or exp(-64). Of
fewer elements a sketch is the tensor, and a norm tells enough. As units of roundoff: what one element may be off by where all
others are bitwise equal, for an operator whose sums end in a remainder loop."""

QUORUM = 4
"""Other calls, or elements, that must agree before one stands alone: with three, two culprits would be a majority."""

# ---------------------------------------------------------------- relative errors, from the smallest
ANY_ORDER = 1e-9
"""Relative difference up to which two norms are of the same numbers, summed in float64 in another order."""

SINGLE_DIGITS = 1e-6
"""Relative difference of two numbers up to which they may be one number, computed or printed with the digits of float32."""

SHOWN = 1e-5
"""Relative error from which a call that its inputs explain is shown as a victim; below, it agrees. Sums that a tool makes in
float32 and prints are off by less."""

SMALL = 1e-3
"""Relative error below which nobody asks where it came from: rounding may have grown to it outside of the capture. Means of masks
that are further apart are of another number of masks, whole elements."""

PRECISE = 0.01
"""Part of a number that a relation between norms, sums or sketches must hold to if it is to tell anything."""

SHARED = 0.02
"""Largest part of a difference beside one direction where all of it is along that: two sketches tell no smaller part. An optimizer
that divides by the root of a mean square makes as much of rounding, where gradients are near zero."""

HALF = 0.5
"""Relative error from which on two tensors do not agree, however coarse their dtype: half of one is not in the other."""

GONE = 1.0
"""Relative error of inputs from which on nothing of the baseline's is left in them: what they explain, formulas of first order, is
not known. Of 125,000 healthy calls behind single faults (six models of tests/zoo) whose inputs were closer, none was certain but
what ran around a faulty call or read what it saved; of 7,724 beyond it 28 were."""

# ---------------------------------------------------------------- room
ROOM = 1.5
"""Times a number that was estimated from two sketches, each within about 18 %."""

CANCELLED = 100.0
"""Times the largest error seen before that a sum of gradients may have, for it may cancel; then it moves a weight so much less."""

NESTED = 1000.0
"""The same for a call and the largest error inside it, where it adds up several sums of that kind."""

BIASED = 32.0
"""Units of the arithmetic by which all elements may be off alike. Library functions have a bias of a unit or two: [measured] 2.5
for erf, 4 for variances in one pass."""

FLIPPED = 2.0
"""Times the root of the inputs' relative error that flipped masks explain. Of normally distributed numbers a share of 0.8 e
lies within e root mean squares of zero. There a branch goes the other way and an element changes by all of itself: an error of
root(0.8 e). Twice that is granted, for distributions with more of their mass at zero."""

# ---------------------------------------------------------------- optimizers
STEP_BIAS = 512.0
"""Units of an optimizer's step: Adam's 1 - 0.999 has an error of 1000 units where it is computed in float32, its root half of
that."""

ROUNDINGS = 4.0
"""Units of a weight that a step may differ by: on each side it is rounded when it decays and when the step is added."""

LENGTH = 0.25
"""Part by which the updates of all weights together may be longer in one run. [measured] 0.07 at most over right implementations
in 16-bit dtypes, where each update is mostly rounding: it has no direction, and adds as much to the length on both sides."""
