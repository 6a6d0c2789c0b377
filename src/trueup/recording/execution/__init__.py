"""Recorded calls, executed once more: made whole again, run by an adapter, and judged by the budget of the comparison.

`recorded` and `decoding` make a call whole, `cases` say which to run with what, `local_error` and `judging` judge what came out. No
framework is imported here; replay, shadow, lockstep and reproduce stand on it.
"""
