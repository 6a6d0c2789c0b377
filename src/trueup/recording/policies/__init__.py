"""Policies while a run is recorded: ``policy`` reads a `policy.toml`; the rest is what all adapters share that apply one.

``running`` counts what a rule did, ``calls`` runs one call under a rule; ``copies``, ``nested`` and ``holding`` take its tensors
elsewhere and back. No framework is imported here: ``policies`` in an adapter says how its tensors are copied and cast.
"""

from trueup.recording.policies.policy import Policy, PolicyRule, load, parse

__all__ = ["Policy", "PolicyRule", "load", "parse"]
