"""What may help: `suggesting` writes a policy for a finding, `healing` tries its rules, `advice` names the command to run next."""

from trueup.analysis.remedy.suggesting import suggest

__all__ = ["suggest"]
