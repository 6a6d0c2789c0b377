"""From what was judged to the `Result` that every renderer shows: findings in full, tables, summaries, what stands beside them.

Decides nothing. `comparing` calls `assembly` with each part of a comparison and at its end; renderers import the facts.
"""
