"""What records a run: the recorder, one adapter for each framework, and what arms a process.

It stands on the foundation and on the comparison's budget; frameworks are imported in the adapters alone.
"""
