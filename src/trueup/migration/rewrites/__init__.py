"""Rewrites that mean the same and suit a device better: found in a script by form, proved by execution, written as a patch."""

from trueup.migration.rewrites.catalogue import Proof, Rewrite, catalogue, prove
from trueup.migration.rewrites.finding import Found, find, patch

__all__ = ["Found", "Proof", "Rewrite", "catalogue", "find", "patch", "prove"]
