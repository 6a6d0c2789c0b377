"""What is known of logs and environments: a line that stopped a training, with its cause and what to do; the variables of two
machines."""

from trueup.migration.knowledge.explaining import Explanation, explain
from trueup.migration.knowledge.logs import Operators, operators

__all__ = ["Explanation", "Operators", "explain", "operators"]
