"""Calls executed once more: local errors from a capture (replay), in the live run (shadow), and one call alone (reproduce).

`recorded` makes a recorded call whole again, `rounding` and `local_error` judge what it gives the second time; none of the three
knows a framework. What executes lies in `trueup.adapters.<framework>`; `trueup.cli` and those adapters import from here.
"""
