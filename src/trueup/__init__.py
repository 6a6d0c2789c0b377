"""Trueup finds the first call whose inputs agree and whose outputs do not."""
