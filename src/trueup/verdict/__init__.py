"""From two captures to one sentence: align, measure, judge, locate.

Each of the four is a pure function of what the store read; `compare` strings them together, one rank and step at a time. This
package knows `store` and `model` and no framework; reports know its `Result` and nothing else of it.
"""

from trueup.verdict.compare import compare

__all__ = ["compare"]
