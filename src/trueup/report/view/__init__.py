"""From what was judged to the `Result` that every renderer shows: findings in full, tables, summaries, what stands beside them.

Decides nothing. Imports `trueup.comparison` below its function `compare`, which calls it at the end; renderers import the facts.
"""
