"""Dumps of other tools, read as captures."""
