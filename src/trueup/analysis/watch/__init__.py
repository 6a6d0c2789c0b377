"""What a watch does with the rows of a step, whichever framework gave them: look, judge, save, tell, stop.

`watcher` looks; `classify` asks `anomalies`; `saving` writes what is kept of a hit, `telling` says it; `scale` follows a
GradScaler, `stopping` ends all ranks; `again` is what an adapter's second execution of calls gives. `session` is what the adapters'
watched sessions have in common, `watch` the ``with`` block around one.
"""
