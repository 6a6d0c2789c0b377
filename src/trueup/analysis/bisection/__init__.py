"""The smallest set of changes that heals a training, found by running its command again and again.

`search` chooses the sets (delta debugging; binary search for an ordered history), repeats an unsteady check and verifies the
result. `changes` lists what can be changed: modules and operators by a policy, optimisations, environment, packages, commits,
steps; it makes one run and asks the check. Used by ``trueup bisect`` and `trueup.bisect`.
"""

from trueup.analysis.bisection.bisecting import Bisection, bisect
from trueup.analysis.bisection.changes import KINDS

__all__ = ["KINDS", "Bisection", "bisect"]
