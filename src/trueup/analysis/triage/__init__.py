"""The three steps of a port's triage, over a command: float anomalies, compiler and fusion, whole network.

`table` reads the switches (``switches.toml``), `running` runs the command with some of them off. `optimisations`, the second step,
compares losses and finds the guilty switches. `triaging` has the other two, and takes all in order; `found` holds the results.
Used by ``trueup triage`` and `report`. No framework is imported: the capture and the watch measure in the command's own processes.
"""

from trueup.analysis.triage.running import Outcome, Triage, Trial
from trueup.analysis.triage.triaging import triage

__all__ = ["Outcome", "Triage", "Trial", "triage"]
