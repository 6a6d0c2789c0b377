"""What may help: `advice` writes a policy for a finding and names the command to run next, `healing` tries the rules."""

from trueup.analysis.remedy.advice import suggest

__all__ = ["suggest"]
