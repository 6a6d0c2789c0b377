"""What is done with captures beside comparing them: calls executed again, policies tried, overflow, recipes, triage.

It stands on the comparison and on the recording; no error formula is written here.
"""
