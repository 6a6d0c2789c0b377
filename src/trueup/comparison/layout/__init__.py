"""How a run lies on its ranks, and the ranks of one run joined into what one process would have recorded.

`comparison.result` asks whether two runs lie alike and joins those that do not, before any graph is made. What cannot be joined is
named, and never taken for equal.
"""
