"""Overflow, NaN and saturation, judged from the records of one run: the first bad call, what led to it, whether it matters.

`overflow` reads a capture. `classify` is the pure heart of it: the records of one rank and step in, `Anomaly` objects out, for
whoever holds rows in memory (live watching). Knows `graph.streams`, `store` and `model`; knows no framework.

    >>> from trueup.analysis.anomalies import Memory, classify
    >>> memory = Memory()                                    # of one rank: what a step leaves to the next one
    >>> found = classify(table, memory)                      # doctest: +SKIP
    >>> [one.sentence for one in found.anomalies]            # doctest: +SKIP

``table`` holds the columns of `anomalies.classifying.COLUMNS` (those of docs/format.md), sorted by ``seq``, of one rank and
step; several tables of several ranks go through `trueup.analysis.anomalies.across.first_rank` afterwards.
"""

from trueup.analysis.anomalies.classifying import classify
from trueup.analysis.anomalies.judging import overflow
from trueup.analysis.anomalies.memory import Memory
from trueup.foundation.facts.anomaly import Anomaly, StepAnomalies

__all__ = ["Anomaly", "Memory", "StepAnomalies", "classify", "overflow"]
