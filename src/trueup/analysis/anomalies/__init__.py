"""Overflow, NaN and saturation, judged from the records of one run: the first bad call, what led to it, whether it matters.

`overflow` reads a capture. `classify` is pure: the records of one rank and step in, `Anomaly` objects out; live watching calls it
with rows in memory. Knows `graph.streams`, `store` and `model`; knows no framework.

    >>> from trueup.analysis.anomalies import Memory, classify
    >>> memory = Memory()                                    # of one rank: what a step leaves to the next one
    >>> found = classify(table, memory)                      # doctest: +SKIP
    >>> [one.sentence for one in found.anomalies]            # doctest: +SKIP

``table`` is sorted by ``seq`` and has the columns `anomalies.classifying.COLUMNS` (docs/format.md). The findings of several ranks
go through `trueup.analysis.anomalies.judging.across_ranks` afterwards.
"""

from trueup.analysis.anomalies.classifying import classify
from trueup.analysis.anomalies.effects import Memory
from trueup.analysis.anomalies.judging import overflow
from trueup.foundation.facts.anomaly import Anomaly, StepAnomalies

__all__ = ["Anomaly", "Memory", "StepAnomalies", "classify", "overflow"]
