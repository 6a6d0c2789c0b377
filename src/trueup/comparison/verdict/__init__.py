"""From two captures to one sentence: align, measure, judge, locate.

Each of the four is a pure function of what the store read; `compare.compare` strings them together, one rank and step at a
time, and it alone calls what makes a report of it (`trueup.report.view`). Nothing here knows a framework.
"""
