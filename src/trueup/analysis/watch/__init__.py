"""What a watch does with the rows of a step, whichever framework gave them: look, judge, save, tell, stop.

`watcher` looks, asks `anomalies`, follows a GradScaler and ends all ranks; `saving` writes and describes a hit, and names what an
adapter's second execution gives. `session` has the base of the adapters' watched sessions and the ``with`` block around one.
"""
