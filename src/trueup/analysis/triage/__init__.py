"""The three steps of a port's triage, over a command: float anomalies, compiler and fusion, whole network.

`table` reads the switches (``switches.toml``), `running` runs the command with some of them off, `losses` compares what came,
`bisecting` finds which are guilty; `anomalies`, `optimisations` and `network` are the steps, `flow` makes them in order, `found` is
what they give. Used by ``trueup triage`` and `report`. No framework is imported here: all is measured in the command's own
processes, by the capture and the watch that there are.
"""

from trueup.analysis.triage.flow import triage
from trueup.analysis.triage.found import Outcome, Triage, Trial

__all__ = ["Outcome", "Triage", "Trial", "triage"]
