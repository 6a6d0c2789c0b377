"""The three steps of a port's triage, over a command: float anomalies, compiler and fusion, whole network.

`running` reads the switches (``switches.toml``), runs the command with some of them off, and holds the results; `triaging` takes
the three steps in order, of which the second compares losses and finds the guilty switches. Used by ``trueup triage`` and `report`.
No framework is imported: the capture and the watch measure in the command's own processes.
"""

from trueup.analysis.triage.running import Outcome, Triage, Trial
from trueup.analysis.triage.triaging import triage

__all__ = ["Outcome", "Triage", "Trial", "triage"]
