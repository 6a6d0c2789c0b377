"""Rewrites that mean the same and suit a device better: found in a script by form, proved by execution, written as a patch."""

from trueup.migration.rewrites.catalogue import Rewrite, catalogue
from trueup.migration.rewrites.finding import Found, find, patch
from trueup.migration.rewrites.proving import Proof, prove

__all__ = ["Found", "Proof", "Rewrite", "catalogue", "find", "patch", "prove"]
